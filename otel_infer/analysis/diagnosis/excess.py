"""Divides the time of requests among complaints, and compares slow requests with ordinary ones. Pure.

Every ns of a request belongs to one complaint, to its own work, or to `unexplained`. The *excess* of a slow request is
its time beyond that of ordinary requests of its size (output tokens), complaint by complaint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from otel_infer import semconv
from otel_infer.analysis.diagnosis.code_places import find_code_places, is_blocked_by_code
from otel_infer.analysis.diagnosis.concurrency import MIN_CONCURRENCY, SharedTime, estimate_shared_time
from otel_infer.analysis.diagnosis.cpu_use import CpuUse
from otel_infer.analysis.diagnosis.serialized import find_serialized_waits
from otel_infer.analysis.diagnosis.slow_requests import (
    NS_PER_MS,
    SLOW_SHARE,
    app_time_before_token,
    client_backpressure,
    hung_time,
    loop_delay_before_token,
    loop_delays_while_streaming,
    sum_cause_time,
)
from otel_infer.analysis.diagnosis.waits_behind_stalls import find_waits_behind_stalls
from otel_infer.analysis.diagnosis.worker_code import WaitsForCode, find_waits_for_code
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.semconv import causes

OWN_WORK = "own_work"
UNCOVERED = semconv.CAUSE_UNEXPLAINED
COMPLAINTS = (
    semconv.SYMPTOM_PRE_ENGINE,
    semconv.SYMPTOM_QUEUEING,
    semconv.SYMPTOM_PREFILL,
    semconv.SYMPTOM_STUTTER,
    semconv.SYMPTOM_BATCHING,
    semconv.SYMPTOM_NOT_ENOUGH_CPU,
    semconv.SYMPTOM_TOO_MANY_AT_ONCE,
    semconv.SYMPTOM_ABANDONED_WORK,
    semconv.SYMPTOM_LATE_END,
    semconv.SYMPTOM_SLOW_READER,
)
"""The complaints that time is divided among. Queueing stands for all complaints about a queue."""
KINDS = (*COMPLAINTS, OWN_WORK, UNCOVERED)
KIND_OF_SYMPTOM = {
    **{kind: kind for kind in COMPLAINTS},
    semconv.SYMPTOM_PEAK: semconv.SYMPTOM_QUEUEING,
    semconv.SYMPTOM_HEAD_OF_LINE_BLOCKING: semconv.SYMPTOM_QUEUEING,
    semconv.SYMPTOM_SLOW_MODEL: OWN_WORK,
}
"""Symptom → the complaint that its time belongs to."""
_QUEUE_CAUSES = causes.select_causes(causes.GROUP_QUEUE)
WAITS = (
    semconv.SYMPTOM_PRE_ENGINE,
    semconv.SYMPTOM_QUEUEING,
    semconv.SYMPTOM_STUTTER,
    semconv.SYMPTOM_NOT_ENOUGH_CPU,
    semconv.SYMPTOM_TOO_MANY_AT_ONCE,
    semconv.SYMPTOM_ABANDONED_WORK,
    semconv.SYMPTOM_LATE_END,
    semconv.SYMPTOM_SLOW_READER,
)
"""Complaints about waits and stalls, also where every request has them."""
EVERYDAY_SHARE, MAIN_SHARE, EVERYDAY_MS = 0.15, 0.5, 20.0
"""Share of the median request's time from which a wait, and from which other time, concerns every request; its length."""
EXCESS_SHARE, EXCESS_MS = 0.3, 50.0
"""Share of slow requests' time beyond ordinary ones from which they are slow at all, and its least length."""
STALL_EXCESS_MS = 20.0
"""Least length of stalls beyond ordinary requests. Unlike waits in a queue, they do not come with a usual load."""
MIN_ABANDONED_SHARE = 0.2
"""Share of the engines' time from which abandoned work is the reason for waits."""
_ORDINARY_NEIGHBOURS = 24
"""Requests of about the same number of output tokens whose median is ordinary."""
_PRE_ENGINE_CAUSES = frozenset(causes.select_causes(causes.GROUP_PRE_ENGINE)) - {semconv.CAUSE_APPLICATION}
_LATE_LOOP_CAUSES = (semconv.CAUSE_SOCKET_QUEUE, semconv.CAUSE_EVENT_LOOP)
_CPU_CAUSES = (semconv.CAUSE_STARVED, semconv.CAUSE_THROTTLED)
_WARMUP_CAUSES = frozenset(row.name for row in causes.CAUSE_TABLE if row.is_warmup)
_KIND_OF_CAUSE: Mapping[str, str] = {
    **dict.fromkeys(causes.CAUSES, OWN_WORK),
    **dict.fromkeys(_PRE_ENGINE_CAUSES, semconv.SYMPTOM_PRE_ENGINE),
    **dict.fromkeys(_QUEUE_CAUSES, semconv.SYMPTOM_QUEUEING),
    **dict.fromkeys(causes.select_causes(causes.GROUP_STALL), semconv.SYMPTOM_STUTTER),
    **dict.fromkeys(causes.select_causes(causes.GROUP_POST_ENGINE), semconv.SYMPTOM_LATE_END),
    **dict.fromkeys((semconv.CAUSE_PREFILL, *_WARMUP_CAUSES), semconv.SYMPTOM_PREFILL),
    **dict.fromkeys(_CPU_CAUSES, semconv.SYMPTOM_NOT_ENOUGH_CPU),
    semconv.CAUSE_BATCHING: semconv.SYMPTOM_BATCHING,
    semconv.CAUSE_HOST_BUBBLE: semconv.SYMPTOM_STUTTER,
    semconv.CAUSE_UNEXPLAINED: UNCOVERED,
}
"""The complaint of each cause, where it does not depend on when the time passed."""


