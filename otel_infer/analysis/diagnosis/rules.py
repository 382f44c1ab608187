"""Finds the symptom that slow requests show, its evidence, and what to change first. Pure.

The seven symptoms differ in the causes that took the time of the slowest requests. The verdict is
`insufficient` with too few requests, or where most of the time is unexplained or is one cause that no symptom
covers. It is `healthy` where the slow requests only did their own work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from otel_infer import semconv
from otel_infer.analysis.diagnosis.code_places import describe_code
from otel_infer.analysis.diagnosis.cpu_use import measure_cpu_use
from otel_infer.analysis.diagnosis.excess import (
    EXCESS_SHARE,
    OWN_WORK,
    UNCOVERED,
    TimeByComplaint,
    divide_time,
    find_kind,
)
from otel_infer.analysis.diagnosis.pre_engine import find_pre_engine_delay
from otel_infer.analysis.diagnosis.processor import (
    find_abandoned_work,
    find_cpu_shortage,
    find_too_many_at_once,
)
from otel_infer.analysis.diagnosis.prompts import (
    find_expensive_prefill,
    find_large_inputs,
    find_prefill_interference,
)
from otel_infer.analysis.diagnosis.queueing import QueueAnalysis, describe_workers
from otel_infer.analysis.diagnosis.response_end import find_late_end, find_slow_reader
from otel_infer.analysis.diagnosis.serialized import describe_serialized
from otel_infer.analysis.diagnosis.slow_model import find_slow_model
from otel_infer.analysis.diagnosis.slow_requests import (
    MIN_REQUESTS,
    MIN_WAIT_MS,
    NOTICEABLE_MS,
    NS_PER_MS,
    WAIT_SHARE,
    client_backpressure,
    filter_generating,
    find_rows,
    median_gap_ms,
    name_first_latency,
    select_slowest,
    streaming_time,
    sum_cause_time,
    sum_nonstreaming_cause_time,
    sum_streaming_cause_time,
    ttft_or_duration,
)
from otel_infer.analysis.diagnosis.slowest import describe_slowest
from otel_infer.analysis.diagnosis.stalls import (
    find_event_loop_stalls,
    find_stalled_results,
    find_stream_stalls,
)
from otel_infer.analysis.diagnosis.symptoms import Finding
from otel_infer.analysis.diagnosis.uncovered import locate_uncovered_time
from otel_infer.assembly.engine.step_table import CAPACITY
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.events import CpuSeen
from otel_infer.semconv import causes

HEALTHY, INSUFFICIENT = "healthy", "insufficient"
"""Verdicts that name no symptom."""
MAX_UNEXPLAINED_SHARE, _NOTICEABLE_UNEXPLAINED_SHARE = 0.5, 0.1
"""Share of the weighed time that may be unexplained without a complaint or beside more own work, and beside complaints with less time."""
MAX_UNCLASSIFIED_SHARE = 0.4
"""Share of the slow requests' time that one cause may have without a symptom that covers it."""
_OF_ALL = "the time of all requests"
_OF_EXCESS = "what the slow requests take beyond ordinary ones of their size"
_MAIN_SHARE = 0.5
"""Share of the time from which a cause is more than all others together."""
_GAPS_PER_QUEUE = 3
"""Median gaps between tokens that a queue must exceed to be noticed in the stream's own pace."""
_BATCHING_PER_DECODE = 2
"""Times that batching must exceed the request's own decode, because any batch costs something."""


class Diagnosis(NamedTuple):
    """The result of a diagnosis.

    `verdict`: name of a symptom, `healthy` or `insufficient`. `findings`: largest weight first. `weighed`: what
    the weights are shares of.
    """

    verdict: str
    requests: int
    findings: list[Finding]
    causes: dict[str, float]
    note: str
    weighed: str = ""

    def describe_share(self, finding: Finding) -> str:
        """Returns the weight of a finding, and what it is a share of."""
        return f"{finding.weight:.0%} of {self.weighed}"


