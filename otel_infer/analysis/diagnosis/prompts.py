"""Finds prompts and inputs that are expensive: the request's own, or those of others in the same steps. Pure."""

from __future__ import annotations

import numpy as np

from otel_infer import semconv
from otel_infer.analysis.diagnosis.excess import MAIN_SHARE, TimeByComplaint
from otel_infer.analysis.diagnosis.slow_requests import (
    MIN_REQUESTS,
    NOTICEABLE_MS,
    NS_PER_MS,
    filter_generating,
    input_size,
    median_gap_ms,
    select_slowest,
    sum_nonstreaming_cause_time,
    ttft_or_duration,
)
from otel_infer.analysis.diagnosis.symptoms import Finding
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.semconv import causes

_USUAL_PREFILL_SHARE = 0.25
"""Least share in slow requests of prefill that is the main cost of most requests: they wait for others, too."""
_LARGE_INPUT = 4.0
"""Times the median number of input tokens from which an input is large. Slow requests of any load are somewhat longer."""
_GAPS_PER_PROMPT = 5
"""Median gaps between tokens that a prompt must exceed to be noticed in the stream's own pace."""
_SHORTER_INPUTS = "shorter or capped inputs, or long ones apart from the others"
_QUEUE_CAUSES = causes.select_causes(causes.GROUP_QUEUE)


def find_expensive_prefill(served: list[RequestRecord], time: TimeByComplaint) -> list[Finding]:
    """Finds prompts that cost more than all else before the first token.

    If prefill is the main cost of most requests, the waiting of other requests for it counts as well.
    """
    served = filter_generating(served)
    if len(served) < MIN_REQUESTS:
        return []
    gap = median_gap_ms(served)
    prefills = [sum_nonstreaming_cause_time(record, semconv.CAUSE_PREFILL) for record in served]
    typical_ns = np.median(prefills)
    typical_share = float(
        np.median([prefill / ttft_or_duration(record) for prefill, record in zip(prefills, served)])
    )
    slow = select_slowest(
        served, ttft_or_duration, whole=ttft_or_duration, measure=sum_nonstreaming_cause_time
    )
    share, mean_ms = slow.reference_share(semconv.CAUSE_PREFILL), slow.mean_ms(semconv.CAUSE_PREFILL)
    noticeable_ms = max(NOTICEABLE_MS, _GAPS_PER_PROMPT * gap)
    has_usual_share = typical_share >= MAIN_SHARE and share >= _USUAL_PREFILL_SHARE
    is_usual = has_usual_share and typical_ns / NS_PER_MS >= noticeable_ms
    is_large = share >= MAIN_SHARE and mean_ms >= noticeable_ms
    is_excess = share >= _USUAL_PREFILL_SHARE and time.is_complaint(semconv.SYMPTOM_PREFILL)
    if not (is_usual or is_large or is_excess):
        return []
    followed = (semconv.CAUSE_INTERFERENCE, *_QUEUE_CAUSES) if is_usual else ()
    tokens = np.median([record.input_tokens for record in slow.records])
    evidence = [
        f"{share:.0%} of the time to the first token of the slowest {len(slow.records)} requests is their own prefill",
        f"{typical_share:.0%} for the median request",
        f"{mean_ms:.0f} ms for {tokens:.0f} prompt tokens, then a token every {gap:.1f} ms",
    ]
    weight = slow.lifetime_share(semconv.CAUSE_PREFILL, *followed)
    return [Finding(semconv.SYMPTOM_PREFILL, semconv.CAUSE_PREFILL, weight, evidence)]


def find_large_inputs(served: list[RequestRecord], time: TimeByComplaint) -> list[Finding]:
    """Finds encoders and classifiers that are slow because some inputs are much longer than most."""
    kind = semconv.SYMPTOM_PREFILL
    if filter_generating(served) or not time.has_excess or time.excess_share(kind) < MAIN_SHARE:
        return []
    usual = float(np.median([input_size(record) for record in served]))
    large = float(np.median([input_size(served[row]) for row in time.slow]))
    if large < _LARGE_INPUT * max(usual, 1.0):
        return []
    evidence = [f"the slow requests have {large:.0f} input tokens each, the median request {usual:.0f}"]
    return [Finding(kind, semconv.CAUSE_DECODE, 0.0, evidence, _SHORTER_INPUTS)]


def find_prefill_interference(served: list[RequestRecord], time: TimeByComplaint) -> list[Finding]:
    """Finds first tokens that are late because other requests' prompts are computed in the same steps."""
    served = filter_generating(served)
    if len(served) < MIN_REQUESTS:
        return []
    slow = select_slowest(
        served, ttft_or_duration, whole=ttft_or_duration, measure=sum_nonstreaming_cause_time
    )
    share = slow.reference_share(semconv.CAUSE_INTERFERENCE)
    mean_ms = slow.mean_ms(semconv.CAUSE_INTERFERENCE)
    if share < MAIN_SHARE or mean_ms < max(NOTICEABLE_MS, _GAPS_PER_PROMPT * median_gap_ms(served)):
        return []
    return [Finding(semconv.SYMPTOM_PREFILL, semconv.CAUSE_INTERFERENCE, slow.lifetime_share(semconv.CAUSE_INTERFERENCE), [
        f"{share:.0%} of the time to the first token of the slowest {len(slow.records)} requests is prefill of others",
        f"{mean_ms:.0f} ms each",
    ])]  # fmt: skip
