"""Finds why requests queue: a peak, large requests that run, or no running request at all. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from otel_infer import semconv
from otel_infer.analysis.diagnosis.slow_requests import sum_cause_time
from otel_infer.assembly.records.request import RequestRecord

LARGE_FACTOR = 6.0
"""A request is large if its own work is this many times the median."""
MIN_LARGE_WORK_SHARE = 0.4
"""Share of all work; below it, large requests delay no others, even if one is always running."""
_MIN_LARGE_COUNT_SHARE, _MAX_LARGE_COUNT_SHARE, _MIN_SMALL_REQUESTS = 0.01, 0.4, 4
"""Share of the requests that are large, and number of small ones. Outside, the two are no distinct kinds."""
_MIN_SMALL_WAIT_SHARE = 0.3
"""Share of the waiting time that small requests have. Below it, large requests wait, as in the queue of a model of their own."""
_EXPLAINED_WAIT_SHARE = 0.6
"""Share of the waiting time from which its reason is large requests, or a peak."""
_IDLE_SHARE = 0.5
"""Share of the waiting time without a call of a model from which more or faster workers are not the first change."""
_CHANCE_FACTOR, _ALWAYS_SHARE = 1.25, 0.8
"""Small requests wait beside large ones by this factor more often than by chance, or large ones always run."""
_WORK_CAUSES = (semconv.CAUSE_PREFILL, semconv.CAUSE_DECODE)
ARRIVAL_BINS = 12
"""Intervals of equal length in which arrivals are counted."""
_PEAK_FACTOR, _PEAK_SIGMAS = 1.8, 4.0
"""Factor over the usual arrivals, and standard deviations of steady arrivals above them, of a peak."""
_MAX_PEAK_SHARE = 1 / 3
"""Share of the time above which many arrivals are no peak but usual."""
_CALM_FACTOR, _PEAK_WAIT_FACTOR = 2, 3
"""Factors of the wait before a peak: up to the first a peak is over; above the second it delayed requests."""
_NS_PER_MS = 1_000_000
_QUEUE_STAGES = (semconv.SPAN_QUEUE, semconv.SPAN_QUEUE_WAIT, semconv.SPAN_BATCH_WAIT, *semconv.WAIT_STAGES)
_RUNNING_STAGES = (semconv.SPAN_PREFILL, semconv.SPAN_DECODE, semconv.SPAN_FORWARD)


class QueueAnalysis:
    """The queue intervals of requests, and the requests that ran meanwhile.

    `others`: requests that ran meanwhile. `unfinished`: start instants of running requests that have not
    ended. `since`: from this instant on (monotonic ns) all requests are recorded; earlier ones only if they
    were open then. `stages`: of which the longest is a request's wait.
    """

    def __init__(
        self,
        served: list[RequestRecord],
        others: Sequence[RequestRecord] = (),
        since: int = 0,
        unfinished: Sequence[int] = (),
        stages: Sequence[str] = _QUEUE_STAGES,
    ) -> None:
        self._waits = np.array([queue_interval(record, stages) for record in served], np.int64).clip(since)
        self._runs = np.array([running_interval(record) for record in served], np.int64).clip(since)
        self._others = [(max(begin, since), max(end, since)) for begin, end in map(running_interval, others)]
        last = max([record.ended_at for record in served], default=0)
        self._others += [(max(begin, since), last) for begin in unfinished]
        self._arrivals = np.array([record.arrived_at for record in served], np.int64).clip(since)
        self._arrived_in_window = np.array([record.arrived_at >= since for record in served])
        self._work = np.array([sum_cause_time(record, *_WORK_CAUSES) for record in served], float)
        self._is_large = self._work >= LARGE_FACTOR * max(float(np.median(self._work)), 1.0)

    @property
    def _wait_lengths(self) -> Any:
        return (self._waits[:, 1] - self._waits[:, 0]).astype(float)

    def idle_wait_share(self) -> float:
        """Returns the share of the waiting time in which no request was running.

        Only for requests that ran afterwards. Others may have waited for requests that are still running.
        """
        ran = self._runs[:, 1] > self._runs[:, 0]
        busy = merge_intervals([*self._runs.tolist(), *self._others])
        total = float(self._wait_lengths[ran].sum())
        return 1 - float(overlap_lengths(self._waits[ran], busy).sum()) / total if total else 0.0

    def waiting_behind_large(self) -> str | None:
        """Returns evidence that small requests wait behind large ones; None where they do not."""
        small, large = ~self._is_large, self._is_large
        if not _MIN_LARGE_COUNT_SHARE < large.mean() < _MAX_LARGE_COUNT_SHARE:
            return None
        if small.sum() < _MIN_SMALL_REQUESTS:
            return None
        if self._work[large].sum() < MIN_LARGE_WORK_SHARE * self._work.sum():
            return None
        runs = merge_intervals(self._runs[large].tolist())
        waits = self._wait_lengths[small]
        beside = overlap_lengths(self._waits[small], runs)
        total = float(waits.sum())
        least_ns = _MIN_SMALL_WAIT_SHARE * self._wait_lengths.sum()
        if not total or total < least_ns or beside.sum() / total < _EXPLAINED_WAIT_SHARE:
            return None
        covered = sum(end - begin for begin, end in runs)
        span = float(self._runs[:, 1].max() - self._arrivals.min())
        is_by_chance = beside.sum() / total < _CHANCE_FACTOR * covered / span
        if is_by_chance and covered / span < _ALWAYS_SHARE:
            return None
        return (
            f"{beside.sum() / total:.0%} of the waiting time of small requests passes while one of {int(large.sum())} large ones "
            f"runs ({LARGE_FACTOR:.0f} times the median work or more); large ones run {covered / span:.0%} of the time"
        )

    def describe_peak(self) -> str | None:
        """Returns evidence that requests wait because of a peak of arrivals; None where they do not.

        A peak lasts until the requests that arrived during it were scheduled.
        """
        arrivals = self._arrivals[self._arrived_in_window]
        lengths = self._wait_lengths[self._arrived_in_window]
        if not len(arrivals) or arrivals.min() == arrivals.max():
            return None
        begin, end = arrivals.min(), arrivals.max()
        bins = np.minimum((arrivals - begin) * ARRIVAL_BINS // (end - begin), ARRIVAL_BINS - 1)
        counts = np.bincount(bins, minlength=ARRIVAL_BINS).astype(float)
        waited = np.bincount(bins, weights=lengths, minlength=ARRIVAL_BINS)
        usual = float(np.median(counts))
        is_peak = counts >= max(_PEAK_FACTOR * usual, usual + _PEAK_SIGMAS * max(usual, 1.0) ** 0.5)
        if not is_peak.any() or is_peak.sum() > ARRIVAL_BINS * _MAX_PEAK_SHARE:
            return None
        first = int(np.argmax(is_peak))
        calm_wait = waited[:first].sum() / max(counts[:first].sum(), 1)
        calm_limit = _CALM_FACTOR * calm_wait + _NS_PER_MS
        is_delayed = _extend_to_calm(is_peak, waited / np.maximum(counts, 1), calm_limit)
        delayed_wait = waited[is_delayed].sum() / max(counts[is_delayed].sum(), 1)
        if waited[is_delayed].sum() < _EXPLAINED_WAIT_SHARE * waited.sum():
            return None
        if delayed_wait < _PEAK_WAIT_FACTOR * calm_wait:
            return None
        return (
            f"{counts.max():.0f} requests arrived where {usual:.0f} are usual; "
            f"from then on they wait {delayed_wait / _NS_PER_MS:.0f} ms, before it {calm_wait / _NS_PER_MS:.0f} ms"
        )


def describe_workers(idle_share: float, own_ns: float, others_ns: float) -> tuple[list[str], str]:
    """Returns evidence why workers are late, and what to change; empty if they are too few or too slow.

    `idle_share`: of the waiting time, in which no request was running. `own_ns`, `others_ns`: the time of the calls of a
    model that a request's own item takes, and that the others of its batch add.
    """
    if idle_share > _IDLE_SHARE:
        return [f"{idle_share:.0%} of the waiting time passed while no model was called"], (
            "see what the workers do between two calls of the model: a wait for more requests of a batch (make it shorter), or other code"
        )
    if others_ns <= own_ns:
        return [], ""
    return [
        f"the other items of a batch take {others_ns / (own_ns + others_ns):.0%} of the time of a call"
    ], (
        "items of about the same length in a batch, or more or faster workers; larger batches only if they are no slower per item"
    )


def _extend_to_calm(is_peak: Any, mean: Any, calm: float) -> Any:
    """Returns the bins of the peak, and the bins after each in which requests still wait longer than `calm`."""
    is_delayed = is_peak.copy()
    for i in range(1, len(is_delayed)):
        is_delayed[i] = is_delayed[i] or (is_delayed[i - 1] and mean[i] > calm)
    return is_delayed


def queue_interval(record: RequestRecord, names: Sequence[str] = _QUEUE_STAGES) -> tuple[int, int]:
    """Returns the longest wait in a queue, of an engine or for a lock or a thread; an empty interval if there was none."""
    waits = [(stage.started_at, stage.ended_at) for stage in record.stages if stage.name in names]
    return max(waits, key=lambda wait: wait[1] - wait[0], default=(record.ended_at, record.ended_at))


def running_interval(record: RequestRecord) -> tuple[int, int]:
    """Returns the time from the first step to the last token; an empty interval if there was none."""
    stages = [stage for stage in record.stages if stage.name in _RUNNING_STAGES]
    if not stages:
        return record.ended_at, record.ended_at
    return min(s.started_at for s in stages), max(s.ended_at for s in stages)


def merge_intervals(intervals: Iterable[Sequence[int]]) -> list[tuple[int, int]]:
    """Returns the union of the intervals, in order and without overlaps."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted((begin, end) for begin, end in intervals if begin < end):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def overlap_lengths(waits: Any, merged: list[tuple[int, int]]) -> Any:
    """Returns how much of each of these intervals is covered by the merged ones, ns."""
    if not merged:
        return np.zeros(len(waits))
    covered = np.cumsum([end - begin for begin, end in merged])
    until = np.stack([covered - np.diff(covered, prepend=0), covered], axis=1).ravel()
    begins, ends = (np.interp(waits[:, i], np.ravel(merged), until) for i in range(2))
    return ends - begins