def find_kind(symptom: str, cause: str) -> str:
    """Returns the kind of time that a symptom with this main cause is about."""
    if symptom == semconv.SYMPTOM_SLOW_MODEL and cause == semconv.CAUSE_PREFILL:
        return semconv.SYMPTOM_PREFILL  # the work of a model that generates nothing
    return semconv.SYMPTOM_QUEUEING if cause in _QUEUE_CAUSES else KIND_OF_SYMPTOM[symptom]


class TimeByComplaint(NamedTuple):
    """The time of requests: a row per request, a column per member of `KINDS`, ns. `excess`: beyond ordinary requests.

    `slow`: the rows of the slowest tenth of their size, at least three. `shared`: what concurrency costs, if known.
    `serialized`: ns in which a request's code waited for another's call, a part of queueing. `for_code`: ns in which it waited
    in a queue for a worker's code, which are no queueing. `behind_stalls`: ns in a queue that are there because the requests
    ahead were stalled, a part of the stutter.
    """

    time: Any
    excess: Any
    slow: Any
    shared: SharedTime | None
    serialized: Any
    for_code: WaitsForCode
    behind_stalls: Any

    def longest(self, kind: str) -> Any:
        """Returns the rows of the tenth of the requests that have most of this time, at least three."""
        return np.argsort(self.time[:, KINDS.index(kind)], kind="stable")[-len(self.slow) :]

    def longest_own(self, kind: str) -> Any:
        """Returns the rows of the tenth of the requests that have most of this time without their waits for a worker's code.

        `kind`: `pre_engine` or `late_end`.
        """
        waits = self.for_code.before if kind == semconv.SYMPTOM_PRE_ENGINE else self.for_code.after
        return np.argsort(self.time[:, KINDS.index(kind)] - waits, kind="stable")[-len(self.slow) :]

    def mean_ms(self, kind: str, rows: Any) -> float:
        """Returns the mean of this time in these rows, ms."""
        return float(self.time[rows, KINDS.index(kind)].mean() / NS_PER_MS)

    def total_share(self, kind: str) -> float:
        """Returns the share of the time of all requests."""
        return float(self.time[:, KINDS.index(kind)].sum() / max(self.time.sum(), 1))

    def excess_share(self, kind: str) -> float:
        """Returns the share of what slow requests take beyond ordinary ones."""
        excess = self.excess[self.slow].sum(axis=0).clip(0)
        return float(excess[KINDS.index(kind)] / max(excess.sum(), 1))

    def excess_ms(self, kind: str) -> float:
        """Returns what a slow request takes beyond ordinary ones, ms."""
        return float(self.excess[self.slow, KINDS.index(kind)].mean() / NS_PER_MS)

    def is_everyday(self, kind: str) -> bool:
        """Returns whether the median request has so much of this time that it is a complaint about every request."""
        least_share = EVERYDAY_SHARE if kind in WAITS else MAIN_SHARE
        return self.median_share(kind) >= least_share and self.median_ms(kind) >= EVERYDAY_MS

    def median_share(self, kind: str) -> float:
        """Returns the median over requests of the share of their time."""
        return float(np.median(self.time[:, KINDS.index(kind)] / np.maximum(self.time.sum(axis=1), 1)))

    def median_ms(self, kind: str) -> float:
        """Returns the median of this time, ms."""
        return float(np.median(self.time[:, KINDS.index(kind)])) / NS_PER_MS

    @property
    def has_excess(self) -> bool:
        """Whether slow requests take noticeably longer than ordinary ones of their size."""
        excess, whole = self.excess[self.slow].sum(), self.time[self.slow].sum()
        return bool(
            excess >= EXCESS_SHARE * whole and excess / max(len(self.slow), 1) >= EXCESS_MS * NS_PER_MS
        )

    def is_complaint(self, kind: str) -> bool:
        """Returns whether the time of this kind alone is a complaint: of every request, or of the slow ones."""
        if self.is_everyday(kind):
            return True
        least_ms = STALL_EXCESS_MS if kind == semconv.SYMPTOM_STUTTER else EXCESS_MS
        is_large = self.excess_share(kind) >= EXCESS_SHARE and self.excess_ms(kind) >= least_ms
        return self.has_excess and is_large


