"""Finds first tokens and results that are late because of time before the engine. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from otel_infer import semconv
from otel_infer.analysis.diagnosis.excess import TimeByComplaint
from otel_infer.analysis.diagnosis.queueing import QueueAnalysis
from otel_infer.analysis.diagnosis.serialized import describe_serialized
from otel_infer.analysis.diagnosis.slow_requests import (
    NS_PER_MS,
    app_time_before_token,
    find_rows,
    is_main_part,
    loop_delay_before_token,
    name_first_latency,
    select_slowest,
    sum_cause_time,
    ttft_or_duration,
)
from otel_infer.analysis.diagnosis.symptoms import Finding
from otel_infer.analysis.diagnosis.worker_code import describe_waits
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.semconv import causes

_CAUSES = causes.select_causes(causes.GROUP_PRE_ENGINE)


def find_pre_engine_delay(served: list[RequestRecord], time: TimeByComplaint) -> list[Finding]:
    """Finds time before the engine: of the slow requests, or of those for whose worker they wait."""
    kind = semconv.SYMPTOM_PRE_ENGINE
    slow = select_slowest(served, ttft_or_duration, whole=ttft_or_duration)
    parts = _sum_by_cause(slow.records)
    total, count = sum(parts.values()), len(slow.records)
    rows = find_rows(served, slow.records)
    behind = time.for_code.before[rows]
    if not is_main_part(total + behind.sum(), slow) and not time.is_complaint(kind):
        return []
    if time.serialized[rows].sum() > total / 2:
        return [describe_serialized(time.serialized)]
    if behind.sum() > total:
        return [_describe_code_of_others(served, time)]
    cause = max(parts, key=lambda cause: parts[cause])
    evidence = [
        f"{total / slow.reference_ns:.0%} of {name_first_latency(slow.records)} of the slowest {count} requests is before the engine",
        f"{cause}: {parts[cause] / count / NS_PER_MS:.0f} ms each",
        *describe_waits(behind),
    ]
    if cause == semconv.CAUSE_SOCKET_QUEUE and not any(record.loop_pauses for record in served):
        # Workers without an event loop serve a request each: the socket is their queue.
        peak = QueueAnalysis(served, stages=(semconv.SPAN_ACCEPT,)).describe_peak()
        if peak is not None:
            return [Finding(semconv.SYMPTOM_PEAK, cause, total / slow.lifetime_ns, [*evidence, peak])]
    return [Finding(kind, cause, total / slow.lifetime_ns, evidence)]


def _describe_code_of_others(served: list[RequestRecord], time: TimeByComplaint) -> Finding:
    """Describes the code that a worker runs while most slow requests wait in its queue."""
    kind = semconv.SYMPTOM_PRE_ENGINE
    of_each = [_sum_by_cause([served[row]]) for row in time.longest_own(kind)]
    longest = max(sum(parts.values()) for parts in of_each)
    own = [parts for parts in of_each if sum(parts.values()) > longest / 2]
    lengths = {cause: sum(parts[cause] for parts in own) / len(own) for cause in own[0]}
    cause = max(lengths, key=lambda cause: lengths[cause])
    waits = time.for_code.before[time.longest(kind)]
    return Finding(kind, cause, time.total_share(kind), [
        f"{cause}: {lengths[cause] / NS_PER_MS:.0f} ms each, of {len(own)} of {len(served)} requests",
        f"most slow requests are others: {float(waits.mean()) / NS_PER_MS:.0f} ms of each pass in the queue while a worker runs this code",
    ])  # fmt: skip


def _sum_by_cause(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Returns the time of these requests before the engine by cause, ns."""
    parts = {cause: float(sum(sum_cause_time(record, cause) for record in records)) for cause in _CAUSES}
    parts[semconv.CAUSE_APPLICATION] = float(sum(map(app_time_before_token, records)))
    parts[semconv.CAUSE_EVENT_LOOP] = float(sum(map(loop_delay_before_token, records)))
    return parts
