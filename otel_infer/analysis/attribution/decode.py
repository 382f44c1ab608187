"""Decode steps by cause, for many requests at once. Pure; `blame` says what the causes mean.

Longer than a module should be: what one cause takes the next does not find, so all of them stand together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from otel_infer import semconv
from otel_infer.analysis.attribution.step_columns import (
    _UNKNOWN_COST,
    _DecodeSteps,
    _requests_with_delays,
    _subtract_pauses,
)
from otel_infer.assembly.engine.thread_delays import error_margin
from otel_infer.assembly.records.request import RequestRecord

MAX_INTERFERED_STEPS = 16
"""Steps of one request, the worst ones, whose offenders are looked up."""


class StepBreakdown(NamedTuple):
    """ns by cause, and the steps others interfered in: (step, ns)."""

    causes: dict[str, int]
    interfered_steps: list[tuple[int, int]]


EMPTY_BREAKDOWN = StepBreakdown({}, [])
_STEP_CAUSES = (
    semconv.CAUSE_DECODE, semconv.CAUSE_BATCHING, semconv.CAUSE_INTERFERENCE, semconv.CAUSE_HOST_BUBBLE,
    semconv.CAUSE_UNEXPLAINED,
)  # fmt: skip
_MOVED_TO_PREEMPTION = {
    semconv.CAUSE_INTERFERENCE, semconv.CAUSE_HOST_BUBBLE, semconv.CAUSE_UNEXPLAINED, semconv.CAUSE_WARMUP,
    semconv.CAUSE_PREFILL,
}  # fmt: skip
"""Of what a step was that brought a request back from a preemption, that is the preemption's."""
_OUT_OF_BATCH = "sat out"


def divide_decode(records: Sequence[RequestRecord]) -> list[StepBreakdown]:
    """The time from the first known token to the last, step by step."""
    some = [i for i, record in enumerate(records) if record.steps is not None and len(record.steps) > 1]
    found = [EMPTY_BREAKDOWN] * len(records)
    if some:
        for i, one in zip(some, _divide_steps([records[i] for i in some])):
            found[i] = one
    return found


def _divide_steps(records: list[RequestRecord]) -> list[StepBreakdown]:
    steps = _DecodeSteps(records)
    ran, waited = steps.until - steps.began, steps.began - steps.since
    _subtract_pauses(records, steps, ran, waited)
    queued, prefill = _split_resubmit_wait(records, steps, waited)
    own, batching, others, prompt, over, error = _split_by_cost(records, steps, ran)
    cold, no_prompts = _find_warmup_rows(records, steps, others + prompt)
    of_its_own = np.minimum(no_prompts, prompt[cold])
    prompt[cold] -= of_its_own
    others[cold] -= no_prompts - of_its_own
    back = _find_resumed_rows(records, steps)
    held, idle = (
        _take_thread_delays(records, steps, others, over, np.append(cold, back)),
        _collect_device_idle(records, steps),
    )
    stalled = over * (over > error)
    own += over - stalled
    columns = dict(zip(_STEP_CAUSES, (own, batching, others, waited, stalled)))
    if steps.own_prefill.any() or prefill.any():
        columns[semconv.CAUSE_PREFILL] = prompt + prefill
    if queued.any():
        columns[semconv.CAUSE_SCHEDULER_QUEUE] = queued
    if len(cold):
        columns[semconv.CAUSE_WARMUP] = first_use = _move_rows(cold, [stalled])
        first_use[cold] += no_prompts
    if held is not None:
        columns[semconv.CAUSE_STARVED], columns[semconv.CAUSE_PAGE_FAULTS], share = held
        columns[semconv.CAUSE_BLOCKED] = _move_to_blocked(stalled, share, idle)
    if idle is not None:
        _move_idle_to_host(steps, columns, idle)
    _move_to_gpu_throttled(records, steps, columns)
    if len(back):
        whence = [column for cause, column in columns.items() if cause in _MOVED_TO_PREEMPTION]
        columns[semconv.CAUSE_PREEMPTION] = _move_rows(back, whence)
    if not steps.is_consecutive.all():
        columns[_OUT_OF_BATCH] = sat_out = waited * ~steps.is_consecutive
        waited -= sat_out
    sums = np.array([np.add.reduceat(column, steps.begins) for column in columns.values()]).T.tolist()
    return [
        _sum_causes(records[i], steps, others, i, dict(zip(columns, line))) for i, line in enumerate(sums)
    ]