def divide_time(
    records: Sequence[RequestRecord], cpu: CpuUse | None = None, abandoned_share: float = 0.0
) -> TimeByComplaint:
    """Returns the time of the requests by complaint. `cpu`: who used the cores while the slow ones ran.

    `abandoned_share`: of the engines' time, what they spent on clients that had left.
    """
    time = np.array([_divide_request(record) for record in records], float).reshape(-1, len(KINDS))
    serialized, for_code = find_serialized_waits(records), find_waits_for_code(records)
    _move_time(time, semconv.SYMPTOM_PRE_ENGINE, semconv.SYMPTOM_QUEUEING, serialized)
    _move_time(time, semconv.SYMPTOM_QUEUEING, semconv.SYMPTOM_PRE_ENGINE, for_code.before)
    _move_time(time, semconv.SYMPTOM_QUEUEING, semconv.SYMPTOM_LATE_END, for_code.after)
    shared = estimate_shared_time(records)
    if shared is not None:
        _move_shared_time(time, records, shared, cpu)
    behind_stalls = find_waits_behind_stalls(records)
    behind_stalls = _move_time(time, semconv.SYMPTOM_QUEUEING, semconv.SYMPTOM_STUTTER, behind_stalls)
    if cpu is not None and cpu.is_taken_by_others:
        _estimate_cpu_waits(time, records, cpu)
    if abandoned_share >= MIN_ABANDONED_SHARE:
        _move_waits_for_abandoned_work(time)
    sizes = np.array([record.output_tokens for record in records])
    excess = time - _find_ordinary_time(time, sizes)
    count = min(max(round(len(records) * SLOW_SHARE), 3), len(records))
    slow = np.argsort(excess.sum(axis=1), kind="stable")[-count:] if count else np.zeros(0, int)
    return TimeByComplaint(time, excess, slow, shared, serialized, for_code, behind_stalls)


