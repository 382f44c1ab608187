"""Finds streams that stutter: because decode is interrupted, or because the event loop does not send. Pure."""

from __future__ import annotations

from collections import Counter

import numpy as np

from otel_infer import semconv
from otel_infer.analysis.diagnosis.excess import TimeByComplaint
from otel_infer.analysis.diagnosis.slow_requests import (
    MIN_REQUESTS,
    NS_PER_MS,
    SlowRequests,
    hung_time,
    longest_gap,
    loop_delays_while_streaming,
    median_gap_ms,
    select_slowest,
    streaming_time,
    sum_nonstreaming_cause_time,
    sum_streaming_cause_time,
)
from otel_infer.analysis.diagnosis.symptoms import Finding
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.semconv import causes

_MIN_GAPS = 3
"""Gaps between tokens from which a request is a stream."""
_STALL_SHARE, _GAPS_PER_STALL, _MIN_STALL_MS = 0.15, 4, 15
"""Least share of streaming time that stalls take, and least longest gap, in median gaps and in ms.

A stall is short, so its share is small; it is noticed because of its length compared with other gaps.
"""
_MIN_SHARE_BEHIND = 0.02
"""Share of the time of all requests from which their waits behind stalls are told."""
_STALL_CAUSES = tuple(
    cause
    for cause in causes.select_causes(causes.GROUP_STALL, causes.GROUP_UNKNOWN)
    if cause not in (semconv.CAUSE_STARVED, semconv.CAUSE_THROTTLED)
)
"""A lack of cores is another complaint."""


def find_stream_stalls(served: list[RequestRecord], time: TimeByComplaint) -> list[Finding]:
    """Finds streams with long gaps between tokens."""
    streamed = [record for record in served if record.summary.gaps >= _MIN_GAPS]
    if len(streamed) < MIN_REQUESTS // 2:
        return []
    slow = select_slowest(streamed, longest_gap, whole=streaming_time, measure=sum_streaming_cause_time)
    gap = median_gap_ms(streamed)
    longest = float(np.median([longest_gap(record) for record in slow.records])) / NS_PER_MS
    parts = {cause: slow.total_ns(cause) for cause in _STALL_CAUSES}
    parts[semconv.CAUSE_UNEXPLAINED] = float(sum(map(hung_time, slow.records)))
    parts[semconv.CAUSE_HOST_BUBBLE] = _excess_over_median(streamed, slow, semconv.CAUSE_HOST_BUBBLE)
    total = sum(parts.values())
    if total < _STALL_SHARE * slow.reference_ns or longest < max(_GAPS_PER_STALL * gap, _MIN_STALL_MS):
        return []
    cause = max(parts, key=lambda cause: parts[cause])
    mean_ms = parts[cause] / len(slow.records) / NS_PER_MS
    evidence = [
        f"the longest gap between tokens of the slowest {len(slow.records)} requests is {longest:.0f} ms; the median gap is {gap:.1f} ms",
        f"{cause}: {min(parts[cause] / slow.reference_ns, 1.0):.0%} of their streaming time, {mean_ms:.0f} ms each",
    ]
    if cause == semconv.CAUSE_INTERFERENCE:
        evidence += _name_stalling_trace(slow)
    evidence += _describe_waits_behind(time)
    return [Finding(semconv.SYMPTOM_STUTTER, cause, total / slow.lifetime_ns, evidence)]


def find_stalled_results(served: list[RequestRecord], time: TimeByComplaint) -> list[Finding]:
    """Finds stalls outside of streams: they delay the first token, or the end of the result, and no later token."""
    kind = semconv.SYMPTOM_STUTTER
    if not time.is_complaint(kind):
        return []
    slow = [served[row] for row in time.longest(kind)]
    parts = {
        cause: sum(sum_nonstreaming_cause_time(record, cause) for record in slow) for cause in _STALL_CAUSES
    }
    streaming = sum(sum_streaming_cause_time(record, *_STALL_CAUSES) for record in slow)
    if sum(parts.values()) <= streaming:
        return []
    cause = max(parts, key=lambda cause: parts[cause])
    mean_ms = parts[cause] / len(slow) / NS_PER_MS
    return [
        Finding(
            kind,
            cause,
            time.total_share(kind),
            [
                f"{cause}: {mean_ms:.0f} ms in each of the {len(slow)} requests with most of it",
                *_describe_waits_behind(time),
            ],
        )
    ]


def _describe_waits_behind(time: TimeByComplaint) -> list[str]:
    """Returns evidence of what stalls cost the requests that wait in the queue meanwhile; empty if it is little."""
    waits = time.behind_stalls
    if waits.sum() < _MIN_SHARE_BEHIND * time.time.sum():
        return []
    return [
        f"without the stalls, requests would wait {float(waits.mean()) / NS_PER_MS:.0f} ms less in the queue on average"
    ]


def _name_stalling_trace(slow: SlowRequests) -> list[str]:
    """Returns evidence that names the trace that stalled the slow requests most; empty if none is known."""
    lengths: Counter[str] = Counter()
    for record in slow.records:
        if record.breakdown is not None and record.breakdown.stalled_by is not None:
            lengths[record.breakdown.stalled_by.trace_id.hex()] += record.breakdown.stalled_by.length
    if not lengths:
        return []
    ((worst, _),) = lengths.most_common(1)
    others = len(lengths) - 1
    return [f"delayed most by trace {worst}" + (f" and by {others} more" if others else "")]


def _excess_over_median(streamed: list[RequestRecord], slow: SlowRequests, cause: str) -> float:
    """Returns how much of a cause the slow streams have beyond its median share of streaming time, ns.

    Requests with and without device times are compared separately, because device times make more of the
    cause visible.
    """
    excess = 0.0
    for timed in (True, False):
        alike = [record for record in streamed if (record.device_idle is not None) == timed]
        if alike:
            shares = [
                sum_streaming_cause_time(record, cause) / max(streaming_time(record), 1) for record in alike
            ]
            usual = float(np.median(shares))
            slow_alike = [record for record in slow.records if (record.device_idle is not None) == timed]
            excess += sum(
                sum_streaming_cause_time(record, cause) - usual * streaming_time(record)
                for record in slow_alike
            )
    return max(excess, 0.0)


def find_event_loop_stalls(served: list[RequestRecord], time: TimeByComplaint) -> list[Finding]:
    """Finds streams that stop while the engine continues, because the event loop does not send their tokens."""
    streamed = [record for record in served if record.summary.gaps >= _MIN_GAPS]
    if len(streamed) < MIN_REQUESTS // 2:
        return []
    slow = select_slowest(streamed, lambda r: sum(loop_delays_while_streaming(r)), whole=streaming_time)
    loop_delays = [loop_delays_while_streaming(record) for record in slow.records]
    total = sum(map(sum, loop_delays))
    longest = float(np.median([max(delays, default=0) for delays in loop_delays])) / NS_PER_MS
    noticeable_ms = max(_GAPS_PER_STALL * median_gap_ms(streamed), _MIN_STALL_MS)
    if total < _STALL_SHARE * slow.reference_ns or longest < noticeable_ms:
        return []
    return [Finding(semconv.SYMPTOM_STUTTER, semconv.CAUSE_EVENT_LOOP, total / slow.lifetime_ns, [
        f"the event loop did not run for {longest:.0f} ms while the slowest {len(slow.records)} requests were streamed",
        f"{total / slow.reference_ns:.0%} of their streaming time; the engine continued meanwhile",
    ])]  # fmt: skip
