"""Divides decode steps by cause, for many requests at once. Pure; `semconv.causes` defines the causes.

The moves between causes stay in one module because their order matters. Time that one cause takes is gone for
the next.
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
from otel_infer.analysis.attribution.step_costs import StepCosts, split_by_cost
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
_UNSCHEDULED = "unscheduled"
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
    columns = _build_columns(records, steps)
    interference_ns = columns[semconv.CAUSE_INTERFERENCE]
    sums = np.array([np.add.reduceat(column, steps.begins) for column in columns.values()]).T.tolist()
    return [
        _sum_causes(records[i], steps, interference_ns, i, dict(zip(columns, row)))
        for i, row in enumerate(sums)
    ]


def _build_columns(records: list[RequestRecord], steps: _DecodeSteps) -> dict[str, Any]:
    """Returns the ns of each step by cause. Each move takes time out of the columns before it, in place."""
    ran = steps.until - steps.began
    waited = steps.began - steps.since
    _subtract_pauses(records, steps, ran, waited)
    queued, prefill = _split_resubmit_wait(records, steps, waited)
    costs = split_by_cost(records, steps, ran)
    warmup_rows, warmup_ns = _take_warmup(records, steps, costs)
    resumed_rows = _find_resumed_rows(records, steps)
    delays = _take_thread_delays(records, steps, costs, np.append(warmup_rows, resumed_rows))
    idle = _collect_device_idle(records, steps)
    columns = _name_columns(costs, waited)
    if steps.own_prefill.any() or prefill.any():
        columns[semconv.CAUSE_PREFILL] = costs.own_prefill_ns + prefill
    if queued.any():
        columns[semconv.CAUSE_SCHEDULER_QUEUE] = queued
    _move_stalls(columns, warmup_rows, warmup_ns, delays, idle)
    _move_to_batching(records, steps, columns)
    if idle is not None:
        _move_idle_to_host(steps, columns, idle)
    _move_to_gpu_throttled(records, steps, columns)
    if len(resumed_rows):
        moved = [column for cause, column in columns.items() if cause in _MOVED_TO_PREEMPTION]
        columns[semconv.CAUSE_PREEMPTION] = _move_rows(resumed_rows, moved)
    if not steps.is_consecutive.all():
        columns[_UNSCHEDULED] = waited * ~steps.is_consecutive
        waited -= columns[_UNSCHEDULED]
    return columns


def _name_columns(costs: StepCosts, waited: Any) -> dict[str, Any]:
    """Returns the columns of `_STEP_CAUSES`. An excess within the error margin is the request's own."""
    stalled = costs.excess_ns * (costs.excess_ns > costs.error_ns)
    own_ns = costs.own_ns
    own_ns += costs.excess_ns - stalled
    return dict(zip(_STEP_CAUSES, (own_ns, costs.batching_ns, costs.interference_ns, waited, stalled)))


def _move_stalls(
    columns: dict[str, Any], warmup_rows: Any, warmup_ns: Any, delays: _ThreadDelayColumns | None, idle: Any
) -> None:
    """Moves stalls to `warmup`, `blocked` and `ran_longer`, and adds what warmup and thread delays took before."""
    stalled = columns[semconv.CAUSE_UNEXPLAINED]
    if len(warmup_rows):
        columns[semconv.CAUSE_WARMUP] = warmup = _move_rows(warmup_rows, [stalled])
        warmup[warmup_rows] += warmup_ns
    if delays is not None:
        columns[semconv.CAUSE_STARVED] = delays.starved_ns
        columns[semconv.CAUSE_PAGE_FAULTS] = delays.faulted_ns
        longer = _take_longer_runs(stalled, delays.longer_share, idle)
        columns[semconv.CAUSE_BLOCKED] = _move_to_blocked(stalled, delays.blocked_share, idle)
        columns[semconv.CAUSE_RAN_LONGER] = longer = np.minimum(longer, stalled)
        stalled -= longer


def _move_to_batching(records: list[RequestRecord], steps: _DecodeSteps, columns: dict[str, Any]) -> None:
    """Moves `ran_longer` to `batching` in batches that are larger than any whose cost is known."""
    longer = columns.get(semconv.CAUSE_RAN_LONGER)
    if longer is None or not longer.any():
        return
    largest = [(record.cost_model or _UNKNOWN_COST).max_size for record in records]
    moved = longer * (steps.size > steps.repeat_per_step(np.array([largest]))[0])
    longer -= moved
    columns[semconv.CAUSE_BATCHING] += moved