def diagnose_requests(
    records: Sequence[RequestRecord],
    since: int = 0,
    unfinished: Sequence[int] = (),
    cpu_usage: Sequence[CpuSeen] = (),
    abandoned_share: float = 0.0,
    missed_objectives: Mapping[bytes, tuple[str, ...]] = MappingProxyType({}),
) -> Diagnosis:
    """Returns the symptom that these requests show, with its evidence.

    `since`: from this instant on (monotonic ns) all requests are recorded; earlier ones only if they were
    open then. `unfinished`: start instants of running requests that have not ended. `cpu_usage`: of the
    server's cores. `abandoned_share`: of the engines' time, what they spent on clients that had left.
    `missed_objectives`: by span id, the objectives that a request missed.
    """
    served = [record for record in records if _is_served(record)]
    cause_shares = _cause_shares(served)
    if len(served) < MIN_REQUESTS:
        note = f"{len(served)} requests; at least {MIN_REQUESTS} are needed"
        if len(served) < len(records):
            note += f" (of {len(records)}; the others failed or are no inference)"
        return Diagnosis(INSUFFICIENT, len(served), [], cause_shares, note)
    cpu = measure_cpu_use(cpu_usage, select_slowest(served, lambda r: r.duration_ns).records)
    time = divide_time(served, cpu, abandoned_share)
    findings = [finding for rule in _RULES for finding in rule(served, time)]
    findings += find_cpu_shortage(served, time, cpu) + find_abandoned_work(served, time, abandoned_share)
    findings += find_slow_model(served, time, missed_objectives, cpu_usage)
    others = [record for record in records if not _is_served(record)]
    findings += _find_queueing(served, time, QueueAnalysis(served, others, since, unfinished))
    return _choose_verdict(served, time, findings, cause_shares)


def _choose_verdict(
    served: list[RequestRecord],
    time: TimeByComplaint,
    findings: list[Finding],
    cause_shares: dict[str, float],
) -> Diagnosis:
    """Returns the verdict of the largest share, unless more time is not covered by any measurement."""
    by_excess = _is_weighed_by_excess(time, findings)
    measure = time.excess_share if by_excess else time.total_share
    weighed = _OF_EXCESS if by_excess else _OF_ALL
    weighted = [
        finding._replace(weight=measure(find_kind(finding.symptom, finding.cause))) for finding in findings
    ]
    weighted = _keep_largest_of_kind(sorted(weighted, key=lambda finding: -finding.weight))
    largest, uncovered = max([finding.weight for finding in weighted], default=0.0), measure(UNCOVERED)
    is_noticeable = bool(weighted) and measure(OWN_WORK) <= _MAIN_SHARE
    if uncovered > max(largest, _NOTICEABLE_UNEXPLAINED_SHARE if is_noticeable else MAX_UNEXPLAINED_SHARE):
        note = _describe_uncovered([served[row] for row in time.slow], uncovered, weighed)
        return Diagnosis(INSUFFICIENT, len(served), [], cause_shares, note, weighed)
    did_more_work = by_excess and measure(OWN_WORK) > largest and largest < EXCESS_SHARE
    if uncovered > largest or did_more_work:
        weighted = []  # each has less time than a small rest that is not covered, or than more work of their own
    if weighted:
        located = [
            finding._replace(evidence=[*finding.evidence, *describe_code(served, finding.cause)])
            for finding in weighted
        ]
        return Diagnosis(weighted[0].symptom, len(served), located, cause_shares, "", weighed)
    cause, share = _largest_unclassified_cause(served)
    if share > MAX_UNCLASSIFIED_SHARE:
        note = f"no symptom matches, but {share:.0%} of the slow requests' time is {cause}"
        return Diagnosis(INSUFFICIENT, len(served), [], cause_shares, note)
    slowest = describe_slowest(served, time)
    note = (
        f"most slow requests did their own work, but {slowest}"
        if slowest
        else "the slow requests did their own work; further delay at the client arises outside this server"
    )
    return Diagnosis(HEALTHY, len(served), [], cause_shares, note)


def _is_weighed_by_excess(time: TimeByComplaint, findings: list[Finding]) -> bool:
    """Returns whether the excess of slow requests decides, because no complaint concerns every request."""
    kinds = [find_kind(finding.symptom, finding.cause) for finding in findings]
    return time.has_excess and not any(map(time.is_everyday, kinds))


def _keep_largest_of_kind(findings: list[Finding]) -> list[Finding]:
    """Returns the first finding of each symptom and cause."""
    return list({(finding.symptom, finding.cause): finding for finding in reversed(findings)}.values())[::-1]