def _move_time(time: Any, origin: str, target: str, limit: Any) -> Any:
    """Moves up to `limit` ns of each request from one kind to another. Returns the ns that were moved."""
    column = time[:, KINDS.index(origin)]
    moved = np.minimum(limit, column)
    column -= moved
    time[:, KINDS.index(target)] += moved
    return moved


def _move_shared_time(
    time: Any, records: Sequence[RequestRecord], shared: SharedTime, cpu: CpuUse | None
) -> None:
    """Moves what concurrency costs a request out of its waits for the GIL, CPU waits and own work, in this order.

    Then the waits for an event loop that was late while many ran, because it shares the cores and the GIL. Waits stay where
    code was located that causes them. Few calls at a time are ordinary: what they cost is own work. Where others take the
    cores, requests are many at once because they are slow: a lack of cores.
    """
    is_crowded = shared.concurrency >= MIN_CONCURRENCY
    is_taken = cpu is not None and cpu.is_taken_by_others
    target = semconv.SYMPTOM_NOT_ENOUGH_CPU if is_taken else semconv.SYMPTOM_TOO_MANY_AT_ONCE
    blocked = np.array([sum_cause_time(record, semconv.CAUSE_BLOCKED) for record in records], float)
    waits = np.zeros(len(records)) if is_blocked_by_code(records) else blocked
    left = np.where(is_crowded, shared.extra, 0.0)
    left = left - _move_time(time, semconv.SYMPTOM_STUTTER, target, np.minimum(left, waits))
    for kind in (semconv.SYMPTOM_NOT_ENOUGH_CPU, semconv.SYMPTOM_PREFILL, OWN_WORK):
        left = left - _move_time(time, kind, target, left)
    left = np.where(is_crowded, 0.0, shared.extra)
    left = left - _move_time(time, semconv.SYMPTOM_STUTTER, OWN_WORK, np.minimum(left, waits))
    if not is_taken:
        _move_time(time, semconv.SYMPTOM_NOT_ENOUGH_CPU, OWN_WORK, left)
    if not find_code_places(records, semconv.CAUSE_EVENT_LOOP):
        limit = np.where(shared.before >= MIN_CONCURRENCY, _sum_late_loop(records), 0.0)
        _move_time(time, semconv.SYMPTOM_PRE_ENGINE, target, limit)


def _sum_late_loop(records: Sequence[RequestRecord]) -> Any:
    """Returns the time that each request waited for an event loop that was late, ns."""
    return np.array([sum_cause_time(record, *_LATE_LOOP_CAUSES) for record in records], float)


def _divide_request(record: RequestRecord) -> list[int]:
    by_kind = dict.fromkeys(KINDS, 0)
    streaming: Mapping[str, int] = {}
    if record.breakdown is not None:
        streaming = record.breakdown.streaming
        for cause, length in record.breakdown.causes.items():
            by_kind[_KIND_OF_CAUSE.get(cause, OWN_WORK)] += length
        _move_by_phase(by_kind, record, record.breakdown.causes, streaming)
    return list(by_kind.values())


