"""What held up a process is remembered, whatever else held it up more often."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from otel_infer.assembly.pauses import MAX_REMEMBERED
from otel_infer.assembly.records.intervals import subtract_interval, uncovered_length
from tests.support.story import Story, ms


def test_a_pause_that_is_rare_is_not_pushed_out_by_those_that_come_often() -> None:
    """A container that is throttled ten times a second for two minutes and more, and compiled something at the beginning."""
    story = Story()
    a = story.arrives(0, "a")
    story.paused(10, 510, "compile")
    for n in range(MAX_REMEMBERED + 10):
        story.paused(1000 + 100 * n, 1050 + 100 * n, "throttled")
    story.ends(200_000, a)
    pauses = story.record(a).pauses
    assert [(ms(one.started_at), ms(one.ended_at)) for one in pauses if one.cause == "compile"] == [(10, 510)]
    assert len(pauses) == 1 + MAX_REMEMBERED
    assert [one.ended_at for one in pauses] == sorted(one.ended_at for one in pauses)


def test_throttling_that_each_process_of_a_server_tells_of_befell_a_request_once() -> None:
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
    assert [(ms(one.started_at), ms(one.ended_at), one.cause) for one in pauses] == [
        (10, 60, "throttled"),
        (70, 90, "gc"),
    ]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=12),
    st.integers(0, 50),
    st.integers(0, 50),
)
def test_what_is_outside_of_all_is_what_is_left_when_each_was_taken_out(
    busy: list[tuple[int, int]], begin: int, end: int
) -> None:
    free = [(begin, end)] if begin < end else []
    for since, until in busy:
        free, _ = subtract_interval(free, since, until)
    assert uncovered_length(busy, begin, end) == sum(until - since for since, until in free)
