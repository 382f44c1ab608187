"""Intervals of which each instant is given away once. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import Any

Free = list[tuple[int, int]]
"""Begin and end of what nobody has, ns, in order."""


def take_out(free: Free, begin: int, end: int) -> tuple[Free, int]:
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


def outside(busy: Iterable[tuple[Any, ...]], begin: int, end: int) -> int:
    """How much of an interval, ns, is in none of these, each of which begins with its own begin and end; they may overlap."""
    free = max(end - begin, 0)
    for since, until, *_ in sorted(busy, key=itemgetter(0)):
        since, until = max(since, begin), min(until, end)
        if since < until:
            free -= until - since
            begin = until
    return free
