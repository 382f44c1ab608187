"""The rings of one process: created once, never shared with a forked child, and without errors for the caller."""

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
from otel_infer.ringbuffer import events, layout, recorder
from otel_infer.ringbuffer.arena import FileArena, MemoryArena, RingUnavailable
from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.ringbuffer.reader import RequestReader
from otel_infer.ringbuffer.recorder import RETRY_NS, Recorder
from otel_infer.ringbuffer.step_rings import RESERVED_BYTES

ENDED = events.RequestEnded(9, events.OK, "", 200, 0, 0, 0)


def arrival(at: int = 1, model: Any = "m") -> events.RequestArrived:
    return events.RequestArrived(
        at, at, bytes(15) + b"1", b"12345678", bytes(8), bytes(8), 1, "chat", "toy", model, "n"
    )


class Arenas:
    """Counts the arenas that were requested, and rejects requests when `rejection` is set."""

    def __init__(self) -> None:
        self.made: list[MemoryArena] = []
        self.rejection = ""
        self.requested = self.reader_checks = 0
        self.during_creation: Callable[[], None] = lambda: None

    def make(self) -> MemoryArena:
        self.requested += 1
        self.during_creation()
        if self.rejection:
            raise RingUnavailable(self.rejection)
        self.made.append(MemoryArena())
        return self.made[-1]

    def ensure_reader(self) -> None:
        self.reader_checks += 1


@pytest.fixture
def arenas() -> Arenas:
    return Arenas()


@pytest.fixture
def recording(arenas: Arenas) -> Iterator[Recorder]:
    recording = Recorder()
    recording.start(arenas.make, arenas.ensure_reader, lambda reason: None)
    yield recording
    recording.stop()


def read_events(arena: MemoryArena) -> list[events.RecordedEvent]:
    """Returns all events of the only request ring of an arena."""
    (memory,) = [memory for name, memory in arena.buffers if name.endswith(layout.SUFFIX_REQUESTS)]
    return list(RequestReader(memory, 1).poll(0, final=True))


def count_lost(arena: MemoryArena) -> int:
    return sum(
        recorded.event.lost
        for recorded in read_events(arena)
        if isinstance(recorded.event, events.EventsLost)
    )


def count_unrecorded(arena: MemoryArena) -> int:
    rings = MergedReader()
    for name, memory in arena.buffers:
        rings.add_ring(name, memory, 1)
    return rings.read_counts()["unrecorded"]


# ── making rings ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_rings_are_created_at_the_first_event(recording: Recorder, arenas: Arenas) -> None:
    recording.report_hooks("toy", 1, 2)
    assert arenas.requested == arenas.reader_checks == 0
    assert recording.open_request(arrival()) != 0
    assert (arenas.requested, arenas.reader_checks) == (1, 1)
    assert next(recorded.event[1:] for recorded in read_events(arenas.made[0])) == ("toy", 1, 2)


def test_startup_events_are_written_first_to_new_rings(arenas: Arenas) -> None:
    recording = Recorder()
    began = events.ProcessStarted(1, 2, b"t" * 16, b"s" * 8)
    recording.start(arenas.make, arenas.ensure_reader, lambda reason: None, get_process_start=lambda: began)
    recording.record_startup(events.ModuleImported(3, "torch"))
    assert arenas.requested == 0
    recording.ensure_rings()
    recording.record_startup(events.PhaseBegan(4, "weights"))
    assert [recorded.event for recorded in read_events(arenas.made[0])] == [
        began, events.ModuleImported(3, "torch"), events.PhaseBegan(4, "weights"),
    ]  # fmt: skip
    recording.discard_rings()
    recording.ensure_rings()
    assert [recorded.event for recorded in read_events(arenas.made[1])] == [
        recorded.event for recorded in read_events(arenas.made[0])
    ]
    recording.stop()


def test_a_forked_child_omits_parent_startup_events(recording: Recorder, arenas: Arenas) -> None:
    recording.record_startup(events.ModuleImported(3, "torch"))
    recording.reset_after_fork()
    recording.ensure_rings()
    assert read_events(arenas.made[0]) == []


def test_buffered_startup_events_are_limited(recording: Recorder, arenas: Arenas) -> None:
    for at in range(10_000):
        recording.record_startup(events.PhaseBegan(at, "weights"))
    recording.ensure_rings()
    assert len(read_events(arenas.made[0])) == recorder.MAX_STARTUP_EVENTS
    ready = events.PhaseEnded(1, 1, events.READY, events.BY_ENGINE, "", "")
    recording.record_startup(ready)
    assert read_events(arenas.made[0])[-1].event == ready, (
        "an event after ring creation is written although the buffer was full"
    )


