"""Finds that the model itself is too slow: most requests miss an objective, and most of their time is its work. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from otel_infer import semconv
from otel_infer.analysis.diagnosis.cpu_use import measure_cores_in_use
from otel_infer.analysis.diagnosis.device_bottleneck import find_device_bottlenecks
from otel_infer.analysis.diagnosis.excess import MAIN_SHARE, OWN_WORK, TimeByComplaint
from otel_infer.analysis.diagnosis.slow_requests import NS_PER_MS, filter_generating, median_gap_ms
from otel_infer.analysis.diagnosis.symptoms import Finding
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.ringbuffer.events import CpuSeen

_MISSED_SHARE = 0.5
"""Share of the requests that miss an objective from which that is usual, and no matter of slow ones."""
_IDLE_SHARE = 0.6
"""Share of the cores that a server uses, below which its model could use more of them."""


def find_slow_model(
    served: Sequence[RequestRecord],
    time: TimeByComplaint,
    missed: Mapping[bytes, tuple[str, ...]],
    cpu_usage: Sequence[CpuSeen],
) -> list[Finding]:
    """Finds a model whose own work takes most of the time of requests that miss their objectives.

    `missed`: by span id, the objectives that a request missed. Without objectives, no time is too long.
    """
    names = [missed.get(record.span_id, ()) for record in served]
    generating = len(filter_generating(served)) * 2 > len(served)
    kind = OWN_WORK if generating else semconv.SYMPTOM_PREFILL
    if sum(map(bool, names)) < _MISSED_SHARE * len(served) or time.median_share(kind) < MAIN_SHARE:
        return []
    counts = Counter(name for each in names for name in each).most_common()
    objectives = ", ".join(f"{name} ({count})" for name, count in counts)
    evidence = [
        f"{sum(map(bool, names))} of {len(served)} requests miss an objective: {objectives}",
        _describe_work(served, time, kind),
    ]
    cause = semconv.CAUSE_DECODE if generating else semconv.CAUSE_PREFILL
    limits = describe_model_limits(served, cpu_usage)
    evidence += [limit for limit, _ in limits[:1]]
    advice = limits[0][1] if limits else ""
    return [Finding(semconv.SYMPTOM_SLOW_MODEL, cause, time.total_share(kind), evidence, advice)]


def describe_model_limits(
    records: Sequence[RequestRecord], cpu_usage: Sequence[CpuSeen]
) -> list[tuple[str, str]]:
    """Returns what limits the model, and what makes it faster: by the figures of its device, else of the CPU.

    The stage with the most device time comes first. Empty where neither was measured.
    """
    devices = [(limit.to_sentence(), limit.advice.change) for limit in find_device_bottlenecks(records)]
    used, cores = measure_cores_in_use(cpu_usage, records)
    if devices or not cores:
        return devices
    found = f"the CPU: while it has requests, this server uses {used:.1f} of {cores} cores"
    if used < _IDLE_SHARE * cores:
        return [
            (
                found,
                "more threads for the model (OMP_NUM_THREADS), or more requests in a batch: cores are idle",
            )
        ]
    return [(found, "smaller or quantized weights, more or faster cores, or a GPU: the cores are in use")]


def _describe_work(served: Sequence[RequestRecord], time: TimeByComplaint, kind: str) -> str:
    """Returns how long the model's own work takes in the median request."""
    whole_ms = float(np.median([record.duration_ns for record in served])) / NS_PER_MS
    found = f"the model works {time.median_ms(kind):.0f} ms on the median request, of {whole_ms:.0f} ms"
    gap = median_gap_ms(list(served))
    return f"{found}; a token takes {gap:.1f} ms" if gap else found
