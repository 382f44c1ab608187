"""Set operations on intervals: each instant counts once, however many intervals overlap."""

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


def instants_in(free: list[tuple[int, int]]) -> set[int]:
    return {instant for begin, end in free for instant in range(begin, end)}


@given(pairs, pairs)
def test_intersection_and_remainder_partition_the_intervals(
    taken: list[tuple[int, int]], busy: list[tuple[int, int]]
) -> None:
    free = [(0, 60)]
    for begin, end in taken:
        free, _ = subtract_interval(free, begin, end)
    named = [(begin, end, str(number)) for number, (begin, end) in enumerate(busy)]
    parts = list(intersect_intervals(free, named))
    left = subtract_intervals(free, parts)
    assert instants_in(left) == instants_in(free) - instants_in(busy)
    assert sorted(instant for begin, end, _ in parts for instant in range(begin, end)) == sorted(
        instants_in(free) & instants_in(busy)
    )
    for begin, end, name in parts:
        assert instants_in([(begin, end)]) <= instants_in([busy[int(name)]])


@given(pairs, st.lists(instants, min_size=1, max_size=8))
def test_paused_time_counts_each_ns_once(busy: list[tuple[int, int]], at: list[int]) -> None:
    found = _paused_time_before(list(busy), np.array(at))
    assert found.tolist() == [instant - uncovered_length(busy, 0, instant) for instant in at]