def _describe_uncovered(slow: list[RequestRecord], share: float, weighed: str) -> str:
    """Returns where the time lies that no measurement covers, and what would show it."""
    if sum(record.steps_evicted > 0 for record in slow) > len(slow) / 2:
        return f"the slow requests are older than the last {CAPACITY:,} steps of their engine; older steps are discarded"
    place = locate_uncovered_time(slow)
    code = describe_code(slow, semconv.CAUSE_UNEXPLAINED)
    if code:
        return f"{share:.0%} of {weighed} is unexplained, most of it {place}; {'; '.join(code)}"
    return (
        f"{share:.0%} of {weighed} is unexplained, most of it {place}; put `otel_infer.stage` around that code, "
        "sample it (py-spy dump), and check that the engine is instrumented: otel-infer doctor"
    )


def _is_served(record: RequestRecord) -> bool:
    is_complete = record.breakdown is not None and record.operation and record.duration_ns
    return bool(is_complete) and record.outcome != events.ERROR


# ── rules ───────────────────────────────────────────────────────────────────────────────────────────────────

_QUEUE_CAUSES = causes.select_causes(causes.GROUP_QUEUE)
_APPLICATION_QUEUES = (semconv.CAUSE_LOCK_QUEUE, semconv.CAUSE_POOL_QUEUE, semconv.CAUSE_WORK_QUEUE)
_OWN_WORK_CAUSES = causes.select_causes(causes.GROUP_OWN_WORK, causes.GROUP_UNKNOWN)
_WARMUP_CAUSES = tuple(row.name for row in causes.CAUSE_TABLE if row.is_warmup)


def _find_cold_start(served: list[RequestRecord], time: TimeByComplaint) -> list[Finding]:
    """Finds work that a server does once and that its first requests wait for."""
    slow = select_slowest(served, lambda r: r.duration_ns)
    share, mean_ms = slow.reference_share(*_WARMUP_CAUSES), slow.mean_ms(*_WARMUP_CAUSES)
    if share < WAIT_SHARE or mean_ms < MIN_WAIT_MS:
        return []
    cause = max(_WARMUP_CAUSES, key=slow.total_ns)
    return [Finding(semconv.SYMPTOM_PREFILL, cause, share, [
        f"{share:.0%} of the time of the slowest {len(slow.records)} requests is work that a server does once, {mean_ms:.0f} ms each",
        f"{cause}: {slow.mean_ms(cause):.0f} ms each",
    ])]  # fmt: skip


def _find_queueing(
    served: list[RequestRecord], time: TimeByComplaint, queueing: QueueAnalysis
) -> list[Finding]:
    """Finds waiting in the queue: because of a peak, of large requests, of a batch window, or always."""
    slow = select_slowest(
        served, ttft_or_duration, whole=ttft_or_duration, measure=sum_nonstreaming_cause_time
    )
    weight, mean_ms = slow.reference_share(*_QUEUE_CAUSES), slow.mean_ms(*_QUEUE_CAUSES)
    is_large = weight >= WAIT_SHARE and mean_ms >= max(MIN_WAIT_MS, _GAPS_PER_QUEUE * median_gap_ms(served))
    is_for_code = time.for_code.sum_of(find_rows(served, slow.records)) > slow.total_ns(*_QUEUE_CAUSES) / 2
    if (not is_large or is_for_code) and not time.is_complaint(semconv.SYMPTOM_QUEUEING):
        return []
    if time.serialized.sum() > sum(sum_cause_time(record, *_QUEUE_CAUSES) for record in served):
        return [describe_serialized(time.serialized)]
    cause, lifetime_share = max(_QUEUE_CAUSES, key=slow.total_ns), slow.lifetime_share(*_QUEUE_CAUSES)
    queue_time = f"{weight:.0%} of {name_first_latency(slow.records)} of the slowest {len(slow.records)} requests is queue, {mean_ms:.0f} ms each"
    if cause == semconv.CAUSE_BATCH_WAIT:
        incomplete = (
            "most of it passed after a worker had taken the request, while its batch was not complete"
        )
        return [Finding(semconv.SYMPTOM_BATCHING, cause, lifetime_share, [queue_time, incomplete])]
    idle, heavy, peak = queueing.idle_wait_share(), queueing.waiting_behind_large(), queueing.describe_peak()
    if idle > _MAIN_SHARE and cause not in _APPLICATION_QUEUES:
        idle_wait = f"{idle:.0%} of the waiting time passed while no request was running"
        return [Finding(semconv.SYMPTOM_BATCHING, cause, lifetime_share, [queue_time, idle_wait])]
    if heavy is not None:
        return [Finding(semconv.SYMPTOM_HEAD_OF_LINE_BLOCKING, cause, lifetime_share, [queue_time, heavy])]
    if peak is not None:
        return [Finding(semconv.SYMPTOM_PEAK, cause, lifetime_share, [queue_time, peak])]
    costs = [slow.total_ns(part) for part in (semconv.CAUSE_DECODE, semconv.CAUSE_BATCHING)]
    workers, advice = describe_workers(idle, *costs) if cause == semconv.CAUSE_WORK_QUEUE else ([], "")
    evidence = [queue_time, "at any load, not only at a peak", *workers]
    return [Finding(semconv.SYMPTOM_QUEUEING, cause, lifetime_share, evidence, advice)]


