"""Intervals: each instant is given away once, however many there are."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from otel_infer.analysis.attribution.step_columns import _paused_time_before
from otel_infer.assembly.records.intervals import (
    intersect_intervals,
    subtract_interval,
    subtract_intervals,
    uncovered_length,
)

instants = st.integers(0, 60)
pairs = st.lists(st.tuples(instants, instants).map(lambda pair: (min(pair), max(pair))), max_size=8)


def of(free: list[tuple[int, int]]) -> set[int]:
    return {instant for begin, end in free for instant in range(begin, end)}


@given(pairs, pairs)
def test_what_is_inside_and_what_is_left_are_all_there_was(
    taken: list[tuple[int, int]], busy: list[tuple[int, int]]
) -> None:
    free = [(0, 60)]
    for begin, end in taken:
        free, _ = subtract_interval(free, begin, end)
    named = [(begin, end, str(number)) for number, (begin, end) in enumerate(busy)]
    parts = list(intersect_intervals(free, named))
    left = subtract_intervals(free, parts)
    assert of(left) == of(free) - of(busy)
    assert sorted(instant for begin, end, _ in parts for instant in range(begin, end)) == sorted(
        of(free) & of(busy)
    )
    for begin, end, name in parts:
        assert of([(begin, end)]) <= of([busy[int(name)]])


@given(pairs, st.lists(instants, min_size=1, max_size=8))
def test_how_much_is_covered_before_an_instant_counts_each_ns_once(
    busy: list[tuple[int, int]], at: list[int]
) -> None:
    found = _paused_time_before(list(busy), np.array(at))
    assert found.tolist() == [instant - uncovered_length(busy, 0, instant) for instant in at]