def test_threads_that_record_first_share_one_ring(recording: Recorder, arenas: Arenas) -> None:
    barrier = threading.Barrier(16)
    arenas.during_creation = lambda: time.sleep(0.05)
    handles: list[int] = []

    def record() -> None:
        barrier.wait()
        handles.append(recording.open_request(arrival()))

    threads = [threading.Thread(target=record) for _ in range(16)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert arenas.requested == 1
    assert 0 not in handles
    arrivals = [
        recorded
        for recorded in read_events(arenas.made[0])
        if isinstance(recorded.event, events.RequestArrived)
    ]
    assert sorted(handles) == sorted(recorded.handle for recorded in arrivals)


def test_events_recorded_during_ring_creation_are_dropped(recording: Recorder, arenas: Arenas) -> None:
    """For example by a garbage collection on the thread that creates the rings."""
    nested: list[int] = []
    arenas.during_creation = lambda: nested.append(recording.open_request(arrival()))
    assert recording.open_request(arrival()) != 0
    assert nested == [0]
    assert arenas.requested == 1


def test_a_fallback_arena_is_used_without_shared_memory(arenas: Arenas) -> None:
    recording, fallback, reasons = Recorder(), MemoryArena(), []

    def get_fallback(reason: str) -> MemoryArena:
        reasons.append(reason)
        return fallback

    arenas.rejection = "none left"
    recording.start(arenas.make, arenas.ensure_reader, get_fallback)
    assert recording.open_request(arrival()) != 0
    assert reasons == ["none left"]
    assert recording.arena is fallback
    recording.stop()


def test_without_any_arena_recording_stops_without_retry(recording: Recorder, arenas: Arenas) -> None:
    arenas.rejection = "none left"
    assert [0, 0, 0] == [recording.open_request(arrival()) for _ in range(3)]
    assert arenas.requested == 1
    assert not recording.active


def test_the_reader_is_checked_once_a_second(recording: Recorder, arenas: Arenas) -> None:
    for at in range(0, 3_000_000_000, 100_000_000):
        recording.open_request(arrival(at))
    assert 3 <= arenas.reader_checks <= 4


def test_hook_reports_are_repeated_once_a_minute(recording: Recorder, arenas: Arenas) -> None:
    """A sidecar that restarts on a busy server finds the first report overwritten."""
    recording.report_hooks("toy", 1, 2)
    recording.report_hooks("tin", 3, 3)
    second = recorder.CHECK_NS
    began = _clock.now()
    for seconds in range(150):
        recording.open_request(arrival(began + seconds * second))
    reports = [
        recorded.event
        for recorded in read_events(arenas.made[0])
        if isinstance(recorded.event, events.HooksReported)
    ]
    assert [report[1:] for report in reports] == [("toy", 1, 2), ("tin", 3, 3)] * 3
    assert [report.at > began + 60 * second for report in reports] == [False] * 2 + [True] * 4


def test_discarded_rings_are_recreated_and_open_requests_counted(recording: Recorder, arenas: Arenas) -> None:
    old = [recording.open_request(arrival()) for _ in range(3)]
    recording.close_request(old[0], ENDED)
    recording.discard_rings()
    new = recording.open_request(arrival())
    for handle in old:
        recording.close_request(handle, ENDED)
    recording.close_request(new, ENDED)
    assert arenas.requested == 2
    assert (count_unrecorded(arenas.made[1]), count_lost(arenas.made[1])) == (2, 0)
    handles = [
        recorded.handle
        for recorded in read_events(arenas.made[1])
        if isinstance(recorded.event, events.RequestArrived)
    ]
    assert handles == [new]


# ── handles ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_handles_are_not_reused_by_later_rings(arenas: Arenas) -> None:
    before: set[int] = set()
    for _ in range(50):
        recording = Recorder()
        recording.start(arenas.make, arenas.ensure_reader, lambda reason: None)
        handles = {recording.open_request(arrival()) for _ in range(20)}
        assert not handles & before
        before |= handles
        recording.stop()


def test_a_handle_records_nothing_after_stop(recording: Recorder, arenas: Arenas) -> None:
    handle = recording.open_request(arrival())
    recording.stop()
    recording.record(handle, events.RequestReceived(1))
    recording.close_request(handle, ENDED)
    assert recording.open_request(arrival()) == 0
    assert recording.acquire_batch_writer("toy") is None
    assert len(read_events(arenas.made[0])) == 1


# ── errors do not reach the caller ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "event",
    [
        events.StageEnded(1, 0, "s", 1.5),  # type: ignore[arg-type]
        events.RequestSubmitted(1, 1, -1, 0, "toy"),
        events.RequestSubmitted(1, 1, 1 << 40, 0, "toy"),
        events.StageEnded(1, 0, ["a list"], 0),  # type: ignore[arg-type]
        "not an event",
    ],
)
def test_an_invalid_event_is_counted_and_logged_once(
    recording: Recorder, arenas: Arenas, caplog: pytest.LogCaptureFixture, event: Any
) -> None:
    """The next event is recorded."""
    handle = recording.open_request(arrival())
    with caplog.at_level(logging.ERROR, "otel_infer"):
        for _ in range(3):
            recording.record(handle, event)
    recording.record(handle, events.RequestReceived(7))
    assert count_lost(arenas.made[0]) == 3
    assert isinstance(read_events(arenas.made[0])[-1].event, events.RequestReceived)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("model", [None, 7, ["x"], b"bytes", "\ud800"])