def _move_to_blocked(stalled: Any, share: Any, idle: Any) -> Any:
    """This share of each stall is taken out of it; but who waits for a device that is at work is not kept by a lock."""
    blocked = (share * stalled).astype(np.int64)
    if idle is not None:
        blocked = np.where(idle < 0, blocked, np.minimum(blocked, idle))
    stalled -= blocked
    return blocked


def _move_rows(rows: Any, columns: list[Any]) -> Any:
    """A column of what these have in some rows, where they then have nothing."""
    moved = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        moved[rows] += column[rows]
        column[rows] = 0
    return moved


def _sum_causes(
    record: RequestRecord, steps: _DecodeSteps, others: Any, i: int, sums: dict[str, int]
) -> StepBreakdown:
    """Who ran while the request sat out is not known where steps are missing; or else it was others."""
    whose = semconv.CAUSE_UNEXPLAINED if record.telemetry_lost else semconv.CAUSE_INTERFERENCE
    sums[whose] += sums.pop(_OUT_OF_BATCH, 0)
    known = {cause: length for cause, length in sums.items() if length > 0}
    return StepBreakdown(
        known, _select_worst_steps(steps, others, i) if semconv.CAUSE_INTERFERENCE in known else []
    )


def _split_by_cost(records: list[RequestRecord], steps: _DecodeSteps, ran: Any) -> tuple[Any, ...]:
    """What steps took, divided by what such steps cost: own, batching, over that with others' prompts and with its own, or without.

    Also: up to how much over that is within the error of the estimate.
    """
    # Where batches take turns, it waits for one of its own as long as those that are beside it take together.
    strides = [record.step_stride for record in records]
    costs = np.array([record.cost_model or _UNKNOWN_COST for record in records]).T[:3] * strides
    base, each, spread = steps.repeat_per_step(costs)
    size = steps.size.astype(np.float64)
    # Of tokens that were speculated a sequence gets several.
    sequences = steps.repeat_per_step(np.array([[max(record.sequences, 1) for record in records]]))[0]
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
    return own, batching, others, prompt, rest - batching, error_margin(typical, spread)


def _split_resubmit_wait(records: list[RequestRecord], steps: _DecodeSteps, waited: Any) -> tuple[Any, Any]:
    """Takes out what who came to the engine once more waited for it, up to its first step: its queue, then its prompt."""
    queued, prefill = np.zeros((2, len(waited)), np.int64)
    for i, record in enumerate(records):
        if not record.generation_gaps:
            continue
        mine = steps.decode_slice(i)
        for _, until, scheduled_at in record.generation_gaps:
            row = mine.start + int(steps.until[mine].searchsorted(until, "right"))
            if row < mine.stop and scheduled_at:
                prefill[row] = min(waited[row], max(steps.began[row] - scheduled_at, 0))
                queued[row] = waited[row] - prefill[row]
                waited[row] = 0
    return queued, prefill


def _take_thread_delays(
    records: list[RequestRecord], steps: _DecodeSteps, others: Any, over: Any, unusual: Any
) -> Any:
    """Takes out of both what the kernel knows the reason of, where a step is as usual: ns without a CPU, of page faults.

    Also: as which share of what is then left of a stall the thread was blocked. None where the kernel knows nothing.
    """
    touched = list(_requests_with_delays(records, steps))
    if not touched:
        return None
    held, blocked, usual = np.zeros((2, len(over)), np.int64), np.zeros(len(over)), np.ones(len(over))
    usual[unusual] = 0
    for i, strain in touched:
        mine = steps.decode_slice(i)
        shares = strain.delay_shares(steps.began[mine], steps.until[mine])
        known = np.array(shares[:2]) * usual[mine]
        blocked[mine] = shares.blocked * usual[mine]
        for column in (others, over):
            taken = (known * column[mine]).astype(np.int64)
            held[:, mine] += taken
            column[mine] -= taken.sum(axis=0)
    return *held, blocked


