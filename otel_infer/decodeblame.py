"""Decode steps by cause, for many requests at once. Pure; `blame` says what the causes mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from otel_infer import semconv
from otel_infer.records import Pause, RequestRecord
from otel_infer.strain import is_stalled

MOST_INTERFERED = 16
"""Steps of one request, the worst ones, whose offenders are looked up."""
_UNKNOWN = 1 << 60


class DecodeBlame(NamedTuple):
    """ns by cause, and the steps others interfered in: (step, ns)."""

    causes: dict[str, int]
    interfered: list[tuple[int, int]]


NOTHING = DecodeBlame({}, [])
_CAUSES = (
    semconv.CAUSE_DECODE, semconv.CAUSE_BATCHING, semconv.CAUSE_INTERFERENCE, semconv.CAUSE_PREEMPTION,
    semconv.CAUSE_HOST, semconv.CAUSE_UNEXPLAINED, semconv.CAUSE_FIRST_USE, semconv.CAUSE_STARVED,
    semconv.CAUSE_FAULTS, semconv.CAUSE_BLOCKED,
)  # fmt: skip


def divided(records: Sequence[RequestRecord]) -> list[DecodeBlame]:
    """The time from the first known token to the last, step by step."""
    some = [i for i, record in enumerate(records) if record.steps is not None and len(record.steps) > 1]
    found = [NOTHING] * len(records)
    if some:
        for i, one in zip(some, _divided([records[i] for i in some])):
            found[i] = one
    return found


def placed(record: RequestRecord) -> Sequence[Pause]:
    """The pauses of which it is known which steps they held up.

    Of throttling it is known how much there was, roughly, and not when; where the kernel tells how long the engine's thread
    had no CPU, that is the better word for its steps.
    """
    if record.strain is None:
        return record.pauses
    return [pause for pause in record.pauses if pause.cause != semconv.CAUSE_THROTTLED]


class _Steps:
    """The decode steps of all requests as columns. `begins`: where each request's are."""

    def __init__(self, records: list[RequestRecord]) -> None:
        tables = [record.steps.table for record in records if record.steps is not None]
        self.counts = np.array([table.shape[1] - 1 for table in tables])
        self.begins = np.cumsum(self.counts) - self.counts
        self.owner = np.repeat(np.arange(len(tables)), self.counts)
        step, started, ended, tokens, size, prefill = np.concatenate(tables, axis=1)
        later = np.ones(len(step), bool)
        later[self.begins + np.arange(len(tables))] = False  # the first row of each is its prefill's
        self.step, self.tokens, self.size, self.prefill = (
            step[later],
            tokens[later],
            size[later],
            prefill[later],
        )
        self.since, self.until = ended[:-1][later[1:]], ended[later]
        self.began = np.clip(started[later], self.since, self.until)
        self.next = self.step - step[:-1][later[1:]] == 1


def _divided(records: list[RequestRecord]) -> list[DecodeBlame]:
    steps = _Steps(records)
    base, each, spread = _costs(records, steps)
    ran, waited = steps.until - steps.began, steps.began - steps.since
    _without_pauses(records, steps, ran, waited)
    typical = base + each * steps.size
    own, batching, others, over = _by_cost(steps, ran, base, each)
    cold, no_prompts = _first_uses(records, steps, others)
    others -= no_prompts
    preempted = _preempted(records, steps)
    held, blocked = _held(records, steps, others, over, ~(cold | preempted))
    stalled = is_stalled(over, typical, spread)
    own += np.where(stalled, 0, over)
    first_use = np.where(stalled & cold, over, 0) + no_prompts
    unexplained = np.where(stalled & ~cold, over, 0)
    blocked = (blocked * unexplained).astype(np.int64)
    unexplained -= blocked
    recomputed = np.where(preempted, others + unexplained + first_use + waited, 0)
    others, unexplained, first_use = (
        np.where(preempted, 0, some) for some in (others, unexplained, first_use)
    )
    holes = np.array([record.telemetry_lost for record in records])[steps.owner] & ~steps.next & ~preempted
    host = np.where(steps.next & ~preempted, waited, 0)
    skipped = np.where(~steps.next & ~preempted & ~holes, waited, 0)
    unexplained += np.where(holes, waited, 0)
    columns = (own, batching, others + skipped, recomputed, host, unexplained, first_use, *held, blocked)
    sums = np.array([np.add.reduceat(column, steps.begins) for column in columns]).T.tolist()
    return [
        DecodeBlame(dict(zip(_CAUSES, line)), _worst(steps, others, i) if line[2] else [])
        for i, line in enumerate(sums)
    ]


