"""A request in several processes is one: its server opened it, its engine has a part of it."""

from __future__ import annotations

import pytest

from otel_infer.ringbuffer import events
from tests.support.story import Story, Who, ms, ns

CORE, STEPS = 2, 20
"""The engine core, and its steps."""


@pytest.fixture
def story() -> Story:
    story = Story()
    story.engine(STEPS, CORE)
    return story


def told(story: Story) -> tuple[Who, Who]:
    """A request that is whole, with its part."""
    front = story.arrives(0)
    story.submitted(4, front, input_tokens=5)
    core = story.joins(6, front, CORE)
    story.received(9, core)
    story.step(10, 30, [core], {core: 5}, engine=STEPS)
    story.step(30, 40, [core], engine=STEPS)
    story.finished(40, core)
    story.state(core, events.RequestEnded(ns(41), events.OK, "", 0, 0, 0, 0))
    story.ends(45, front, chunks=2)
    return front, core


def test_what_is_told_of_a_part_is_told_of_the_request(story: Story) -> None:
    told(story)
    alone = Story()
    front = alone.arrives(0)
    alone.submitted(4, front, input_tokens=5)
    alone.received(9, front)
    alone.step(10, 30, [front], {front: 5})
    alone.step(30, 40, [front])
    alone.finished(40, front)
    alone.ends(45, front, chunks=2)
    assert story.tree() == alone.tree() != ""


def test_the_end_of_a_part_is_not_the_end_of_the_request(story: Story) -> None:
    told(story)
    assert ms(story.record().ended_at) == 45


def test_a_part_that_is_told_before_its_request_waits_for_it(story: Story) -> None:
    front, core = told(story)
    arrival = next(said for said in story.said if said.handle == front.handle)
    story.said.remove(arrival)
    late = arrival.event._replace(at=ns(7))
    story.said.append(arrival._replace(event=late))
    record = story.record()
    assert record.output_tokens == 2


def test_a_part_of_an_unknown_request_is_nobodys(story: Story) -> None:
    front, core = told(story)
    story.said = [said for said in story.said if (said.ring, said.handle) != (front.ring, front.handle)]
    assert story.records() == []


def test_sequences_of_a_request_are_one_part(story: Story) -> None:
    front = story.arrives(0)
    story.submitted(4, front, input_tokens=5, sequences=2)
    core = story.joins(6, front, CORE)
    story.step(10, 30, [core, core], {core: 5}, engine=STEPS)
    story.step(30, 40, [core, core], engine=STEPS)
    story.finished(40, core)
    story.finished(40, core)
    story.ends(45, front, chunks=2)
    record = story.record()
    assert (record.output_tokens, record.sequences) == (4, 2)


def test_when_the_engine_dies_the_request_goes_on_where_it_arrived(story: Story) -> None:
    front = story.arrives(0)
    story.submitted(4, front, input_tokens=5)
    core = story.joins(6, front, CORE)
    story.step(10, 30, [core], {core: 5}, engine=STEPS)
    story.tell(CORE, 0, events.ProcessDied(ns(35)))
    story.ends(45, front, events.ERROR, "EngineDeadError", status=500)
    record = story.record()
    assert (record.error_type, ms(record.ended_at), record.failed_stage) == ("EngineDeadError", 45, "decode")


def test_what_is_lost_in_the_engine_marks_the_request(story: Story) -> None:
    told(story)
    story.tell(CORE, 0, events.EventsLost(ns(12), 1, 0))
    assert story.record().telemetry_lost


def test_who_is_not_listed_in_the_engine_any_more_has_not_ended(story: Story) -> None:
    told(story)
    story.tell(CORE, 0, events.LiveListed(ns(42), []))
    record = story.record()
    assert ms(record.ended_at) == 45


def test_a_pause_counts_where_the_request_was(story: Story) -> None:
    """In its server before it was handed over and after the last token, in the engine in between."""
    told(story)
    story.paused(1, 3)
    story.paused(3, 6)
    story.paused(20, 25)
    story.paused(5, 8, process=CORE)
    story.paused(31, 33, process=CORE)
    story.paused(42, 43, process=CORE)
    pauses = [(ms(pause.started_at), ms(pause.ended_at)) for pause in story.record().pauses]
    assert pauses == [(1, 3), (3, 4), (5, 8), (31, 33)]


def test_the_event_loop_that_brings_the_answer_counts_all_the_time(story: Story) -> None:
    told(story)
    story.paused(1, 3, cause="event_loop")
    story.paused(12, 28, cause="event_loop")
    story.paused(12, 20)
    record = story.record()
    assert [(ms(one.started_at), ms(one.ended_at)) for one in record.loop_pauses] == [(1, 3), (12, 28)]
    assert record.pauses == ()


def test_a_pause_of_a_worker_holds_up_who_is_in_the_engine_that_waits_for_it(story: Story) -> None:
    """Whichever of the two processes is seen first; another engine's worker holds up nobody here."""
    worker, other = 3, 4
    story.tell(worker, 0, events.ProcessSeen(0, 103, "worker", 0, parent=102))
    story.tell(CORE, 0, events.ProcessSeen(0, 102, "engine", 0, parent=100))
    story.tell(other, 0, events.ProcessSeen(0, 104, "worker", 0, parent=99))
    told(story)
    story.paused(12, 15, cause="compile", process=worker)
    story.paused(16, 18, cause="compile", process=other)
    pauses = [(ms(pause.started_at), ms(pause.ended_at)) for pause in story.record().pauses]
    assert pauses == [(12, 15)]


def test_a_prompt_that_is_computed_again_is_known_by_its_handle_in_the_engine(story: Story) -> None:
    front = story.arrives(0)
    story.submitted(4, front, input_tokens=5)
    core = story.joins(6, front, CORE)
    story.step(10, 30, [core], {core: 5}, engine=STEPS)
    story.preempted(31, core, "recompute")
    story.step(32, 40, [core], {core: 6}, engine=STEPS)
    story.finished(40, core)
    story.ends(45, front, chunks=2)
    record = story.record()
    assert record.preemptions == 1
    assert record.output_tokens == 2
