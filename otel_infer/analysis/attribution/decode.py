"""Divides decode steps by cause, for many requests at once. Pure; `semconv.causes` defines the causes.

The functions stay in one module because their order matters: time that one cause takes is gone for the next.
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
"""Steps of one request whose interferers are looked up: the steps with the most interference."""


class StepBreakdown(NamedTuple):
    """ns by cause, and the steps with interference as (step, ns)."""

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
"""Causes that become `preemption` in the step that resumed a preempted request."""
_OUT_OF_BATCH = "sat out"
"""Key of the time between two steps that are not consecutive, until its cause is known."""


def divide_decode(records: Sequence[RequestRecord]) -> list[StepBreakdown]:
    """Returns for each record the breakdown of the time from its first known token to its last, by step."""
    decoding = [i for i, record in enumerate(records) if record.steps is not None and len(record.steps) > 1]
    breakdowns = [EMPTY_BREAKDOWN] * len(records)
    if decoding:
        for i, breakdown in zip(decoding, _divide_steps([records[i] for i in decoding])):
            breakdowns[i] = breakdown
    return breakdowns


def _divide_steps(records: list[RequestRecord]) -> list[StepBreakdown]:
    steps = _DecodeSteps(records)
    ran, waited = steps.until - steps.began, steps.began - steps.since
    _subtract_pauses(records, steps, ran, waited)
    queued, prefill = _split_resubmit_wait(records, steps, waited)
    own, batching, others, prompt, over, error = _split_by_cost(records, steps, ran)
    warmup_rows, warmup_ns = _find_warmup_rows(records, steps, others + prompt)
    from_own_prefill = np.minimum(warmup_ns, prompt[warmup_rows])
    prompt[warmup_rows] -= from_own_prefill
    others[warmup_rows] -= warmup_ns - from_own_prefill
    resumed_rows = _find_resumed_rows(records, steps)
    delays, idle = (
        _take_thread_delays(records, steps, others, over, np.append(warmup_rows, resumed_rows)),
        _collect_device_idle(records, steps),
    )
    stalled = over * (over > error)
    own += over - stalled
    columns = dict(zip(_STEP_CAUSES, (own, batching, others, waited, stalled)))
    if steps.own_prefill.any() or prefill.any():
        columns[semconv.CAUSE_PREFILL] = prompt + prefill
    if queued.any():
        columns[semconv.CAUSE_SCHEDULER_QUEUE] = queued
    if len(warmup_rows):
        columns[semconv.CAUSE_WARMUP] = warmup = _move_rows(warmup_rows, [stalled])
        warmup[warmup_rows] += warmup_ns
    if delays is not None:
        columns[semconv.CAUSE_STARVED], columns[semconv.CAUSE_PAGE_FAULTS], share = delays
        columns[semconv.CAUSE_BLOCKED] = _move_to_blocked(stalled, share, idle)
    if idle is not None:
        _move_idle_to_host(steps, columns, idle)
    _move_to_gpu_throttled(records, steps, columns)
    if len(resumed_rows):
        moved = [column for cause, column in columns.items() if cause in _MOVED_TO_PREEMPTION]
        columns[semconv.CAUSE_PREEMPTION] = _move_rows(resumed_rows, moved)
    if not steps.is_consecutive.all():
        columns[_OUT_OF_BATCH] = sat_out = waited * ~steps.is_consecutive
        waited -= sat_out
    sums = np.array([np.add.reduceat(column, steps.begins) for column in columns.values()]).T.tolist()
    return [_sum_causes(records[i], steps, others, i, dict(zip(columns, row))) for i, row in enumerate(sums)]


def _move_to_blocked(stalled: Any, blocked_share: Any, idle: Any) -> Any:
    """Moves a share of each stall to `blocked`, out of `stalled`.

    Where device idle time is known, it is the limit: a thread that waits for a busy device is not blocked by
    a lock.
    """
    blocked = (blocked_share * stalled).astype(np.int64)
    if idle is not None:
        blocked = np.where(idle < 0, blocked, np.minimum(blocked, idle))
    stalled -= blocked
    return blocked


def _move_rows(rows: Any, columns: list[Any]) -> Any:
    """Moves the sum of the columns in these rows to a new column and returns it; the columns become 0 there."""
    moved = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        moved[rows] += column[rows]
        column[rows] = 0
    return moved


def _sum_causes(
    record: RequestRecord, steps: _DecodeSteps, others: Any, i: int, sums: dict[str, int]
) -> StepBreakdown:
    """Returns the breakdown of one request. Time in which it was not scheduled is interference.

    Where steps are missing from the log, it is `unexplained`, because other requests need not have run.
    """
    unscheduled_cause = semconv.CAUSE_UNEXPLAINED if record.telemetry_lost else semconv.CAUSE_INTERFERENCE
    sums[unscheduled_cause] += sums.pop(_OUT_OF_BATCH, 0)
    known = {cause: length for cause, length in sums.items() if length > 0}
    return StepBreakdown(
        known, _select_worst_steps(steps, others, i) if semconv.CAUSE_INTERFERENCE in known else []
    )


def _split_by_cost(records: list[RequestRecord], steps: _DecodeSteps, ran: Any) -> tuple[Any, ...]:
    """Divides the run time of steps by the cost model.

    Returns own decode, batching, excess with other requests' prompts, excess with own prompts, other excess,
    and the error margin of the estimate.
    """
    # With pipeline parallelism, `step_stride` steps are in flight, and one of them is the request's.
    # It lasts as long as all of them take together.
    strides = [record.step_stride for record in records]
    costs = np.array([record.cost_model or _UNKNOWN_COST for record in records]).T[:3] * strides
    base, per_sequence, spread = steps.repeat_per_step(costs)
    size = steps.size.astype(np.float64)
    # With speculative decoding, a sequence gets several tokens in a step.
    sequences = steps.repeat_per_step(np.array([[max(record.sequences, 1) for record in records]]))[0]
    alone = np.minimum(np.minimum(steps.tokens, sequences), size)
    typical = base + per_sequence * size
    over = np.maximum(ran - typical, 0).astype(np.int64)
    if steps.own_prefill.any():
        prompts = np.maximum(steps.prefill + steps.own_prefill, 1)
        others, prompt = (over * tokens // prompts for tokens in (steps.prefill, steps.own_prefill))
    else:  # saves a division, which costs more than the rest of this function
        others, prompt = over * (steps.prefill > 0), np.zeros_like(over)
    rest = ran - others - prompt
    own = np.minimum(rest, base + per_sequence * alone).astype(np.int64)
    rest -= own
    batching = np.minimum(rest, per_sequence * (size - alone)).astype(np.int64)
    return own, batching, others, prompt, rest - batching, error_margin(typical, spread)


def _split_resubmit_wait(records: list[RequestRecord], steps: _DecodeSteps, waited: Any) -> tuple[Any, Any]:
    """Moves the wait before the first step after each generation gap out of `waited`.

    Returns it as two columns, ns: time in the queue, and prefill from when it was scheduled until the step
    began.
    """
    queued, prefill = np.zeros((2, len(waited)), np.int64)
    for i, record in enumerate(records):
        if not record.generation_gaps:
            continue
        own_rows = steps.decode_slice(i)
        for _, until, scheduled_at in record.generation_gaps:
            row = own_rows.start + int(steps.until[own_rows].searchsorted(until, "right"))
            if row < own_rows.stop and scheduled_at:
                prefill[row] = min(waited[row], max(steps.began[row] - scheduled_at, 0))
                queued[row] = waited[row] - prefill[row]
                waited[row] = 0
    return queued, prefill


def _take_thread_delays(
    records: list[RequestRecord], steps: _DecodeSteps, others: Any, over: Any, unusual: Any
) -> Any:
    """Subtracts what thread delays explain from `others` and `over`, except in the `unusual` rows.

    Returns ns without a CPU, ns of page faults, and the share of the remaining stall in which the thread was
    blocked. None where no request has thread delays.
    """
    delayed = list(_requests_with_delays(records, steps))
    if not delayed:
        return None
    explained, blocked, usual = np.zeros((2, len(over)), np.int64), np.zeros(len(over)), np.ones(len(over))
    usual[unusual] = 0
    for i, delays in delayed:
        own_rows = steps.decode_slice(i)
        shares = delays.delay_shares(steps.began[own_rows], steps.until[own_rows])
        known = np.array(shares[:2]) * usual[own_rows]
        blocked[own_rows] = shares.blocked * usual[own_rows]
        for column in (others, over):
            taken = (known * column[own_rows]).astype(np.int64)
            explained[:, own_rows] += taken
            column[own_rows] -= taken.sum(axis=0)
    return *explained, blocked


def _find_warmup_rows(records: list[RequestRecord], steps: _DecodeSteps, others: Any) -> tuple[Any, Any]:
    """Returns the rows of warmup steps, and how much of `others` in each exceeds the cost of its prompts, ns."""
    rows: list[int] = []
    excess: list[int] = []
    for i, record in enumerate(records):
        if record.warmup_steps is None:
            continue
        own_rows = steps.decode_slice(i)
        for offset in record.warmup_steps.find_rows(steps.step[own_rows]):
            row = own_rows.start + offset
            rows.append(row)
            prompts = int(steps.prefill[row] + steps.own_prefill[row])
            excess.append(max(int(others[row] - record.warmup_steps.max_prompt_cost(prompts)), 0))
    return np.array(rows, np.int64), np.array(excess, np.int64)


def _move_idle_to_host(steps: _DecodeSteps, columns: dict[str, Any], idle: Any) -> None:
    """Moves the idle time of the device that has no other known cause to `host_bubble`.

    It is taken from the unexplained excess first, then from own decode and batching.
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
    """Returns the idle time of the device by step, ns. None where no request was timed on a device.

    -1 for requests without a timed step. Untimed steps of other requests get the median of their timed steps.
    """
    timed_requests = [
        (i, record.device_idle) for i, record in enumerate(records) if record.device_idle is not None
    ]
    if not timed_requests:
        return None
    idle = np.full(len(steps.until), -1)
    for i, step_idle in timed_requests:
        step_idle = step_idle[1:]
        timed = step_idle[step_idle >= 0]
        if len(timed):
            idle[steps.decode_slice(i)] = np.where(step_idle < 0, int(np.median(timed)), step_idle)
    return idle