def _take_longer_runs(stalled: Any, longer_share: Any, idle: Any) -> Any:
    """Returns the part of each stall in which the engine's thread was on a CPU longer than usual; none on a timed device."""
    longer = (longer_share * stalled).astype(np.int64)
    return longer if idle is None else np.where(idle < 0, longer, 0)


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
    record: RequestRecord, steps: _DecodeSteps, interference_ns: Any, i: int, sums: dict[str, int]
) -> StepBreakdown:
    """Returns the breakdown of one request. Time in which it was not scheduled is interference.

    Where steps are missing from the log, it is `unexplained`, because other requests need not have run.
    """
    unscheduled_cause = semconv.CAUSE_UNEXPLAINED if record.telemetry_lost else semconv.CAUSE_INTERFERENCE
    sums[unscheduled_cause] += sums.pop(_UNSCHEDULED, 0)
    known = {cause: length for cause, length in sums.items() if length > 0}
    return StepBreakdown(
        known, _select_worst_steps(steps, interference_ns, i) if semconv.CAUSE_INTERFERENCE in known else []
    )


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


class _ThreadDelayColumns(NamedTuple):
    """The part of each step that thread delays explain: ns without a CPU, ns of page faults.

    `blocked_share`, `longer_share`: the shares of the remaining stall in which the thread was blocked, and in which it
    was on a CPU longer than usual.
    """

    starved_ns: Any
    faulted_ns: Any
    blocked_share: Any
    longer_share: Any


def _take_thread_delays(
    records: list[RequestRecord], steps: _DecodeSteps, costs: StepCosts, unusual: Any
) -> _ThreadDelayColumns | None:
    """Takes what thread delays explain out of interference and excess, except in the `unusual` rows.

    None where no request has thread delays.
    """
    delayed = list(_requests_with_delays(records, steps))
    if not delayed:
        return None
    number = len(costs.excess_ns)
    explained = np.zeros((2, number), np.int64)
    blocked, longer = np.zeros((2, number))
    usual = np.ones(number)
    usual[unusual] = 0
    for i, delays in delayed:
        own_rows = steps.decode_slice(i)
        shares = delays.delay_shares(steps.began[own_rows], steps.until[own_rows])
        known = np.array(shares[:2]) * usual[own_rows]
        blocked[own_rows] = shares.blocked * usual[own_rows]
        longer[own_rows] = shares.longer * usual[own_rows]
        for column in (costs.interference_ns, costs.excess_ns):
            explained_ns = (known * column[own_rows]).astype(np.int64)
            explained[:, own_rows] += explained_ns
            column[own_rows] -= explained_ns.sum(axis=0)
    starved_ns, faulted_ns = explained
    return _ThreadDelayColumns(starved_ns, faulted_ns, blocked, longer)


def _take_warmup(records: list[RequestRecord], steps: _DecodeSteps, costs: StepCosts) -> tuple[Any, Any]:
    """Takes the warmup out of the time of prompts. Returns the rows of warmup steps, and the warmup in each, ns."""
    prompt_ns = costs.interference_ns + costs.own_prefill_ns
    rows, warmup_ns = _find_warmup_rows(records, steps, prompt_ns)
    of_own_prefill = np.minimum(warmup_ns, costs.own_prefill_ns[rows])
    costs.own_prefill_ns[rows] -= of_own_prefill
    costs.interference_ns[rows] -= warmup_ns - of_own_prefill
    return rows, warmup_ns


def _find_warmup_rows(records: list[RequestRecord], steps: _DecodeSteps, prompt_ns: Any) -> tuple[Any, Any]:
    """Returns the rows of warmup steps, and by how much `prompt_ns` exceeds the cost of prompts in each."""
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
            excess.append(max(int(prompt_ns[row] - record.warmup_steps.max_prompt_cost(prompts)), 0))
    return np.array(rows, np.int64), np.array(excess, np.int64)


def _move_idle_to_host(steps: _DecodeSteps, columns: dict[str, Any], idle: Any) -> None:
    """Moves the idle time of the device that has no other known cause to `host_bubble`.

    It is taken from the unexplained excess first, then from own decode and batching.
    """
    own_ns, batching_ns, interference_ns, host_ns, stalled = (columns[cause] for cause in _STEP_CAUSES)
    device = own_ns + batching_ns + interference_ns + stalled + columns.get(semconv.CAUSE_PREFILL, 0)
    left = np.maximum(idle - (steps.until - steps.since - device), 0) * steps.is_consecutive
    of_stall = np.minimum(left, stalled)
    usual = np.minimum(left - of_stall, own_ns + batching_ns)
    of_own = usual * own_ns // np.maximum(own_ns + batching_ns, 1)
    for column, idle_ns in ((stalled, of_stall), (own_ns, of_own), (batching_ns, usual - of_own)):
        column -= idle_ns
        host_ns += idle_ns


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


def _select_worst_steps(steps: _DecodeSteps, interference_ns: Any, i: int) -> list[tuple[int, int]]:
    own_rows = steps.decode_slice(i)
    lengths = interference_ns[own_rows]
    rows = np.flatnonzero(lengths)
    if len(rows) > MAX_INTERFERED_STEPS:
        rows = rows[np.argpartition(lengths[rows], -MAX_INTERFERED_STEPS)[-MAX_INTERFERED_STEPS:]]
    return list(zip(steps.step[own_rows][rows].tolist(), lengths[rows].tolist()))