def test_a_model_name_of_another_type_is_harmless(recording: Recorder, model: Any) -> None:
    recording.open_request(arrival(model=model))
    assert recording.open_request(arrival()) != 0


@pytest.mark.parametrize(
    "event",
    [
        events.AttributeSet(1, "db.statement", "select " * 5000),
        events.AttributeSet(1, "emoji", "😀" * 5000),
        events.AttributeSet(1, "ids", list(range(5000))),
        events.AttributeSet(1, "huge", 10**4000),
        events.SpanEventAdded(1, "e" * 9000, {"a": "b" * 9000}),
        events.LinkDescribed(1, "ab" * 8, {"a": "b" * 9000}),
        events.NameUpdated(1, "n" * 9000),
    ],
    ids=["text", "emoji", "list", "number", "event", "link", "name"],
)
def test_a_long_text_is_truncated_without_torn_cells(recording: Recorder, arenas: Arenas, event: Any) -> None:
    handle = recording.open_request(arrival())
    recording.record(handle, event)
    recording.record(handle, events.RequestReceived(7))
    _, truncated, after = (recorded.event for recorded in read_events(arenas.made[0]))
    assert type(truncated) is type(event)
    assert truncated.at == 1
    assert isinstance(after, events.RequestReceived)
    if isinstance(event[-1], str):
        assert event[-1].startswith(truncated[-1])
        assert len(truncated[-1]) > 100


def test_garbage_collection_during_a_write_may_record_events(recording: Recorder, arenas: Arenas) -> None:
    recorded_count = 0

    def on_collection(phase: str, info: dict[str, int]) -> None:
        nonlocal recorded_count
        if recorded_count < 1000:
            recorded_count += 1
            recording.record(handle, events.StageEnded(1, 0, "collection", recorded_count))

    handle = recording.open_request(arrival())
    threshold = gc.get_threshold()
    gc.callbacks.append(on_collection)
    gc.set_threshold(1)
    try:
        for number in range(1000):
            recording.record(handle, events.StageEnded(1, 0, "own", number))
            [[] for _ in range(4)]  # the compiled ring writer itself allocates nothing that is collected
    finally:
        gc.callbacks.remove(on_collection)
        gc.set_threshold(*threshold)
    stages = [
        recorded.event
        for recorded in read_events(arenas.made[0])
        if isinstance(recorded.event, events.StageEnded)
    ]
    assert [stage.items for stage in stages if stage.stage == "own"] == list(range(1000))
    assert [stage.items for stage in stages if stage.stage == "collection"] == list(
        range(1, recorded_count + 1)
    )
    assert recorded_count > 0


# ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_unavailable_step_ring_is_requested_once(
    recording: Recorder, arenas: Arenas, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recording.open_request(arrival())
    requested: list[str] = []

    def allocate(self: MemoryArena, name: str, size: int) -> Any:
        requested.append(name)
        raise RingUnavailable("none left")

    monkeypatch.setattr(MemoryArena, "allocate", allocate)
    with caplog.at_level(logging.WARNING, "otel_infer"):
        assert [None] * 5 == [recording.acquire_batch_writer("toy") for _ in range(5)]
    assert len(requested) == 1
    assert (count_unrecorded(arenas.made[0]), count_lost(arenas.made[0])) == (0, 0)
    assert len(caplog.records) == 1


def test_a_thousand_engine_threads_have_a_ring_each(recording: Recorder, arenas: Arenas) -> None:
    """Their rings lie in few files, because each file takes a descriptor, and leave room for other processes."""
    writers = [recording.acquire_batch_writer("toy") for _ in range(1_000)]
    assert all(writers)
    assert [writer.number for writer in writers if writer is not None] == list(range(1, 1_001))
    arena = arenas.made[0]
    assert sum(name.endswith(layout.SUFFIX_STEPS) for name, _ in arena.buffers) < 100
    assert arena.remaining_bytes() >= RESERVED_BYTES