def _costs(records: list[RequestRecord], steps: _Steps) -> list[Any]:
    """What is known of the cost of each step, as columns: base, per sequence, spread."""
    costs = [record.costs for record in records]
    return [
        np.array([getattr(cost, name) if cost is not None else default for cost in costs])[steps.owner]
        for name, default in (("base", _UNKNOWN), ("per_sequence", 0.0), ("spread", 0.0))
    ]


def _by_cost(steps: _Steps, ran: Any, base: Any, each: Any) -> tuple[Any, Any, Any, Any]:
    """What steps took, divided by what such steps cost: own, batching, over that with others' prompts, over that without."""
    others = np.where(steps.prefill > 0, np.maximum(ran - base - each * steps.size, 0), 0).astype(np.int64)
    rest = ran - others
    own = np.minimum(rest, base + each * np.minimum(steps.tokens, steps.size)).astype(np.int64)
    batching = np.minimum(rest - own, each * np.maximum(steps.size - steps.tokens, 0)).astype(np.int64)
    return own, batching, others, rest - own - batching


def _without_pauses(records: list[RequestRecord], steps: _Steps, ran: Any, waited: Any) -> None:
    """Takes what the process was held up out of the steps it happened in."""
    for i, record in enumerate(records):
        pauses = placed(record)
        if not pauses:
            continue
        mine = slice(int(steps.begins[i]), int(steps.begins[i] + steps.counts[i]))
        since, began, until = steps.since[mine], steps.began[mine], steps.until[mine]
        told = record.arrived_at
        for pause in sorted(pauses):
            begin, end = max(pause.started_at, told), pause.ended_at  # of pauses that overlap, each ns once
            told = max(told, end)
            if begin < end:
                waited[mine] -= np.maximum(np.minimum(began, end) - np.maximum(since, begin), 0)
                ran[mine] -= np.maximum(np.minimum(until, end) - np.maximum(began, begin), 0)


def _held(records: list[RequestRecord], steps: _Steps, others: Any, over: Any, usual: Any) -> tuple[Any, Any]:
    """Takes out of both what the kernel knows the reason of, where a step is as usual: (lines: without a CPU, page faults; ns).

    Also: as which share of what is then left of a stall the thread was blocked.
    """
    held, blocked = np.zeros((2, len(steps.step)), np.int64), np.zeros(len(steps.step))
    for i, record in enumerate(records):
        mine = slice(int(steps.begins[i]), int(steps.begins[i] + steps.counts[i]))
        since, began, until = steps.since[mine], steps.began[mine], steps.until[mine]
        if record.strain is None or not record.strain.touches(int(since[0]), int(until[-1])):
            continue
        shares = record.strain.shares(began, until)
        known = np.array(shares[:2]) * usual[mine]
        blocked[mine] = shares.blocked * usual[mine]
        for column in (others, over):
            taken = (known * column[mine]).astype(np.int64)
            held[:, mine] += taken
            column[mine] -= taken.sum(axis=0)
    return held, blocked


def _first_uses(records: list[RequestRecord], steps: _Steps, others: Any) -> tuple[Any, Any]:
    """Which steps were the first of their kind, and what of `others` in them no prompt costs."""
    cold, over = np.zeros(len(steps.step), bool), np.zeros(len(steps.step), np.int64)
    for i, record in enumerate(records):
        begin, end = int(steps.begins[i]), int(steps.begins[i] + steps.counts[i])
        found = record.first_use.among(steps.step[begin:end]) if record.first_use is not None else None
        if record.first_use is None or found is None:
            continue
        cold[begin:end] = found
        for row in begin + np.flatnonzero(found):
            over[row] = max(others[row] - record.first_use.at_most(int(steps.prefill[row])), 0)
    return cold, over


def _preempted(records: list[RequestRecord], steps: _Steps) -> Any:
    """In which steps, or before which, a request came back from a preemption."""
    found = np.zeros(len(steps.step), bool)
    for i, record in enumerate(records):
        begin, end = int(steps.begins[i]), int(steps.begins[i] + steps.counts[i])
        for at in record.preempted_at:
            row = begin + int(steps.until[begin:end].searchsorted(at))
            if row < end:
                found[row] = True
    return found


def _worst(steps: _Steps, others: Any, i: int) -> list[tuple[int, int]]:
    begin, end = int(steps.begins[i]), int(steps.begins[i] + steps.counts[i])
    lengths = others[begin:end]
    rows = np.flatnonzero(lengths)
    if len(rows) > MOST_INTERFERED:
        rows = rows[np.argpartition(lengths[rows], -MOST_INTERFERED)[-MOST_INTERFERED:]]
    return list(zip(steps.step[begin:end][rows].tolist(), lengths[rows].tolist()))
