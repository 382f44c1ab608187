"""Subtracts and intersects intervals, so that each instant is attributed once. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any

_NEVER = 1 << 63
FreeIntervals = list[tuple[int, int]]
"""(begin, end) of the time that is not attributed yet, ns, in order and without overlaps."""


def subtract_interval(free: FreeIntervals, begin: int, end: int) -> tuple[FreeIntervals, int]:
    """Returns the free intervals without this interval, and how much of it was free, ns."""
    if begin >= end:
        return free, 0
    remaining, taken = [], 0
    for since, until in free:
        if until <= begin or end <= since:
            remaining.append((since, until))
            continue
        if since < begin:
            remaining.append((since, begin))
            since = begin
        if end < until:
            remaining.append((end, until))
            until = end
        taken += until - since
    return remaining, taken


def intersect_intervals(
    free: FreeIntervals, busy: Sequence[tuple[Any, ...]]
) -> Iterator[tuple[int, int, Any]]:
    """Yields the free parts of (begin, end, label) intervals, each with its label, in order.

    Where intervals overlap, an instant belongs to the interval that ends first, so an inner interval keeps
    its time. Each interval is visited once.
    """
    at = 0
    for since, until, label in _flatten_overlaps(busy):
        while at < len(free) and free[at][0] < until:
            begin, end = free[at]
            if max(since, begin) < min(until, end):
                yield max(since, begin), min(until, end), label
            if until < end:
                break
            at += 1


def _flatten_overlaps(busy: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, int, Any]]:
    """Yields the intervals without overlaps, in order; an instant belongs to the interval that ends first."""
    open_intervals: list[tuple[int, int, Any]] = []
    at = 0
    for number, (since, until, label) in enumerate(
        sorted([*busy, (_NEVER, _NEVER, None)], key=itemgetter(0))
    ):
        while open_intervals and at < since:
            end, _, open_label = open_intervals[0]
            if end > at:
                yield at, min(end, since), open_label
                at = min(end, since)
            if end <= at:
                heapq.heappop(open_intervals)
        at = max(at, since)
        heapq.heappush(open_intervals, (until, number, label))


def subtract_intervals(free: FreeIntervals, busy: Sequence[tuple[Any, ...]]) -> FreeIntervals:
    """Returns the free intervals without these intervals, which must be in order and must not overlap."""
    remaining, at = [], 0
    for begin, end in free:
        while at < len(busy) and busy[at][0] < end:
            since, until, *_ = busy[at]
            if begin < since:
                remaining.append((begin, since))
            begin = max(begin, until)
            if end < until:
                break
            at += 1
        if begin < end:
            remaining.append((begin, end))
    return remaining


def uncovered_length(busy: Iterable[tuple[Any, ...]], begin: int, end: int) -> int:
    """Returns how much of an interval none of `busy` covers, ns.

    Each item of `busy` starts with its begin and end. They may overlap and need no order.
    """
    free = max(end - begin, 0)
    for since, until, *_ in sorted(busy, key=itemgetter(0)):
        since, until = max(since, begin), min(until, end)
        if since < until:
            free -= until - since
            begin = until
    return free
