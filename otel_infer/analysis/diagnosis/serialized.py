"""Finds requests whose code waits for other requests' model calls: a lock that no hook can see. Pure.

    one request's call   ████████▏
    another's code       ░░░░░░░░▏████████▏      it goes on when the other's call ends
    a third's code       ░░░░░░░░░░░░░░░░░▏████

A `threading.Lock` is C code, so its waits have no stage. They show in the order of events: the code before the engine
goes on as another request's call ends, far more often than by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from otel_infer import semconv
from otel_infer.analysis.attribution.preparation import ENGINE_STAGES, find_preparation
from otel_infer.analysis.diagnosis.queueing import running_interval
from otel_infer.analysis.diagnosis.slow_requests import NS_PER_MS, sum_cause_time
from otel_infer.analysis.diagnosis.symptoms import Finding
from otel_infer.assembly.records.request import RequestRecord

MIN_WAIT_NS = 20 * NS_PER_MS
HANDOVER_NS = 10 * NS_PER_MS
"""Time in which a waiting thread goes on after the one before it has ended."""
MIN_HANDOVER_SHARE, MIN_CHANCE_FACTOR, MIN_WAITS = 0.7, 2.0, 5
"""Share of the waits that end as another call ends, how often by chance at most, and how many waits are evidence."""
_PREPARING = frozenset(
    (semconv.SPAN_INGRESS, semconv.SPAN_ACCEPT, semconv.SPAN_TOKENIZE, *semconv.WAIT_STAGES)
)


def find_serialized_waits(records: Sequence[RequestRecord]) -> Any:
    """Returns for each request the ns in which its code waited for another request's call; 0 without evidence."""
    gaps = np.array([_find_longest_gap(record) for record in records], np.int64).reshape(-1, 2)
    lengths = gaps[:, 1] - gaps[:, 0]
    waits = np.flatnonzero(lengths >= MIN_WAIT_NS)
    ends = np.sort([running_interval(record)[1] for record in records])
    if len(waits) < MIN_WAITS:
        return np.zeros(len(records))
    # Its own call ends later, so each end that counts is another request's.
    before = np.searchsorted(ends, gaps[waits, 1], "right") - np.searchsorted(
        ends, gaps[waits, 1] - HANDOVER_NS
    )
    share = float((before > 0).mean())
    span = max(float(ends[-1] - ends[0]), 1.0)
    by_chance = min(HANDOVER_NS * len(ends) / span, 1.0)
    if share < MIN_HANDOVER_SHARE or share < MIN_CHANCE_FACTOR * by_chance:
        return np.zeros(len(records))
    limits = [sum_cause_time(record, semconv.CAUSE_APPLICATION, semconv.CAUSE_INGRESS) for record in records]
    return np.where(lengths >= MIN_WAIT_NS, np.minimum(lengths, limits), 0)


def describe_serialized(waits: Any) -> Finding:
    """Returns the symptom of these waits. `waits`: of each request, as `find_serialized_waits` returns them."""
    lengths = waits[waits > 0]
    return Finding(semconv.SYMPTOM_QUEUEING, semconv.CAUSE_LOCK_QUEUE, 0.0, [
        f"the code of {len(lengths)} of {len(waits)} requests goes on as another request's model call ends: one at a time, as with a lock",
        f"it waits {float(np.mean(lengths)) / NS_PER_MS:.0f} ms each",
    ])  # fmt: skip


def _find_longest_gap(record: RequestRecord) -> tuple[int, int]:
    """Returns the longest time of the application's code before the engine, between two stages or within `ingress`."""
    begin, end = find_preparation(record.stages)
    if begin >= end:
        return 0, 0
    gaps, covered_until = [(begin, begin)], begin
    for stage in sorted(record.stages, key=lambda stage: stage.started_at):
        if stage.name == semconv.SPAN_INGRESS:
            gaps.append((stage.started_at, min(stage.ended_at, end)))
        elif stage.name in _PREPARING or stage.name in ENGINE_STAGES:
            gaps.append((covered_until, min(stage.started_at, end)))
        covered_until = max(covered_until, stage.ended_at)
    return max(gaps, key=lambda gap: gap[1] - gap[0])