def test_steps_without_room_for_a_ring_are_counted_per_request(
    recording: Recorder, arenas: Arenas, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert recording.acquire_batch_writer("toy") is not None
    monkeypatch.setattr(MemoryArena, "can_allocate", lambda arena, size: False)
    assert recording.acquire_batch_writer("toy") is None
    for number in range(3):
        recording.record_missing_steps(recording.open_request(arrival(number)))
    assert (count_unrecorded(arenas.made[0]), count_lost(arenas.made[0])) == (3, 0)


def test_room_for_a_step_ring_is_looked_for_again(
    recording: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert recording.acquire_batch_writer("toy") is not None
    now = _clock.now()
    with monkeypatch.context() as full:
        full.setattr(MemoryArena, "can_allocate", lambda arena, size: False)
        assert recording.acquire_batch_writer("toy") is None
    assert recording.acquire_batch_writer("toy") is None, "not at each step"
    monkeypatch.setattr(_clock, "now", lambda: now + 2 * RETRY_NS)
    assert recording.acquire_batch_writer("toy") is not None


def test_a_released_batch_writer_is_reused(recording: Recorder) -> None:
    first = recording.acquire_batch_writer("toy")
    assert first is not None
    assert recording.acquire_batch_writer("toy") is not first
    recording.release_batch_writer("toy", first)
    assert recording.acquire_batch_writer("toy") is first


# ── fork ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_forked_child_never_writes_to_parent_rings(tmp_path: Path) -> None:
    recording = Recorder()
    recording.start(lambda: FileArena(tmp_path), lambda: None, lambda reason: None)
    handle = recording.open_request(arrival())
    batch_writer = recording.acquire_batch_writer("toy")
    assert batch_writer is not None
    rings = sorted(tmp_path.iterdir())
    before = [path.read_bytes() for path in rings]
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            recording.record(handle, events.RequestReceived(1))
            recording.close_request(handle, ENDED)
            batch_writer.write_done(batch_writer.write_scheduled(["a"]), size=1)
            new = recording.open_request(arrival())
            status = 0 if new not in (0, handle) and not batch_writer.alive else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert before == [path.read_bytes() for path in rings]
    assert len(list(tmp_path.glob("*.requests"))) == 2
    recording.stop()


def test_a_fork_during_ring_creation_does_not_deadlock(arenas: Arenas) -> None:
    recording = Recorder()
    creating, forked = threading.Event(), threading.Event()

    def wait_for_fork() -> None:
        creating.set()
        forked.wait(10)

    arenas.during_creation = wait_for_fork
    recording.start(arenas.make, arenas.ensure_reader, lambda reason: None)
    thread = threading.Thread(target=recording.open_request, args=(arrival(),))
    thread.start()
    creating.wait(10)
    pid = os.fork()
    if pid == 0:
        arenas.during_creation = lambda: None
        os._exit(0 if recording.open_request(arrival()) else 1)
    forked.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    recording.stop()


def test_a_partly_written_event_is_not_awaited(recording: Recorder, arenas: Arenas) -> None:
    handle = recording.open_request(arrival())
    recording.record(handle, events.RequestSubmitted(1, 1, -1, 0, "toy"))
    recording.record(handle, events.RequestReceived(7))
    (memory,) = [memory for name, memory in arenas.made[0].buffers if name.endswith(layout.SUFFIX_REQUESTS)]
    reader = RequestReader(memory, 1)
    found = [type(recorded.event) for now in (1, 2) for recorded in reader.poll(now)]
    assert found == [events.EventsLost, events.RequestArrived, events.RequestReceived]
    assert reader.torn == 0


def test_an_unwritable_end_still_frees_the_slot(recording: Recorder) -> None:
    handle = recording.open_request(arrival())
    assert recording.requests is not None
    recording.close_request(handle, ENDED._replace(status_code=1 << 40))
    assert recording.requests.in_flight == 0


def test_a_failing_deferred_recorder_loses_no_end(recording: Recorder, arenas: Arenas) -> None:
    def fail() -> None:
        raise ValueError

    calls: list[str] = []
    recording.deferred_recorders.update(first=fail, second=lambda: calls.append("second"))
    recording.close_request(recording.open_request(arrival()), ENDED)
    assert recording.requests is not None
    assert (recording.requests.in_flight, calls) == (0, ["second"])
    assert ENDED in [recorded.event for recorded in read_events(arenas.made[0])]
    assert count_lost(arenas.made[0]) == 1


def test_a_failed_ring_creation_does_not_fail_an_engine(recording: Recorder, arenas: Arenas) -> None:
    def fail() -> None:
        raise OSError("no descriptors left")

    arenas.during_creation = fail
    assert recording.acquire_batch_writer("toy") is None
