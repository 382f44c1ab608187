"""Intervals of which each instant is given away once. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any

_NEVER = 1 << 63
FreeIntervals = list[tuple[int, int]]
"""Begin and end of what nobody has, ns, in order."""


def subtract_interval(free: FreeIntervals, begin: int, end: int) -> tuple[FreeIntervals, int]:
    """What is free after this interval was given away, and how much of it was."""
    if begin >= end:
        return free, 0
    left, taken = [], 0
    for since, until in free:
        if until <= begin or end <= since:
            left.append((since, until))
            continue
        if since < begin:
            left.append((since, begin))
            since = begin
        if end < until:
            left.append((end, until))
            until = end
        taken += until - since
    return left, taken


def intersect_intervals(
    free: FreeIntervals, busy: Sequence[tuple[Any, ...]]
) -> Iterator[tuple[int, int, Any]]:
    """The parts of these that are free, and what stands behind the begin and end of each, in order. An instant is of the one that
    ends first: what lies inside another is its own.

    However many there are, each is looked at once.
    """
    at = 0
    for since, until, named in _flatten_overlaps(busy):
        while at < len(free) and free[at][0] < until:
            begin, end = free[at]
            if max(since, begin) < min(until, end):
                yield max(since, begin), min(until, end), named
            if until < end:
                break
            at += 1


def _flatten_overlaps(busy: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, int, Any]]:
    going: list[tuple[int, int, Any]] = []
    at = 0
    for number, (since, until, named) in enumerate(
        sorted([*busy, (_NEVER, _NEVER, None)], key=itemgetter(0))
    ):
        while going and at < since:
            end, _, name = going[0]
            if end > at:
                yield at, min(end, since), name
                at = min(end, since)
            if end <= at:
                heapq.heappop(going)
        at = max(at, since)
        heapq.heappush(going, (until, number, named))


def subtract_intervals(free: FreeIntervals, busy: Sequence[tuple[Any, ...]]) -> FreeIntervals:
    """What is free after these, which are in order and do not overlap, were given away."""
    left, at = [], 0
    for begin, end in free:
        while at < len(busy) and busy[at][0] < end:
            since, until, *_ = busy[at]
            if begin < since:
                left.append((begin, since))
            begin = max(begin, until)
            if end < until:
                break
            at += 1
        if begin < end:
            left.append((begin, end))
    return left


def uncovered_length(busy: Iterable[tuple[Any, ...]], begin: int, end: int) -> int:
    """How much of an interval, ns, is in none of these, each of which begins with its own begin and end; they may overlap."""
    free = max(end - begin, 0)
    for since, until, *_ in sorted(busy, key=itemgetter(0)):
        since, until = max(since, begin), min(until, end)
        if since < until:
            free -= until - since
            begin = until
    return free
