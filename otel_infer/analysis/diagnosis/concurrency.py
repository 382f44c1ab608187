"""Estimates what requests take longer because others are computed at the same time in their process. Pure.

For servers that run a model call per request: each generates in its own thread, and all share cores and the GIL. An
engine that batches its requests is excluded, because it attributes the time of a step to its members itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from otel_infer import semconv
from otel_infer.analysis.diagnosis.queueing import running_interval
from otel_infer.analysis.diagnosis.slow_requests import sum_cause_time
from otel_infer.assembly.records.request import RequestRecord

MIN_CONCURRENCY = 3.0
"""Generations at the same time from which slow requests are slow because of it."""
_SHARED_CAUSES = (
    semconv.CAUSE_PREFILL,
    semconv.CAUSE_DECODE,
    semconv.CAUSE_STARVED,
    semconv.CAUSE_BLOCKED,
    semconv.CAUSE_RAN_LONGER,
)
"""Causes that grow if generations share cores and the GIL."""
_PERCENTILES = (10, 90)


class SharedTime(NamedTuple):
    """The time that requests lose to others. `extra`: ns per request. `concurrency`: mean of each one's run, itself included.

    `before`: mean number of runs of others while it waited for its own.
    `alone_ms`, `crowded_ms`: time of a unit (a token, or a request without tokens) at low and high concurrency.
    """

    extra: Any
    concurrency: Any
    before: Any
    alone_ms: float
    crowded_ms: float


def estimate_shared_time(records: Sequence[RequestRecord]) -> SharedTime | None:
    """Returns the estimate; None where an engine batches, or where concurrency makes nothing slower."""
    if not records or any(record.summary.batch_size_max > 1 for record in records):
        return None
    runs = np.array([running_interval(record) for record in records], np.int64)
    concurrency = _mean_concurrency(runs, runs)
    waits = np.stack([[record.arrived_at for record in records], runs[:, 0]], axis=1)
    shared = np.array([sum_cause_time(record, *_SHARED_CAUSES) for record in records], float)
    units = np.array([max(record.output_tokens, 1) for record in records], float)
    pace = shared / units
    usable = (runs[:, 1] > runs[:, 0]) & (pace > 0)
    if usable.sum() < 3 or np.ptp(concurrency[usable]) < 0.5:
        return None
    slope = _fit_slope(concurrency[usable], pace[usable])
    if slope <= 0:
        return None
    extra = np.where(usable, np.minimum(slope * units * np.maximum(concurrency - 1, 0), shared), 0.0)
    low, high = np.percentile(concurrency[usable], _PERCENTILES)
    alone = float(np.median(pace[usable & (concurrency <= low)]))
    crowded = float(np.median(pace[usable & (concurrency >= high)]))
    return SharedTime(extra, concurrency, _mean_concurrency(runs, waits), alone / 1e6, crowded / 1e6)


def _mean_concurrency(runs: Any, intervals: Any) -> Any:
    """Returns for each interval the mean number of runs that are open during it."""
    times = np.concatenate([runs[:, 0], runs[:, 1]])
    changes = np.concatenate([np.ones(len(runs)), -np.ones(len(runs))])
    order = np.argsort(times, kind="stable")
    times, counts = times[order].astype(float), np.cumsum(changes[order])
    area = np.concatenate([[0.0], np.cumsum(counts[:-1] * np.diff(times))])
    begun, ended = (np.interp(intervals[:, side].astype(float), times, area) for side in (0, 1))
    return (ended - begun) / np.maximum(intervals[:, 1] - intervals[:, 0], 1)


def _fit_slope(concurrency: Any, pace: Any) -> float:
    """Returns the median slope over pairs of requests (Theil and Sen's estimate), ns per unit and generation."""
    one, other = np.triu_indices(min(len(pace), 300), 1)
    apart = concurrency[other] - concurrency[one]
    is_apart = np.abs(apart) >= 0.5
    if not is_apart.any():
        return 0.0
    return float(np.median((pace[other] - pace[one])[is_apart] / apart[is_apart]))