def _find_batching_delay(served: list[RequestRecord], time: TimeByComplaint) -> list[Finding]:
    """Finds decode steps that are slow because of the size of the batch."""
    slow = select_slowest(served, streaming_time, whole=streaming_time, measure=sum_streaming_cause_time)
    weight, own = slow.reference_share(semconv.CAUSE_BATCHING), slow.reference_share(semconv.CAUSE_DECODE)
    is_excess = time.is_complaint(semconv.SYMPTOM_BATCHING)
    if weight < max(_MAIN_SHARE, _BATCHING_PER_DECODE * own) and not is_excess:
        return []
    size = max(record.summary.batch_size_max for record in slow.records)
    share = slow.lifetime_share(semconv.CAUSE_BATCHING)
    evidence = (
        [
            f"{weight:.0%} of the streaming time is added by the other sequences of each step, {own:.0%} is the request's own",
            f"up to {size} sequences in a step",
        ]
        if size
        else [f"{share:.0%} of the time is what the other items of a batch add to the call of the model"]
    )
    return [Finding(semconv.SYMPTOM_BATCHING, semconv.CAUSE_BATCHING, share, evidence)]  # fmt: skip


_RULES: tuple[Callable[[list[RequestRecord], TimeByComplaint], list[Finding]], ...] = (
    find_pre_engine_delay, find_expensive_prefill, find_large_inputs, find_prefill_interference, find_stream_stalls, find_stalled_results,
    find_event_loop_stalls, _find_batching_delay, _find_cold_start, find_late_end, find_slow_reader, find_too_many_at_once,
)  # fmt: skip


def _largest_unclassified_cause(served: list[RequestRecord]) -> tuple[str, float]:
    """Returns the largest cause of the slow requests' time besides their own work, and its share of it.

    Back-pressure from clients is excluded. The share is 0 below `NOTICEABLE_MS` per request.
    """
    slow = select_slowest(served, lambda r: r.duration_ns)
    parts = {cause: slow.total_ns(cause) for cause in semconv.CAUSES if cause not in _OWN_WORK_CAUSES}
    parts[semconv.CAUSE_EGRESS] -= sum(map(client_backpressure, slow.records))
    # A request without tokens is computed together with others and is done when they are: no interference.
    interference_ns = sum(
        sum_cause_time(record, semconv.CAUSE_INTERFERENCE) for record in filter_generating(slow.records)
    )
    parts[semconv.CAUSE_INTERFERENCE] = float(interference_ns)
    cause = max(parts, key=lambda cause: parts[cause])
    return cause, parts[cause] / slow.lifetime_ns if parts[cause] / len(
        slow.records
    ) / NS_PER_MS >= NOTICEABLE_MS else 0.0


def _cause_shares(served: list[RequestRecord]) -> dict[str, float]:
    """Returns the shares of the time of the slowest tenth by cause, largest first."""
    total: dict[str, int] = defaultdict(int)
    for record in select_slowest(served, lambda r: r.duration_ns).records if served else []:
        for cause, length in record.breakdown.causes.items() if record.breakdown is not None else ():
            total[cause] += length
    whole = sum(total.values()) or 1
    return {cause: length / whole for cause, length in sorted(total.items(), key=lambda item: -item[1])}
