"""What a queue is made of: a peak, heavy requests that run, or nothing that runs at all. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from otel_infer import semconv
from otel_infer.analysis.diagnosis.slow_requests import time_in
from otel_infer.assembly.records.request import RequestRecord

LARGE_FACTOR = 6.0
"""A request is heavy with so many times the work of the usual one."""
MIN_LARGE_WORK_SHARE = 0.4
"""Of all work: what is less is in nobody's way, though it may always be there."""
_WORK_CAUSES = (semconv.CAUSE_PREFILL, semconv.CAUSE_DECODE)
ARRIVAL_BINS = 12
_PEAK_FACTOR, _PEAK_SIGMAS = 1.8, 4.0  # more than chance makes of steady arrivals
_NS_PER_MS = 1_000_000


class QueueAnalysis:
    """Requests that waited, by when they did and beside whom. `others` ran meanwhile; `unfinished`: since when those run that
    have not ended.

    `since`: the instant from which on all are known (monotonic ns); of those from before only who was still there then.
    """

    def __init__(
        self,
        served: list[RequestRecord],
        others: Sequence[RequestRecord] = (),
        since: int = 0,
        unfinished: Sequence[int] = (),
    ) -> None:
        self._waits = np.array([_queue_interval(record) for record in served], np.int64).clip(since)
        self._runs = np.array([_running_interval(record) for record in served], np.int64).clip(since)
        self._others = [(max(begin, since), max(end, since)) for begin, end in map(_running_interval, others)]
        last = max([record.ended_at for record in served], default=0)
        self._others += [(max(begin, since), last) for begin in unfinished]
        self._arrivals = np.array([record.arrived_at for record in served], np.int64).clip(since)
        self._arrived_in_window = np.array([record.arrived_at >= since for record in served])
        self._work = np.array([time_in(record, *_WORK_CAUSES) for record in served], float)
        self._is_large = self._work >= LARGE_FACTOR * max(float(np.median(self._work)), 1.0)

    @property
    def _wait_lengths(self) -> Any:
        return (self._waits[:, 1] - self._waits[:, 0]).astype(float)

    def idle_wait_share(self) -> float:
        """Of the waiting of all that had their turn, the part in which no request was running.

        Who never had it may have waited for some that are running still.
        """
        ran = self._runs[:, 1] > self._runs[:, 0]
        busy = _merge_intervals([*self._runs.tolist(), *self._others])
        total = float(self._wait_lengths[ran].sum())
        return 1 - float(_overlap_lengths(self._waits[ran], busy).sum()) / total if total else 0.0

    def waiting_behind_large(self) -> str | None:
        """How light requests fare beside heavy ones, if that is why they wait."""
        light, heavy = ~self._is_large, self._is_large
        if not 0.01 < heavy.mean() < 0.4 or light.sum() < 4:
            return None
        if self._work[heavy].sum() < MIN_LARGE_WORK_SHARE * self._work.sum():
            return None
        runs = _merge_intervals(self._runs[heavy].tolist())
        waits = self._wait_lengths[light]
        beside = _overlap_lengths(self._waits[light], runs)
        total = float(waits.sum())
        if not total or beside.sum() / total < 0.6:
            return None
        covered = sum(end - begin for begin, end in runs)
        span = float(self._runs[:, 1].max() - self._arrivals.min())
        if beside.sum() / total < 1.25 * covered / span and covered / span < 0.8:
            return None
        return (
            f"{beside.sum() / total:.0%} of the waiting of light requests is beside {int(heavy.sum())} heavy ones "
            f"({LARGE_FACTOR:.0f} times the work or more), which ran {covered / span:.0%} of the time"
        )

    def describe_peak(self) -> str | None:
        """When more came than usual, if that is when requests waited, until those who came then had their turn."""
        arrivals, lengths = (
            self._arrivals[self._arrived_in_window],
            self._wait_lengths[self._arrived_in_window],
        )
        if not len(arrivals) or arrivals.min() == arrivals.max():
            return None
        begin, end = arrivals.min(), arrivals.max()
        which = np.minimum((arrivals - begin) * ARRIVAL_BINS // (end - begin), ARRIVAL_BINS - 1)
        came = np.bincount(which, minlength=ARRIVAL_BINS).astype(float)
        waited = np.bincount(which, weights=lengths, minlength=ARRIVAL_BINS)
        usual = float(np.median(came))
        busy = came >= max(_PEAK_FACTOR * usual, usual + _PEAK_SIGMAS * max(usual, 1.0) ** 0.5)
        if not busy.any() or busy.sum() > ARRIVAL_BINS / 3:
            return None
        calm = waited[: int(np.argmax(busy))].sum() / max(came[: int(np.argmax(busy))].sum(), 1)
        late = _extend_to_calm(busy, waited / np.maximum(came, 1), 2 * calm + _NS_PER_MS)
        then = waited[late].sum() / max(came[late].sum(), 1)
        if waited[late].sum() < 0.6 * waited.sum() or then < 3 * calm:
            return None
        return (
            f"{came.max():.0f} requests came where {usual:.0f} are usual; "
            f"from then on they wait {then / _NS_PER_MS:.0f} ms, before {calm / _NS_PER_MS:.0f} ms"
        )


def _extend_to_calm(busy: Any, mean: Any, calm: float) -> Any:
    """The busy bins and those after each in which requests still wait longer than in calm."""
    late = busy.copy()
    for i in range(1, len(late)):
        late[i] = late[i] or (late[i - 1] and mean[i] > calm)
    return late


def _queue_interval(record: RequestRecord) -> tuple[int, int]:
    """In the queue; empty for one that was not."""
    queue = record.find_stage(semconv.SPAN_QUEUE)
    return (queue.started_at, queue.ended_at) if queue is not None else (record.ended_at, record.ended_at)


def _running_interval(record: RequestRecord) -> tuple[int, int]:
    """From its first step to its last token."""
    stages = [s for s in record.stages if s.name in (semconv.SPAN_PREFILL, semconv.SPAN_DECODE)]
    if not stages:
        return record.ended_at, record.ended_at
    return min(s.started_at for s in stages), max(s.ended_at for s in stages)


def _merge_intervals(intervals: Iterable[Sequence[int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, end in sorted((begin, end) for begin, end in intervals if begin < end):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _overlap_lengths(waits: Any, merged: list[tuple[int, int]]) -> Any:
    """How much of each of these intervals lies in the others; ns."""
    if not merged:
        return np.zeros(len(waits))
    covered = np.cumsum([end - begin for begin, end in merged])
    until = np.stack([covered - np.diff(covered, prepend=0), covered], axis=1).ravel()
    begins, ends = (np.interp(waits[:, i], np.ravel(merged), until) for i in range(2))
    return ends - begins
