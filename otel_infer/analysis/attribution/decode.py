"""Decode steps by cause, for many requests at once. Pure; `blame` says what the causes mean.

Longer than a module should be: what one cause takes the next does not find, so all of them stand together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from otel_infer import semconv
from otel_infer.analysis.attribution.step_columns import _UNKNOWN, _Steps, _touched, _without_pauses
from otel_infer.assembly.engine.thread_delays import margin
from otel_infer.assembly.records.request import RequestRecord

MOST_INTERFERED = 16
"""Steps of one request, the worst ones, whose offenders are looked up."""


class StepsBlame(NamedTuple):
    """ns by cause, and the steps others interfered in: (step, ns)."""

    causes: dict[str, int]
    interfered: list[tuple[int, int]]


NOTHING = StepsBlame({}, [])
_CAUSES = (
    semconv.CAUSE_DECODE, semconv.CAUSE_BATCHING, semconv.CAUSE_INTERFERENCE, semconv.CAUSE_HOST,
    semconv.CAUSE_UNEXPLAINED,
)  # fmt: skip
_RECOMPUTED = {
    semconv.CAUSE_INTERFERENCE, semconv.CAUSE_HOST, semconv.CAUSE_UNEXPLAINED, semconv.CAUSE_FIRST_USE,
    semconv.CAUSE_PREFILL,
}  # fmt: skip
"""Of what a step was that brought a request back from a preemption, that is the preemption's."""
_SAT_OUT = "sat out"


def divide_decode(records: Sequence[RequestRecord]) -> list[StepsBlame]:
    """The time from the first known token to the last, step by step."""
    some = [i for i, record in enumerate(records) if record.steps is not None and len(record.steps) > 1]
    found = [NOTHING] * len(records)
    if some:
        for i, one in zip(some, _divided([records[i] for i in some])):
            found[i] = one
    return found


def _divided(records: list[RequestRecord]) -> list[StepsBlame]:
    steps = _Steps(records)
    ran, waited = steps.until - steps.began, steps.began - steps.since
    _without_pauses(records, steps, ran, waited)
    queued, prefill = _asked_again(records, steps, waited)
    own, batching, others, prompt, over, error = _by_cost(records, steps, ran)
    cold, no_prompts = _first_uses(records, steps, others + prompt)
    of_its_own = np.minimum(no_prompts, prompt[cold])
    prompt[cold] -= of_its_own
    others[cold] -= no_prompts - of_its_own
    back = _preempted(records, steps)
    held, idle = _held(records, steps, others, over, np.append(cold, back)), _idle(records, steps)
    stalled = over * (over > error)
    own += over - stalled
    columns = dict(zip(_CAUSES, (own, batching, others, waited, stalled)))
    if steps.own_prefill.any() or prefill.any():
        columns[semconv.CAUSE_PREFILL] = prompt + prefill
    if queued.any():
        columns[semconv.CAUSE_SCHEDULER_QUEUE] = queued
    if len(cold):
        columns[semconv.CAUSE_FIRST_USE] = first_use = _moved(cold, [stalled])
        first_use[cold] += no_prompts
    if held is not None:
        columns[semconv.CAUSE_STARVED], columns[semconv.CAUSE_FAULTS], share = held
        columns[semconv.CAUSE_BLOCKED] = _taken_as_blocked(stalled, share, idle)
    if idle is not None:
        _to_the_host(steps, columns, idle)
    _to_the_clocks(records, steps, columns)
    if len(back):
        whence = [column for cause, column in columns.items() if cause in _RECOMPUTED]
        columns[semconv.CAUSE_PREEMPTION] = _moved(back, whence)
    if not steps.is_next.all():
        columns[_SAT_OUT] = sat_out = waited * ~steps.is_next
        waited -= sat_out
    sums = np.array([np.add.reduceat(column, steps.begins) for column in columns.values()]).T.tolist()
    return [_summed(records[i], steps, others, i, dict(zip(columns, line))) for i, line in enumerate(sums)]