def _move_to_gpu_throttled(
    records: list[RequestRecord], steps: _DecodeSteps, columns: dict[str, Any]
) -> None:
    """Moves the unexplained excess of steps during GPU throttling to `gpu_throttled`.

    Only for requests with device times, because other requests may not have run on the GPU.
    """
    timed = [
        (i, record.gpu_throttled_at) for i, record in enumerate(records) if record.device_idle is not None
    ]
    if not any(throttled for _, throttled in timed):
        return
    stalled = columns[semconv.CAUSE_UNEXPLAINED]
    slowed = columns[semconv.CAUSE_GPU_THROTTLED] = np.zeros_like(stalled)
    for i, throttled in timed:
        own_rows = steps.decode_slice(i)
        for since, until in throttled:
            inside = (steps.began[own_rows] < until) & (steps.until[own_rows] > since)
            slowed[own_rows] += stalled[own_rows] * inside
            stalled[own_rows] *= ~inside


def _find_resumed_rows(records: list[RequestRecord], steps: _DecodeSteps) -> Any:
    """Returns the rows of the steps that resumed a preempted request: the first after each preemption."""
    rows = []
    for i, record in enumerate(records):
        if not record.preempted_at:
            continue
        own_rows = steps.decode_slice(i)
        for preempted_at in record.preempted_at:
            row = own_rows.start + int(steps.began[own_rows].searchsorted(preempted_at))
            # Its other sequences continue, so it resumes when a prompt of it is computed again.
            if record.sequences > 1:
                prompts = np.flatnonzero(steps.own_prefill[row : own_rows.stop])
                row = row + int(prompts[0]) if len(prompts) else own_rows.stop
            if steps.first_step_started_at[i] < preempted_at and row < own_rows.stop:
                rows.append(row)
    return np.array(rows, np.int64)


def _select_worst_steps(steps: _DecodeSteps, others: Any, i: int) -> list[tuple[int, int]]:
    own_rows = steps.decode_slice(i)
    lengths = others[own_rows]
    rows = np.flatnonzero(lengths)
    if len(rows) > MAX_INTERFERED_STEPS:
        rows = rows[np.argpartition(lengths[rows], -MAX_INTERFERED_STEPS)[-MAX_INTERFERED_STEPS:]]
    return list(zip(steps.step[own_rows][rows].tolist(), lengths[rows].tolist()))
