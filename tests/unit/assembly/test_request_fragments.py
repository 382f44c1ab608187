"""A request in several processes has one record: its server opens it, its engine adds a fragment."""

from __future__ import annotations

import pytest

from otel_infer.ringbuffer import events
from tests.support.story import RequestHandle, Story, ms, ns

CORE, STEPS = 2, 20
"""The engine core's ring and its steps' ring."""


@pytest.fixture
def story() -> Story:
    story = Story()
    story.engine(STEPS, CORE)
    return story


def record_request(story: Story) -> tuple[RequestHandle, RequestHandle]:
    """Records a complete request. Returns it and its fragment in the engine core."""
    front = story.arrives(0)
    story.submitted(4, front, input_tokens=5)
    core = story.joins(6, front, CORE)
    story.received(9, core)
    story.step(10, 30, [core], {core: 5}, engine=STEPS)
    story.step(30, 40, [core], engine=STEPS)
    story.finished(40, core)
    story.add_request_event(core, events.RequestEnded(ns(41), events.OK, "", 0, 0, 0, 0))
    story.ends(45, front, chunks=2)
    return front, core


def test_fragment_events_belong_to_the_request(story: Story) -> None:
    record_request(story)
    alone = Story()
    front = alone.arrives(0)
    alone.submitted(4, front, input_tokens=5)
    alone.received(9, front)
    alone.step(10, 30, [front], {front: 5})
    alone.step(30, 40, [front])
    alone.finished(40, front)
    alone.ends(45, front, chunks=2)
    assert story.tree() == alone.tree() != ""


def test_fragment_end_does_not_end_the_request(story: Story) -> None:
    record_request(story)
    assert ms(story.record().ended_at) == 45


def test_fragment_waits_for_its_request(story: Story) -> None:
    front, core = record_request(story)
    arrival = next(recorded for recorded in story.recorded_events if recorded.handle == front.handle)
    story.recorded_events.remove(arrival)
    late = arrival.event._replace(at=ns(7))
    story.recorded_events.append(arrival._replace(event=late))
    record = story.record()
    assert record.output_tokens == 2


def test_fragment_of_an_unknown_request_is_ignored(story: Story) -> None:
    front, core = record_request(story)
    story.recorded_events = [
        recorded
        for recorded in story.recorded_events
        if (recorded.ring, recorded.handle) != (front.ring, front.handle)
    ]
    assert story.records() == []


def test_sequences_share_one_fragment(story: Story) -> None:
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


def test_request_continues_after_engine_death(story: Story) -> None:
    front = story.arrives(0)
    story.submitted(4, front, input_tokens=5)
    core = story.joins(6, front, CORE)
    story.step(10, 30, [core], {core: 5}, engine=STEPS)
    story.add_event(CORE, 0, events.ProcessDied(ns(35)))
    story.ends(45, front, events.ERROR, "EngineDeadError", status=500)
    record = story.record()
    assert (record.error_type, ms(record.ended_at), record.failed_stage) == ("EngineDeadError", 45, "decode")


def test_loss_in_the_engine_marks_the_request(story: Story) -> None:
    record_request(story)
    story.add_event(CORE, 0, events.EventsLost(ns(12), 1, 0))
    assert story.record().telemetry_lost


def test_fragment_missing_from_live_table_has_not_ended(story: Story) -> None:
    record_request(story)
    story.add_event(CORE, 0, events.LiveListed(ns(42), []))
    record = story.record()
    assert ms(record.ended_at) == 45


def test_pause_counts_in_the_current_process_only(story: Story) -> None:
    """In the server before the submission and after the last token, in the engine in between."""
    record_request(story)
    story.paused(1, 3)
    story.paused(3, 6)
    story.paused(20, 25)
    story.paused(5, 8, process=CORE)
    story.paused(31, 33, process=CORE)
    story.paused(42, 43, process=CORE)
    pauses = [(ms(pause.started_at), ms(pause.ended_at)) for pause in story.record().pauses]
    assert pauses == [(1, 3), (3, 4), (5, 8), (31, 33)]


def test_loop_pauses_count_all_the_time(story: Story) -> None:
    record_request(story)
    story.paused(1, 3, cause="event_loop")
    story.paused(12, 28, cause="event_loop")
    story.paused(12, 20)
    record = story.record()
    assert [(ms(pause.started_at), ms(pause.ended_at)) for pause in record.loop_pauses] == [(1, 3), (12, 28)]
    assert record.pauses == ()


def test_worker_pause_counts_for_requests_of_its_engine(story: Story) -> None:
    """In any order of discovery. Pauses of another engine's worker do not count."""
    worker, other = 3, 4
    story.add_event(worker, 0, events.ProcessSeen(0, 103, "worker", 0, parent=102))
    story.add_event(CORE, 0, events.ProcessSeen(0, 102, "engine", 0, parent=100))
    story.add_event(other, 0, events.ProcessSeen(0, 104, "worker", 0, parent=99))
    record_request(story)
    story.paused(12, 15, cause="compile", process=worker)
    story.paused(16, 18, cause="compile", process=other)
    pauses = [(ms(pause.started_at), ms(pause.ended_at)) for pause in story.record().pauses]
    assert pauses == [(12, 15)]


def test_recomputation_is_matched_by_the_engine_handle(story: Story) -> None:
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
