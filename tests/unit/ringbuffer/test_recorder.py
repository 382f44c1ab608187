"""This process's rings: made once by whoever comes first, never anybody else's, and never the caller's trouble."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_infer import _clock
from otel_infer.ringbuffer import events, layout, recorder, writer
from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.ringbuffer.reader import RequestReader
from otel_infer.ringbuffer.recorder import Recorder

ENDED = events.RequestEnded(9, events.OK, "", 200, 0, 0, 0)


def arrival(at: int = 1, model: Any = "m") -> events.RequestArrived:
    return events.RequestArrived(
        at, at, bytes(15) + b"1", b"12345678", bytes(8), bytes(8), 1, "chat", "toy", model, "n"
    )


class Arenas:
    """Counts the arenas that were asked for, and may refuse them."""

    def __init__(self) -> None:
        self.made: list[writer.MemoryArena] = []
        self.refuses = ""
        self.asked = self.tended = 0
        self.meanwhile: Callable[[], None] = lambda: None

    def make(self) -> writer.MemoryArena:
        self.asked += 1
        self.meanwhile()
        if self.refuses:
            raise writer.RingUnavailable(self.refuses)
        self.made.append(writer.MemoryArena())
        return self.made[-1]

    def tend(self) -> None:
        self.tended += 1


@pytest.fixture
def arenas() -> Arenas:
    return Arenas()


@pytest.fixture
def recording(arenas: Arenas) -> Iterator[Recorder]:
    recording = Recorder()
    recording.start(arenas.make, arenas.tend, lambda reason: None)
    yield recording
    recording.stop()


def said(arena: writer.MemoryArena) -> list[events.RecordedEvent]:
    """All facts of the one request ring of an arena."""
    (memory,) = [memory for name, memory in arena.buffers if name.endswith(layout.SUFFIX_REQUESTS)]
    return list(RequestReader(memory, 1).poll(0, final=True))


def lost(arena: writer.MemoryArena) -> int:
    return sum(one.event.lost for one in said(arena) if isinstance(one.event, events.EventsLost))


def unrecorded(arena: writer.MemoryArena) -> int:
    rings = MergedReader()
    for name, memory in arena.buffers:
        rings.add_ring(name, memory, 1)
    return rings.count_unrecorded()


# ── making rings ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_is_made_before_the_first_fact(recording: Recorder, arenas: Arenas) -> None:
    recording.report_hooks("toy", 1, 2)
    assert arenas.asked == arenas.tended == 0
    assert recording.open_request(arrival()) != 0
    assert (arenas.asked, arenas.tended) == (1, 1)
    assert next(one.event[1:] for one in said(arenas.made[0])) == ("toy", 1, 2)


def test_how_the_process_started_is_kept_for_the_rings_and_comes_first(arenas: Arenas) -> None:
    recording = Recorder()
    began = events.ProcessStarted(1, 2, b"t" * 16, b"s" * 8)
    recording.start(arenas.make, arenas.tend, lambda reason: None, born=lambda: began)
    recording.record_startup(events.ModuleImported(3, "torch"))
    assert arenas.asked == 0
    recording.ensure_rings()
    recording.record_startup(events.PhaseBegan(4, "weights"))
    assert [one.event for one in said(arenas.made[0])] == [
        began, events.ModuleImported(3, "torch"), events.PhaseBegan(4, "weights"),
    ]  # fmt: skip
    recording.discard_rings()
    recording.ensure_rings()
    assert [one.event for one in said(arenas.made[1])] == [one.event for one in said(arenas.made[0])]
    recording.stop()


def test_a_forked_child_does_not_tell_what_its_parent_did_to_get_ready(
    recording: Recorder, arenas: Arenas
) -> None:
    recording.record_startup(events.ModuleImported(3, "torch"))
    recording.reset_after_fork()
    recording.ensure_rings()
    assert said(arenas.made[0]) == []


def test_a_process_that_never_gets_ready_does_not_fill_its_memory(
    recording: Recorder, arenas: Arenas
) -> None:
    for at in range(10_000):
        recording.record_startup(events.PhaseBegan(at, "weights"))
    recording.ensure_rings()
    assert len(said(arenas.made[0])) == recorder.MAX_STARTUP_EVENTS
    ready = events.PhaseEnded(1, 1, events.READY, events.BY_ENGINE, "", "")
    recording.record_startup(ready)
    assert said(arenas.made[0])[-1].event == ready, "what need not be kept is told whatever was before"


def test_threads_that_come_first_at_once_share_one_ring(recording: Recorder, arenas: Arenas) -> None:
    barrier = threading.Barrier(16)
    arenas.meanwhile = lambda: time.sleep(0.05)
    handles: list[int] = []

    def come() -> None:
        barrier.wait()
        handles.append(recording.open_request(arrival()))

    threads = [threading.Thread(target=come) for _ in range(16)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert arenas.asked == 1
    assert 0 not in handles
    arrivals = [one for one in said(arenas.made[0]) if isinstance(one.event, events.RequestArrived)]
    assert sorted(handles) == sorted(one.handle for one in arrivals)


def test_what_is_stated_while_rings_are_made_by_the_same_thread_is_left_out(
    recording: Recorder, arenas: Arenas
) -> None:
    """As a garbage collection may do it in the midst of the making."""
    inner: list[int] = []
    arenas.meanwhile = lambda: inner.append(recording.open_request(arrival()))
    assert recording.open_request(arrival()) != 0
    assert inner == [0]
    assert arenas.asked == 1


def test_where_there_is_no_memory_another_arena_may_stand_in(arenas: Arenas) -> None:
    recording, other, reasons = Recorder(), writer.MemoryArena(), []

    def refused(reason: str) -> writer.MemoryArena:
        reasons.append(reason)
        return other

    arenas.refuses = "none left"
    recording.start(arenas.make, arenas.tend, refused)
    assert recording.open_request(arrival()) != 0
    assert reasons == ["none left"]
    assert recording.arena is other
    recording.stop()


def test_where_there_is_no_memory_at_all_nothing_is_recorded_and_nobody_asks_again(
    recording: Recorder, arenas: Arenas
) -> None:
    arenas.refuses = "none left"
    assert [0, 0, 0] == [recording.open_request(arrival()) for _ in range(3)]
    assert arenas.asked == 1
    assert not recording.active


def test_it_is_tended_at_most_once_a_second(recording: Recorder, arenas: Arenas) -> None:
    for at in range(0, 3_000_000_000, 100_000_000):
        recording.open_request(arrival(at))
    assert 3 <= arenas.tended <= 4


def test_which_hooks_are_bound_is_said_again_once_a_minute(recording: Recorder, arenas: Arenas) -> None:
    """A sidecar that was started again on a busy server finds the first telling overwritten."""
    recording.report_hooks("toy", 1, 2)
    recording.report_hooks("tin", 3, 3)
    second = recorder.CHECK_NS
    began = _clock.now()
    for seconds in range(150):
        recording.open_request(arrival(began + seconds * second))
    told = [one.event for one in said(arenas.made[0]) if isinstance(one.event, events.HooksReported)]
    assert [fact[1:] for fact in told] == [("toy", 1, 2), ("tin", 3, 3)] * 3
    assert [fact.at > began + 60 * second for fact in told] == [False] * 2 + [True] * 4


def test_rings_that_are_given_up_are_made_anew_and_what_was_in_flight_is_counted(
    recording: Recorder, arenas: Arenas
) -> None:
    old = [recording.open_request(arrival()) for _ in range(3)]
    recording.close_request(old[0], ENDED)
    recording.discard_rings()
    new = recording.open_request(arrival())
    for handle in old:
        recording.close_request(handle, ENDED)
    recording.close_request(new, ENDED)
    assert arenas.asked == 2
    assert (unrecorded(arenas.made[1]), lost(arenas.made[1])) == (2, 0)
    known = [one.handle for one in said(arenas.made[1]) if isinstance(one.event, events.RequestArrived)]
    assert known == [new]


# ── handles ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_of_earlier_rings_is_never_taken_for_one_of_these(arenas: Arenas) -> None:
    before: set[int] = set()
    for _ in range(50):
        recording = Recorder()
        recording.start(arenas.make, arenas.tend, lambda reason: None)
        handles = {recording.open_request(arrival()) for _ in range(20)}
        assert not handles & before
        before |= handles
        recording.stop()


def test_after_stop_nothing_is_stated_by_whoever_still_holds_a_handle(
    recording: Recorder, arenas: Arenas
) -> None:
    handle = recording.open_request(arrival())
    recording.stop()
    recording.record(handle, events.RequestReceived(1))
    recording.close_request(handle, ENDED)
    assert recording.open_request(arrival()) == 0
    assert recording.acquire_batch_writer("toy") is None
    assert len(said(arenas.made[0])) == 1


# ── never the caller's trouble ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "fact",
    [
        events.StageEnded(1, 0, "s", 1.5),  # type: ignore[arg-type]
        events.RequestSubmitted(1, 1, -1, 0, "toy"),
        events.RequestSubmitted(1, 1, 1 << 40, 0, "toy"),
        events.StageEnded(1, 0, ["a list"], 0),  # type: ignore[arg-type]
        "no fact at all",
    ],
)
def test_a_fact_that_cannot_be_stated_is_lost_and_named_once_and_the_next_one_is_not(
    recording: Recorder, arenas: Arenas, caplog: pytest.LogCaptureFixture, fact: Any
) -> None:
    handle = recording.open_request(arrival())
    with caplog.at_level(logging.ERROR, "otel_infer"):
        for _ in range(3):
            recording.record(handle, fact)
    recording.record(handle, events.RequestReceived(7))
    assert lost(arenas.made[0]) == 3
    assert isinstance(said(arenas.made[0])[-1].event, events.RequestReceived)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("model", [None, 7, ["x"], b"bytes", "\ud800"])
def test_a_name_that_is_no_text_is_told_as_text_or_lost(recording: Recorder, model: Any) -> None:
    recording.open_request(arrival(model=model))
    assert recording.open_request(arrival()) != 0


@pytest.mark.parametrize(
    "fact",
    [
        events.AttributeSet(1, "db.statement", "select " * 5000),
        events.AttributeSet(1, "emoji", "😀" * 5000),
        events.AttributeSet(1, "key " * 2000, "value " * 2000),
        events.AttributeSet(1, "ids", list(range(5000))),
        events.AttributeSet(1, "huge", 10**4000),
        events.SpanEventAdded(1, "e" * 9000, {"a": "b" * 9000}),
        events.LinkDescribed(1, "ab" * 8, {"a": "b" * 9000}),
        events.NameUpdated(1, "n" * 9000),
    ],
    ids=["text", "emoji", "key", "list", "number", "event", "link", "name"],
)
def test_a_text_that_is_too_long_is_cut_and_tears_nothing(
    recording: Recorder, arenas: Arenas, fact: Any
) -> None:
    handle = recording.open_request(arrival())
    recording.record(handle, fact)
    recording.record(handle, events.RequestReceived(7))
    _, cut, after = (one.event for one in said(arenas.made[0]))
    assert type(cut) is type(fact)
    assert cut.at == 1
    assert isinstance(after, events.RequestReceived)
    if isinstance(fact[-1], str):
        assert fact[-1].startswith(cut[-1])
        assert len(cut[-1]) > 100


def test_a_garbage_collection_in_the_midst_of_a_fact_may_state_facts_too(
    recording: Recorder, arenas: Arenas
) -> None:
    stated = 0

    def collected(phase: str, info: dict[str, int]) -> None:
        nonlocal stated
        if stated < 1000:
            stated += 1
            recording.record(handle, events.StageEnded(1, 0, "collection", stated))

    handle = recording.open_request(arrival())
    threshold = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(1)
    try:
        for number in range(1000):
            recording.record(handle, events.StageEnded(1, 0, "own", number))
    finally:
        gc.callbacks.remove(collected)
        gc.set_threshold(*threshold)
    stages = [one.event for one in said(arenas.made[0]) if isinstance(one.event, events.StageEnded)]
    assert [fact.items for fact in stages if fact.stage == "own"] == list(range(1000))
    assert [fact.items for fact in stages if fact.stage == "collection"] == list(range(1, stated + 1))
    assert stated > 0


# ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_step_ring_that_is_refused_is_asked_for_once_and_counted(
    recording: Recorder, arenas: Arenas, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recording.open_request(arrival())
    asked: list[str] = []

    def allocate(self: writer.MemoryArena, name: str, size: int) -> Any:
        asked.append(name)
        raise writer.RingUnavailable("none left")

    monkeypatch.setattr(writer.MemoryArena, "allocate", allocate)
    with caplog.at_level(logging.WARNING, "otel_infer"):
        assert [None] * 5 == [recording.acquire_batch_writer("toy") for _ in range(5)]
    assert len(asked) == 1
    assert (unrecorded(arenas.made[0]), lost(arenas.made[0])) == (1, 0)
    assert len(caplog.records) == 1


def test_more_engines_than_there_is_room_for_run_unrecorded_and_are_counted(
    recording: Recorder, arenas: Arenas
) -> None:
    logs = [
        recording.acquire_batch_writer(f"engine {number}") for number in range(recorder.MAX_STEP_RINGS + 3)
    ]
    assert [log is not None for log in logs] == [True] * recorder.MAX_STEP_RINGS + [False] * 3
    assert (unrecorded(arenas.made[0]), lost(arenas.made[0])) == (1, 0)


def test_a_step_log_that_is_given_back_is_used_again(recording: Recorder) -> None:
    first = recording.acquire_batch_writer("toy")
    assert first is not None
    assert recording.acquire_batch_writer("toy") is not first
    recording.release_batch_writer("toy", first)
    assert recording.acquire_batch_writer("toy") is first


# ── fork ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_forked_child_writes_no_byte_into_its_parents_rings(tmp_path: Path) -> None:
    recording = Recorder()
    recording.start(lambda: writer.FileArena(tmp_path), lambda: None, lambda reason: None)
    handle = recording.open_request(arrival())
    log = recording.acquire_batch_writer("toy")
    assert log is not None
    rings = sorted(tmp_path.iterdir())
    before = [path.read_bytes() for path in rings]
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            recording.record(handle, events.RequestReceived(1))
            recording.close_request(handle, ENDED)
            log.write_done(log.write_scheduled(["a"]), size=1)
            mine = recording.open_request(arrival())
            status = 0 if mine not in (0, handle) and not log.alive else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert before == [path.read_bytes() for path in rings]
    assert len(list(tmp_path.glob("*.requests"))) == 2
    recording.stop()


def test_a_fork_while_another_thread_makes_the_rings_stops_nobody(arenas: Arenas) -> None:
    recording = Recorder()
    making, forked = threading.Event(), threading.Event()

    def meanwhile() -> None:
        making.set()
        forked.wait(10)

    arenas.meanwhile = meanwhile
    recording.start(arenas.make, arenas.tend, lambda reason: None)
    thread = threading.Thread(target=recording.open_request, args=(arrival(),))
    thread.start()
    making.wait(10)
    pid = os.fork()
    if pid == 0:
        arenas.meanwhile = lambda: None
        os._exit(0 if recording.open_request(arrival()) else 1)
    forked.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    recording.stop()


def test_a_reader_does_not_wait_for_the_rest_of_a_fact_that_did_not_fit(
    recording: Recorder, arenas: Arenas
) -> None:
    handle = recording.open_request(arrival())
    recording.record(handle, events.RequestSubmitted(1, 1, -1, 0, "toy"))
    recording.record(handle, events.RequestReceived(7))
    (memory,) = [memory for name, memory in arenas.made[0].buffers if name.endswith(layout.SUFFIX_REQUESTS)]
    reader = RequestReader(memory, 1)
    found = [type(one.event) for now in (1, 2) for one in reader.poll(now)]
    assert found == [events.EventsLost, events.RequestArrived, events.RequestReceived]
    assert reader.torn == 0


def test_a_slot_is_free_again_though_the_end_did_not_fit(recording: Recorder) -> None:
    handle = recording.open_request(arrival())
    assert recording.requests is not None
    recording.close_request(handle, ENDED._replace(status_code=1 << 40))
    assert recording.requests.in_flight == 0
