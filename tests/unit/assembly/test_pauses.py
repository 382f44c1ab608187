"""Pauses of a process are kept per cause, so that frequent causes do not evict rare ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from otel_infer.assembly.pauses import MAX_REMEMBERED
from otel_infer.assembly.records.intervals import subtract_interval, uncovered_length
from tests.support.story import Story, ms


def test_frequent_pauses_do_not_evict_rare_ones() -> None:
    """A container is throttled ten times a second for over two minutes and compiled once at the beginning."""
    story = Story()
    a = story.arrives(0, "a")
    story.paused(10, 510, "compile")
    for n in range(MAX_REMEMBERED + 10):
        story.paused(1000 + 100 * n, 1050 + 100 * n, "throttled")
    story.ends(200_000, a)
    pauses = story.record(a).pauses
    assert [(ms(pause.started_at), ms(pause.ended_at)) for pause in pauses if pause.cause == "compile"] == [
        (10, 510)
    ]
    assert len(pauses) == 1 + MAX_REMEMBERED
    assert [pause.ended_at for pause in pauses] == sorted(pause.ended_at for pause in pauses)


def test_throttling_reported_by_several_processes_counts_once() -> None:
    story = Story()
    a = story.arrives(0, "a")
    part = story.joins(5, a, 2)
    story.submitted(4, a)
    for process in (1, 2):
        story.paused(10, 60, "throttled", process)
        story.paused(70, 90, "gc", process)
    story.finished(100, part)
    story.ends(110, a)
    pauses = story.record(a).pauses
    assert [(ms(pause.started_at), ms(pause.ended_at), pause.cause) for pause in pauses] == [
        (10, 60, "throttled"),
        (70, 90, "gc"),
    ]


def test_marks_of_several_processes_are_in_order_of_time() -> None:
    story = Story()
    a = story.arrives(0, "a")
    part = story.joins(5, a, 2)
    story.submitted(4, a)
    for at in (10, 30):
        story.marked(at, at + 1, "kv_eviction", process=1)
        story.marked(at + 10, at + 11, "allocator_retry", process=2)
    story.finished(100, part)
    story.ends(110, a)
    assert [ms(mark.at) for mark in story.record(a).marks] == [11, 21, 31, 41]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=12),
    st.integers(0, 50),
    st.integers(0, 50),
)
def test_uncovered_length_matches_stepwise_subtraction(
    busy: list[tuple[int, int]], begin: int, end: int
) -> None:
    free = [(begin, end)] if begin < end else []
    for since, until in busy:
        free, _ = subtract_interval(free, since, until)
    assert uncovered_length(busy, begin, end) == sum(until - since for since, until in free)