def _taken_as_blocked(stalled: Any, share: Any, idle: Any) -> Any:
    """This share of each stall is taken out of it; but who waits for a device that is at work is not kept by a lock."""
    blocked = (share * stalled).astype(np.int64)
    if idle is not None:
        blocked = np.where(idle < 0, blocked, np.minimum(blocked, idle))
    stalled -= blocked
    return blocked


def _moved(rows: Any, columns: list[Any]) -> Any:
    """A column of what these have in some rows, where they then have nothing."""
    moved = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        moved[rows] += column[rows]
        column[rows] = 0
    return moved


def _summed(record: RequestRecord, steps: _Steps, others: Any, i: int, sums: dict[str, int]) -> StepsBlame:
    """Who ran while the request sat out is not known where steps are missing; or else it was others."""
    whose = semconv.CAUSE_UNEXPLAINED if record.telemetry_lost else semconv.CAUSE_INTERFERENCE
    sums[whose] += sums.pop(_SAT_OUT, 0)
    known = {cause: length for cause, length in sums.items() if length > 0}
    return StepsBlame(known, _worst(steps, others, i) if semconv.CAUSE_INTERFERENCE in known else [])


def _by_cost(records: list[RequestRecord], steps: _Steps, ran: Any) -> tuple[Any, ...]:
    """What steps took, divided by what such steps cost: own, batching, over that with others' prompts and with its own, or without.

    Also: up to how much over that is within the error of the estimate.
    """
    # Where batches take turns, it waits for one of its own as long as those that are beside it take together.
    strides = [record.stride for record in records]
    costs = np.array([record.costs or _UNKNOWN for record in records]).T[:3] * strides
    base, each, spread = steps.repeated(costs)
    size = steps.size.astype(np.float64)
    # Of tokens that were speculated a sequence gets several.
    sequences = steps.repeated(np.array([[max(record.sequences, 1) for record in records]]))[0]
    alone = np.minimum(np.minimum(steps.tokens, sequences), size)
    typical = base + each * size
    over = np.maximum(ran - typical, 0).astype(np.int64)
    if steps.own_prefill.any():
        prompts = np.maximum(steps.prefill + steps.own_prefill, 1)
        others, prompt = (over * tokens // prompts for tokens in (steps.prefill, steps.own_prefill))
    else:  # a division by itself costs more than all the rest
        others, prompt = over * (steps.prefill > 0), np.zeros_like(over)
    rest = ran - others - prompt
    own = np.minimum(rest, base + each * alone).astype(np.int64)
    rest -= own
    batching = np.minimum(rest, each * (size - alone)).astype(np.int64)
    return own, batching, others, prompt, rest - batching, margin(typical, spread)


def _asked_again(records: list[RequestRecord], steps: _Steps, waited: Any) -> tuple[Any, Any]:
    """Takes out what who came to the engine once more waited for it, up to its first step: its queue, then its prompt."""
    queued, prefill = np.zeros((2, len(waited)), np.int64)
    for i, record in enumerate(records):
        if not record.absences:
            continue
        mine = steps.of(i)
        for _, until, scheduled_at in record.absences:
            row = mine.start + int(steps.until[mine].searchsorted(until, "right"))
            if row < mine.stop and scheduled_at:
                prefill[row] = min(waited[row], max(steps.began[row] - scheduled_at, 0))
                queued[row] = waited[row] - prefill[row]
                waited[row] = 0
    return queued, prefill


def _held(records: list[RequestRecord], steps: _Steps, others: Any, over: Any, unusual: Any) -> Any:
    """Takes out of both what the kernel knows the reason of, where a step is as usual: ns without a CPU, of page faults.

    Also: as which share of what is then left of a stall the thread was blocked. None where the kernel knows nothing.
    """
    touched = list(_touched(records, steps))
    if not touched:
        return None
    held, blocked, usual = np.zeros((2, len(over)), np.int64), np.zeros(len(over)), np.ones(len(over))
    usual[unusual] = 0
    for i, strain in touched:
        mine = steps.of(i)
        shares = strain.shares(steps.began[mine], steps.until[mine])
        known = np.array(shares[:2]) * usual[mine]
        blocked[mine] = shares.blocked * usual[mine]
        for column in (others, over):
            taken = (known * column[mine]).astype(np.int64)
            held[:, mine] += taken
            column[mine] -= taken.sum(axis=0)
    return *held, blocked


def _first_uses(records: list[RequestRecord], steps: _Steps, others: Any) -> tuple[Any, Any]:
    """The rows of steps that were the first of their kind, and what of `others` in them no prompt costs."""
    rows: list[int] = []
    over: list[int] = []
    for i, record in enumerate(records):
        if record.first_use is None:
            continue
        mine = steps.of(i)
        for at in record.first_use.among(steps.step[mine]):
            row = mine.start + at
            rows.append(row)
            prompts = int(steps.prefill[row] + steps.own_prefill[row])
            over.append(max(int(others[row] - record.first_use.at_most(prompts)), 0))
    return np.array(rows, np.int64), np.array(over, np.int64)


def _to_the_host(steps: _Steps, columns: dict[str, Any], idle: Any) -> None:
    """Moves what the device had nothing to do in, as far as no other reason is known: of what was too long, then of what is usual.

    A step that was not timed had as much of it as the median of the request's that were.
    """
    own, batching, others, host, stalled = (columns[cause] for cause in _CAUSES)
    device = own + batching + others + stalled + columns.get(semconv.CAUSE_PREFILL, 0)
    left = np.maximum(idle - (steps.until - steps.since - device), 0) * steps.is_next
    over = np.minimum(left, stalled)
    usual = np.minimum(left - over, own + batching)
    of_own = usual * own // np.maximum(own + batching, 1)
    for column, taken in ((stalled, over), (own, of_own), (batching, usual - of_own)):
        column -= taken
        host += taken


def _idle(records: list[RequestRecord], steps: _Steps) -> Any:
    """By step, -1 for requests of which no step was timed; None where no device was."""
    known = [(i, record.device_idle) for i, record in enumerate(records) if record.device_idle is not None]
    if not known:
        return None
    idle = np.full(len(steps.until), -1)
    for i, of_steps in known:
        of_steps = of_steps[1:]
        timed = of_steps[of_steps >= 0]
        if len(timed):
            idle[steps.of(i)] = np.where(of_steps < 0, int(np.median(timed)), of_steps)
    return idle


def _to_the_clocks(records: list[RequestRecord], steps: _Steps, columns: dict[str, Any]) -> None:
    """Moves what steps took too long while a device's clocks were held down, where it is known that the device was at them."""
    some = [(i, one.throttled_at) for i, one in enumerate(records) if one.device_idle is not None]
    if not any(throttled for _, throttled in some):
        return
    stalled = columns[semconv.CAUSE_UNEXPLAINED]
    slowed = columns[semconv.CAUSE_GPU_THROTTLED] = np.zeros_like(stalled)
    for i, throttled in some:
        mine = steps.of(i)
        for since, until in throttled:
            inside = (steps.began[mine] < until) & (steps.until[mine] > since)
            slowed[mine] += stalled[mine] * inside
            stalled[mine] *= ~inside


def _preempted(records: list[RequestRecord], steps: _Steps) -> Any:
    """The rows of steps in which a request came back from a preemption: the first that began after it."""
    rows = []
    for i, record in enumerate(records):
        if not record.preempted_at:
            continue
        mine = steps.of(i)
        for at in record.preempted_at:
            row = mine.start + int(steps.began[mine].searchsorted(at))
            if record.sequences > 1:  # its others go on: it is back when its prompt is computed again
                prompts = np.flatnonzero(steps.own_prefill[row : mine.stop])
                row = row + int(prompts[0]) if len(prompts) else mine.stop
            if steps.asked[i] < at and row < mine.stop:
                rows.append(row)
    return np.array(rows, np.int64)


def _worst(steps: _Steps, others: Any, i: int) -> list[tuple[int, int]]:
    mine = steps.of(i)
    lengths = others[mine]
    rows = np.flatnonzero(lengths)
    if len(rows) > MOST_INTERFERED:
        rows = rows[np.argpartition(lengths[rows], -MOST_INTERFERED)[-MOST_INTERFERED:]]
    return list(zip(steps.step[mine][rows].tolist(), lengths[rows].tolist()))