def _move_by_phase(
    by_kind: dict[str, int],
    record: RequestRecord,
    all_causes: Mapping[str, int],
    streaming: Mapping[str, int],
) -> None:
    """Assigns the time of causes whose complaint depends on when it passed."""

    def move(length: int, origin: str, target: str) -> None:
        by_kind[origin] -= length
        by_kind[target] += length

    application = all_causes.get(semconv.CAUSE_APPLICATION, 0)
    if application:
        before = app_time_before_token(record)
        move(before, OWN_WORK, semconv.SYMPTOM_PRE_ENGINE)
        move(application - before, OWN_WORK, semconv.SYMPTOM_LATE_END)
    loop = all_causes.get(semconv.CAUSE_EVENT_LOOP, 0)
    if loop:
        # The loop that read the request late is the loop that sends its answer late.
        unread = all_causes.get(semconv.CAUSE_SOCKET_QUEUE, 0)
        before = min(loop_delay_before_token(record) + unread, loop)
        move(before, OWN_WORK, semconv.SYMPTOM_PRE_ENGINE)
        # The engine continues while the loop is late, so this delay is part of the time of its steps.
        move(loop - before, OWN_WORK, semconv.SYMPTOM_LATE_END)
    streamed = min(sum(loop_delays_while_streaming(record)), by_kind[OWN_WORK])
    move(streamed, OWN_WORK, semconv.SYMPTOM_STUTTER)
    interference = all_causes.get(semconv.CAUSE_INTERFERENCE, 0)
    move(
        interference - streaming.get(semconv.CAUSE_INTERFERENCE, 0),
        semconv.SYMPTOM_STUTTER,
        semconv.SYMPTOM_PREFILL,
    )
    if not record.first_token_at and record.find_stage(semconv.SPAN_FORWARD) is not None:
        # The forward pass of an encoder or a classifier processes its input, as a prefill does.
        move(
            min(all_causes.get(semconv.CAUSE_DECODE, 0), by_kind[OWN_WORK]), OWN_WORK, semconv.SYMPTOM_PREFILL
        )
    # A request with several prompts computes the later ones while tokens stream. That is its own work.
    move(streaming.get(semconv.CAUSE_PREFILL, 0), semconv.SYMPTOM_PREFILL, OWN_WORK)
    move(hung_time(record), UNCOVERED, semconv.SYMPTOM_STUTTER)
    move(client_backpressure(record), semconv.SYMPTOM_LATE_END, semconv.SYMPTOM_SLOW_READER)


def _move_waits_for_abandoned_work(time: Any) -> None:
    """Moves all waits for capacity: without the abandoned work, the engine would have it."""
    for kind in (semconv.SYMPTOM_QUEUEING, semconv.SYMPTOM_TOO_MANY_AT_ONCE):
        _move_time(time, kind, semconv.SYMPTOM_ABANDONED_WORK, np.inf)


def _estimate_cpu_waits(time: Any, records: Sequence[RequestRecord], cpu: CpuUse) -> None:
    """Moves time to the lack of cores where no thread is measured: the share of the cores that others use.

    This concerns requests without thread delays, and the waits for an event loop or a worker that is late because its thread
    has no core.
    """
    is_unmeasured = np.array([record.thread_delays is None for record in records], bool)
    share = max(cpu.other_processes, cpu.other_threads)
    target = semconv.SYMPTOM_NOT_ENOUGH_CPU
    for kind in (OWN_WORK, semconv.SYMPTOM_PREFILL, UNCOVERED):
        _move_time(time, kind, target, np.where(is_unmeasured, share * time[:, KINDS.index(kind)], 0.0))
    queueing = semconv.SYMPTOM_QUEUEING
    _move_time(time, queueing, target, share * time[:, KINDS.index(queueing)])
    before_engine = time[:, KINDS.index(semconv.SYMPTOM_PRE_ENGINE)]
    _move_time(
        time, semconv.SYMPTOM_PRE_ENGINE, target, share * np.minimum(_sum_late_loop(records), before_engine)
    )


def _find_ordinary_time(time: Any, sizes: Any) -> Any:
    """Returns, for each request, the median time by complaint of the requests whose size is nearest to its own."""
    order = np.argsort(sizes, kind="stable")
    ordinary = np.empty_like(time)
    width = min(_ORDINARY_NEIGHBOURS, len(order))
    for position, row in enumerate(order):
        first = min(max(position - width // 2, 0), len(order) - width)
        ordinary[row] = np.median(time[order[first : first + width]], axis=0)
    return ordinary