def _find_warmup_rows(records: list[RequestRecord], steps: _DecodeSteps, others: Any) -> tuple[Any, Any]:
    """The rows of steps that were the first of their kind, and what of `others` in them no prompt costs."""
    rows: list[int] = []
    over: list[int] = []
    for i, record in enumerate(records):
        if record.warmup_steps is None:
            continue
        mine = steps.decode_slice(i)
        for at in record.warmup_steps.find_rows(steps.step[mine]):
            row = mine.start + at
            rows.append(row)
            prompts = int(steps.prefill[row] + steps.own_prefill[row])
            over.append(max(int(others[row] - record.warmup_steps.max_prompt_cost(prompts)), 0))
    return np.array(rows, np.int64), np.array(over, np.int64)


def _move_idle_to_host(steps: _DecodeSteps, columns: dict[str, Any], idle: Any) -> None:
    """Moves what the device had nothing to do in, as far as no other reason is known: of what was too long, then of what is usual.

    A step that was not timed had as much of it as the median of the request's that were.
    """
    own, batching, others, host, stalled = (columns[cause] for cause in _STEP_CAUSES)
    device = own + batching + others + stalled + columns.get(semconv.CAUSE_PREFILL, 0)
    left = np.maximum(idle - (steps.until - steps.since - device), 0) * steps.is_consecutive
    over = np.minimum(left, stalled)
    usual = np.minimum(left - over, own + batching)
    of_own = usual * own // np.maximum(own + batching, 1)
    for column, taken in ((stalled, over), (own, of_own), (batching, usual - of_own)):
        column -= taken
        host += taken


def _collect_device_idle(records: list[RequestRecord], steps: _DecodeSteps) -> Any:
    """By step, -1 for requests of which no step was timed; None where no device was."""
    known = [(i, record.device_idle) for i, record in enumerate(records) if record.device_idle is not None]
    if not known:
        return None
    idle = np.full(len(steps.until), -1)
    for i, of_steps in known:
        of_steps = of_steps[1:]
        timed = of_steps[of_steps >= 0]
        if len(timed):
            idle[steps.decode_slice(i)] = np.where(of_steps < 0, int(np.median(timed)), of_steps)
    return idle


def _move_to_gpu_throttled(
    records: list[RequestRecord], steps: _DecodeSteps, columns: dict[str, Any]
) -> None:
    """Moves what steps took too long while a device's clocks were held down, where it is known that the device was at them."""
    some = [(i, one.gpu_throttled_at) for i, one in enumerate(records) if one.device_idle is not None]
    if not any(throttled for _, throttled in some):
        return
    stalled = columns[semconv.CAUSE_UNEXPLAINED]
    slowed = columns[semconv.CAUSE_GPU_THROTTLED] = np.zeros_like(stalled)
    for i, throttled in some:
        mine = steps.decode_slice(i)
        for since, until in throttled:
            inside = (steps.began[mine] < until) & (steps.until[mine] > since)
            slowed[mine] += stalled[mine] * inside
            stalled[mine] *= ~inside


def _find_resumed_rows(records: list[RequestRecord], steps: _DecodeSteps) -> Any:
    """The rows of steps in which a request came back from a preemption: the first that began after it."""
    rows = []
    for i, record in enumerate(records):
        if not record.preempted_at:
            continue
        mine = steps.decode_slice(i)
        for at in record.preempted_at:
            row = mine.start + int(steps.began[mine].searchsorted(at))
            if record.sequences > 1:  # its others go on: it is back when its prompt is computed again
                prompts = np.flatnonzero(steps.own_prefill[row : mine.stop])
                row = row + int(prompts[0]) if len(prompts) else mine.stop
            if steps.first_step_started_at[i] < at and row < mine.stop:
                rows.append(row)
    return np.array(rows, np.int64)


def _select_worst_steps(steps: _DecodeSteps, others: Any, i: int) -> list[tuple[int, int]]:
    mine = steps.decode_slice(i)
    lengths = others[mine]
    rows = np.flatnonzero(lengths)
    if len(rows) > MAX_INTERFERED_STEPS:
        rows = rows[np.argpartition(lengths[rows], -MAX_INTERFERED_STEPS)[-MAX_INTERFERED_STEPS:]]
    return list(zip(steps.step[mine][rows].tolist(), lengths[rows].tolist()))
