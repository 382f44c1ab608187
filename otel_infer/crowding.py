"""What a queue is made of: a peak, heavy requests that run, or nothing that runs at all. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from otel_infer import semconv
from otel_infer.records import RequestRecord

HEAVY = 6.0
"""A request is heavy with so many times the work of the usual one."""
BINS = 12
_PEAK, _SIGMAS = 1.8, 4.0  # more than chance makes of steady arrivals
_MS = 1_000_000


class Crowd:
    """Requests that waited, by when they did and beside whom."""

    def __init__(self, served: list[RequestRecord]) -> None:
        self._waits = np.array([_interval(record) for record in served], np.int64)
        self._runs = np.array([_running(record) for record in served], np.int64)
        self._arrivals = np.array([record.arrived_at for record in served], np.int64)
        work = np.array([_work(record) for record in served], float)
        self._is_heavy = work >= HEAVY * max(float(np.median(work)), 1.0)

    @property
    def _lengths(self) -> Any:
        return (self._waits[:, 1] - self._waits[:, 0]).astype(float)

    def idle_share(self) -> float:
        """Of all waiting, the part in which no request was running."""
        busy = _merged(self._runs[self._runs[:, 1] > self._runs[:, 0]])
        inside = sum(_overlap(begin, end, busy) for begin, end in self._waits.tolist())
        total = float(self._lengths.sum())
        return 1 - inside / total if total else 0.0

    def behind_heavy(self) -> str | None:
        """How light requests fare beside heavy ones, if that is why they wait."""
        light, heavy = ~self._is_heavy, self._is_heavy
        if not 0.01 < heavy.mean() < 0.4 or light.sum() < 4:
            return None
        runs = _merged(self._runs[heavy])
        waits = self._lengths[light]
        beside = np.array([_overlap(begin, end, runs) for begin, end in self._waits[light].tolist()])
        total = float(waits.sum())
        if not total or beside.sum() / total < 0.6:
            return None
        covered = sum(end - begin for begin, end in runs)
        span = float(self._runs[:, 1].max() - self._arrivals.min())
        if beside.sum() / total < 1.25 * covered / span and covered / span < 0.8:
            return None
        return (
            f"{beside.sum() / total:.0%} of the waiting of light requests is beside {int(heavy.sum())} heavy ones "
            f"({HEAVY:.0f} times the work or more), which ran {covered / span:.0%} of the time"
        )

    def peak(self) -> str | None:
        """When more came than usual, if that is when requests waited, until those who came then had their turn."""
        begin, end = self._arrivals.min(), self._arrivals.max()
        if end <= begin:
            return None
        which = np.minimum((self._arrivals - begin) * BINS // (end - begin), BINS - 1)
        came = np.bincount(which, minlength=BINS).astype(float)
        waited = np.bincount(which, weights=self._lengths, minlength=BINS)
        usual = float(np.median(came))
        busy = came >= max(_PEAK * usual, usual + _SIGMAS * max(usual, 1.0) ** 0.5)
        if not busy.any() or busy.sum() > BINS / 3:
            return None
        calm = waited[: int(np.argmax(busy))].sum() / max(came[: int(np.argmax(busy))].sum(), 1)
        late = _until_calm(busy, waited / np.maximum(came, 1), 2 * calm + _MS)
        then = waited[late].sum() / max(came[late].sum(), 1)
        if waited[late].sum() < 0.6 * waited.sum() or then < 3 * calm:
            return None
        return (
            f"{came.max():.0f} requests came where {usual:.0f} are usual; "
            f"from then on they wait {then / _MS:.0f} ms, before {calm / _MS:.0f} ms"
        )


def _until_calm(busy: Any, mean: Any, calm: float) -> Any:
    """The busy bins and those after each in which requests still wait longer than in calm."""
    late = busy.copy()
    for i in range(1, len(late)):
        late[i] = late[i] or (late[i - 1] and mean[i] > calm)
    return late


def _interval(record: RequestRecord) -> tuple[int, int]:
    """In the queue; empty for one that was not."""
    queue = record.stage(semconv.SPAN_QUEUE)
    return (queue.started_at, queue.ended_at) if queue is not None else (record.ended_at, record.ended_at)


def _running(record: RequestRecord) -> tuple[int, int]:
    """From its first step to its last token."""
    stages = [s for s in record.stages if s.name in (semconv.SPAN_PREFILL, semconv.SPAN_DECODE)]
    if not stages:
        return record.ended_at, record.ended_at
    return min(s.started_at for s in stages), max(s.ended_at for s in stages)


def _work(record: RequestRecord) -> int:
    begin, end = _running(record)
    return end - begin


def _merged(intervals: Any) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(map(tuple, intervals.tolist())):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _overlap(begin: int, end: int, merged: list[tuple[int, int]]) -> int:
    return sum(max(min(end, until) - max(begin, since), 0) for since, until in merged)
