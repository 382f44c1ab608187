"""All rings of one server as one stream: in order of time, complete, and nobody's twice."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_infer.assembly.assembler import GRACE_NS, Assembler
from otel_infer.ringbuffer import events, layout
from otel_infer.ringbuffer.batch_writer import BatchWriter, HandleTable
from otel_infer.ringbuffer.merged_reader import LIVENESS_NS, MergedReader
from otel_infer.ringbuffer.reader import RequestReader
from otel_infer.ringbuffer.step_writer import StepWriter
from otel_infer.ringbuffer.writer import FileArena, MemoryArena, RequestWriter

SECOND = 1_000_000_000
Work = Callable[[FileArena], Any]


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="test-folder-"))
    yield path
    shutil.rmtree(path)


def arrival(at: int, trace: int = 1) -> events.RequestArrived:
    return events.RequestArrived(
        at,
        at,
        trace.to_bytes(16, "big"),
        trace.to_bytes(8, "big"),
        bytes(8),
        bytes(8),
        1,
        "chat",
        "toy",
        "m",
        "n",
    )


def ended(at: int) -> events.RequestEnded:
    return events.RequestEnded(at, events.OK, "", 200, 0, 0, 0)


class Process:
    """A process that writes rings and lives until it is killed: its locks must not be our own."""

    def __init__(self, folder: Path, work: Work) -> None:
        ready, said = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _kept = work(FileArena(folder))
                os.write(said, b"1")
                signal.pause()
            finally:
                os._exit(1)
        os.close(said)
        assert os.read(ready, 1) == b"1", "its work failed"
        os.close(ready)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            self.kill()


def kinds(said: list[events.RecordedEvent]) -> list[str]:
    return [type(one.event).__name__ for one in said]


def of(said: list[events.RecordedEvent], kind: type) -> list[Any]:
    return [one.event for one in said if type(one.event) is kind]


def writing(name: str, *at: int) -> Work:
    """Requests that arrive at these instants, and are in flight."""

    def work(arena: FileArena) -> RequestWriter:
        writer = RequestWriter(arena, name, "server")
        for one in at:
            writer.open_request(arrival(one, one))
        return writer

    return work


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_facts_of_two_processes_come_in_order_of_time(folder: Path) -> None:
    rings = MergedReader()
    with Process(folder, writing("1-a", 10, 30, 50)), Process(folder, writing("2-b", 20, 40, 60)):
        rings.discover_rings(folder, 100)
        got = [*rings.poll(100), *rings.poll(200)]
        assert [one.at for one in of(got, events.RequestArrived)] == [10, 20, 30, 40, 50, 60]
        assert rings.count_writers() == 2
        rings.close(remove=False)


def test_a_poll_hands_out_what_happened_before_the_previous_poll(folder: Path) -> None:
    rings = MergedReader()
    arena = MemoryArena()
    writer = RequestWriter(arena, "1-a", "server")
    rings.add_ring(*arena.buffers[0], 1)
    assert kinds(rings.poll(100)) == ["ProcessSeen"]
    writer.open_request(arrival(150))
    writer.open_request(arrival(250))
    assert rings.poll(200) == []
    assert [one.at for one in of(rings.poll(300), events.RequestArrived)] == [150]
    assert rings.horizon == 200
    assert [one.at for one in of(rings.poll(400), events.RequestArrived)] == [250]
    assert rings.poll(500) == []


def test_a_final_poll_hands_out_all_there_is(folder: Path) -> None:
    rings, arena = MergedReader(), MemoryArena()
    writer = RequestWriter(arena, "1-a", "server")
    rings.add_ring(*arena.buffers[0], 1)
    writer.open_request(arrival(150))
    assert kinds(rings.poll(100, final=True)) == ["ProcessSeen", "RequestArrived"]


def test_the_steps_of_a_process_name_its_requests(folder: Path) -> None:
    def work(arena: FileArena) -> Any:
        writer = RequestWriter(arena, "1-a", "server")
        log = BatchWriter(StepWriter(arena, "1-a-1", "toy"), HandleTable())
        handle = writer.open_request(arrival(10))
        log.handles.bind_handle("sequence", handle)
        log.write_done(log.write_scheduled(["sequence"]), size=1)
        return writer, log

    rings = MergedReader()
    with Process(folder, work):
        rings.discover_rings(folder, 1)
        rings.discover_rings(folder, 2)  # a second time is nothing
        got = rings.poll(1, final=True)
        (engine,) = of(got, events.EngineSeen)
        (arrived,) = [one for one in got if isinstance(one.event, events.RequestArrived)]
        (scheduled,) = of(got, events.StepScheduled)
        assert engine.process == arrived.ring
        assert scheduled.joined == (arrived.handle,)
        rings.close(remove=False)


def test_steps_that_are_seen_before_their_process_wait_for_it(folder: Path) -> None:
    with Process(folder, lambda arena: StepWriter(arena, "1-a-1", "toy")):
        rings = MergedReader()
        rings.discover_rings(folder, 1)
        assert rings.count_writers() == 0
        with Process(folder, writing("1-a", 10)):
            rings.discover_rings(folder, 2)
            assert len(of(rings.poll(3, final=True), events.EngineSeen)) == 1
            assert rings.rejected == []
            rings.close(remove=False)


def test_a_file_that_is_no_ring_is_named_and_one_that_is_not_ready_is_waited_for(folder: Path) -> None:
    (folder / "1-a.requests").write_bytes(b"no ring at all".ljust(8192, b"x"))
    (folder / "2-b.requests").write_bytes(bytes(8192))
    (folder / "3-c.requests").touch()
    (folder / "notes.txt").touch()
    rings = MergedReader()
    rings.discover_rings(folder, 1)
    rings.discover_rings(folder, 2)
    assert rings.count_writers() == 0
    assert not rings.has_seen_rings
    (folder / "2-b.requests").unlink()
    with Process(folder, writing("2-b", 10)):
        rings.discover_rings(folder, 3)
        assert rings.count_writers() == 1
        rings.close(remove=False)


@pytest.mark.parametrize("call", ["open", "mmap"])
def test_a_ring_for_which_there_is_no_descriptor_or_memory_just_now_is_read_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    rings = MergedReader()

    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE if call == "open" else errno.ENOMEM, "too many")

    with Process(folder, writing("1-a", 10)), monkeypatch.context() as full:
        full.setattr(os if call == "open" else mmap, call, refused)
        rings.discover_rings(folder, 1)
        full.undo()
        assert rings.count_writers() == 0 and rings.rejected == []
        rings.discover_rings(folder, 2)
        assert rings.count_writers() == 1
        rings.close(remove=False)


def test_a_ring_of_another_boot_is_refused_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rings = MergedReader()
    with Process(folder, writing("1-a", 10)):
        monkeypatch.setattr(layout, "read_boot_id", lambda: "another")
        rings.discover_rings(folder, 1)
        assert rings.rejected == ["1-a.requests: of another boot"]
        assert rings.count_writers() == 0


def test_a_folder_that_is_not_there_is_no_trouble(folder: Path) -> None:
    rings = MergedReader()
    rings.discover_rings(folder / "nowhere", 1)
    assert rings.poll(2) == []


# ── death ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_was_in_flight_in_a_dead_process_is_told_and_its_rings_are_removed(folder: Path) -> None:
    def work(arena: FileArena) -> Any:
        writer = RequestWriter(arena, "1-a", "server")
        StepWriter(arena, "1-a-1", "toy")
        done = writer.open_request(arrival(10, 10))
        writer.open_request(arrival(20, 20))
        writer.close_request(done, ended(30))
        return writer

    rings, assembler = MergedReader(), Assembler()
    process = Process(folder, work)
    with Process(folder, writing("2-b", 15)):
        rings.discover_rings(folder, 100)
        assembler.feed_events(rings.poll(100))
        process.kill()
        for now in (SECOND, SECOND + 1, SECOND + 2):
            assembler.feed_events(rings.poll(now))
        records = assembler.drain_records(SECOND + GRACE_NS + LIVENESS_NS)
        told = {int.from_bytes(record.trace_id, "big"): record.error_type for record in records}
        assert told == {10: "", 20: "process_died"}
        assert sorted(path.name for path in folder.iterdir()) == ["2-b.requests"]
        assert rings.count_writers() == 1
        rings.close(remove=False)


def test_a_ring_that_was_removed_is_forgotten_by_name(folder: Path) -> None:
    """Workers come and go for months."""
    rings, arrived = MergedReader(), []
    for turn in (1, 2):
        with Process(folder, writing("1-a", 10 * turn)):
            rings.discover_rings(folder, turn * SECOND)
        arrived += of([*rings.poll(turn * SECOND), *rings.poll(turn * SECOND + 1)], events.RequestArrived)
        assert list(folder.iterdir()) == []
    assert [one.at for one in arrived] == [10, 20]


def test_a_process_that_died_before_it_was_seen_is_told_too(folder: Path) -> None:
    with Process(folder, writing("1-a", 10, 20)):
        pass
    rings, assembler = MergedReader(), Assembler()
    rings.discover_rings(folder, SECOND)
    for now in (SECOND, 2 * SECOND, 3 * SECOND):
        assembler.feed_events(rings.poll(now))
    records = assembler.drain_records(4 * SECOND)
    assert {record.error_type for record in records} == {"process_died"}
    assert len(records) == 2
    assert list(folder.iterdir()) == []


def test_who_was_found_dead_died_when_it_was_last_heard_of(folder: Path) -> None:
    """The next start may come hours later."""
    with Process(folder, writing("1-a", SECOND, 2 * SECOND)):
        pass
    rings, assembler = MergedReader(), Assembler()
    hour = 3600 * SECOND
    rings.discover_rings(folder, hour)
    for now in (hour, hour + SECOND, hour + 2 * SECOND):
        assembler.feed_events(rings.poll(now))
    records = assembler.drain_records(hour + 3 * SECOND)
    assert {record.ended_at for record in records} == {2 * SECOND + LIVENESS_NS}


def test_who_wrote_much_before_it_died_died_when_it_was_last_heard_of_all_the_same(folder: Path) -> None:
    """Of a ring that is full a reader that begins says that something was overwritten: as of now."""

    def work(arena: FileArena) -> Any:
        writer = RequestWriter(arena, "1-a", "server")
        writer.open_request(arrival(SECOND, 7))
        for at in range(20_000):
            writer.write_event(99, events.RequestReceived(SECOND + at))
        writer.words[layout.W_PROCESSED_UNTIL] = 5
        return writer

    with Process(folder, work):
        pass
    rings, assembler, hour = MergedReader(), Assembler(), 3600 * SECOND
    rings.discover_rings(folder, hour)
    for now in (hour, hour + SECOND, hour + 2 * SECOND):
        assembler.feed_events(rings.poll(now))
    (record,) = assembler.drain_records(hour + 3 * SECOND)
    assert record.ended_at == SECOND + 19_999 + LIVENESS_NS


def test_steps_that_a_process_made_just_before_it_died_are_read_and_removed(folder: Path) -> None:
    def work(arena: FileArena) -> Any:
        requests = RequestWriter(arena, "1-a", "server")
        while not folder.joinpath("seen").exists():
            time.sleep(0.001)
        log = BatchWriter(StepWriter(arena, "1-a-1", "toy"), HandleTable())
        log.write_done(log.write_scheduled(["m"]))
        folder.joinpath("done").touch()
        return requests, log

    rings = MergedReader()
    pid = os.fork()
    if pid == 0:
        try:
            _kept = work(FileArena(folder))
            signal.pause()
        finally:
            os._exit(1)
    while not folder.joinpath("1-a.requests").exists():
        time.sleep(0.001)
    while not rings.count_writers():
        rings.discover_rings(folder, 1)
    rings.poll(1)
    folder.joinpath("seen").touch()
    while not folder.joinpath("done").exists():
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    now = time.monotonic_ns()
    said = rings.poll(now, final=True)
    assert len(of(said, events.StepScheduled)) == 1
    assert not list(folder.glob("1-a*"))


def test_what_a_process_said_while_it_was_looked_after_comes_before_its_death(folder: Path) -> None:
    late = SECOND + 5

    def work(arena: FileArena) -> Any:
        writer = RequestWriter(arena, "1-a", "server")
        writer.close_request(writer.open_request(arrival(10, 10)), ended(late))
        return writer

    rings, assembler = MergedReader(), Assembler()
    process = Process(folder, work)
    with process:
        rings.discover_rings(folder, 100)
        assembler.feed_events(rings.poll(100))
        process.kill()
        said = rings.poll(SECOND, final=True)  # a wake that began before the request's end
    assembler.feed_events(said)
    assert [record.error_type for record in assembler.drain_records(late + GRACE_NS)] == [""]


def test_who_ended_before_the_living_were_looked_up_is_not_ended_by_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arena = MemoryArena()
    writer = RequestWriter(arena, "1-a", "server", layout.RingSizes(64, 16, 16, 64))
    rings, assembler = MergedReader(), Assembler()
    rings.add_ring(*arena.buffers[0], 1)
    handle = writer.open_request(arrival(10, 10))
    for now in (20, 30):
        assembler.feed_events(rings.poll(now))
    for at in range(100):  # the ring is lapped
        writer.write_event(0, events.PauseSeen(40 + at, 40, "gc"))
    failed = events.RequestEnded(1_105, events.ERROR, "ValueError", 500, 0, 0, 0)
    monkeypatch.setattr("otel_infer._clock.now", lambda: 1_110)
    live = RequestReader.read_live_requests

    def looking(reader: RequestReader) -> Any:
        if reader.lost and writer.in_flight:
            writer.close_request(handle, failed)  # after the wake began, before the table is read
        return live(reader)

    monkeypatch.setattr(RequestReader, "read_live_requests", looking)
    for now in (1_000, 1_100, 1_200, 1_300):
        assembler.feed_events(rings.poll(now))
    (record,) = assembler.drain_records(1_300 + GRACE_NS)
    assert (record.error_type, record.status_code, record.telemetry_lost) == ("ValueError", 500, True)


def test_who_arrives_while_the_living_are_looked_up_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = MemoryArena()
    writer = RequestWriter(arena, "1-a", "server", layout.RingSizes(64, 16, 16, 64))
    rings, assembler = MergedReader(), Assembler()
    rings.add_ring(*arena.buffers[0], 1)
    for now in (20, 30):
        assembler.feed_events(rings.poll(now))
    for at in range(100):  # the ring is lapped
        writer.write_event(0, events.PauseSeen(40 + at, 40, "gc"))
    monkeypatch.setattr("otel_infer._clock.now", lambda: 1_110)
    live, opened = RequestReader.read_live_requests, list[int]()

    def looking(reader: RequestReader) -> Any:
        found = list(live(reader))
        if not opened:
            opened.append(writer.open_request(arrival(1_112, 12)))  # after the table was copied
        return iter(found)

    monkeypatch.setattr(RequestReader, "read_live_requests", looking)
    for now in (1_000, 1_100, 1_200, 1_300):
        assembler.feed_events(rings.poll(now))
    assert assembler.count_active() == {"queued": 0, "running": 1}


def test_whose_end_was_overwritten_by_a_process_that_then_died_did_not_die_of_that(folder: Path) -> None:
    def work(arena: FileArena) -> Any:
        writer = RequestWriter(arena, "1-a", "server", layout.RingSizes(64, 16, 16, 64))
        gone, _ = writer.open_request(arrival(10, 10)), writer.open_request(arrival(20, 20))
        writer.close_request(gone, ended(30))
        for at in range(200):
            writer.write_event(0, events.PauseSeen(40 + at, 40, "gc"))
        return writer

    rings, assembler = MergedReader(), Assembler()
    process = Process(folder, work)
    with process:
        rings.discover_rings(folder, 100)
        process.kill()
        for now in (SECOND, SECOND + 1, SECOND + 2):
            assembler.feed_events(rings.poll(now))
    records = assembler.drain_records(SECOND + GRACE_NS + LIVENESS_NS)
    told = {int.from_bytes(record.trace_id, "big"): record.error_type for record in records}
    assert told == {20: "process_died"}


def test_what_there_was_no_room_for_is_counted_when_its_process_is_gone_too(folder: Path) -> None:
    def work(arena: FileArena) -> Any:
        writer, steps = RequestWriter(arena, "1-a", "server"), StepWriter(arena, "1-a-1", "toy")
        writer.words[layout.W_UNRECORDED], steps.words[layout.W_LOST] = 2, 1
        return writer

    rings = MergedReader()
    with Process(folder, work):
        rings.discover_rings(folder, 1)
        assert rings.count_unrecorded() == 3
    rings.poll(SECOND)
    assert (rings.count_writers(), rings.count_unrecorded()) == (0, 3)


def test_errors_of_a_process_that_died_stay_counted(folder: Path) -> None:
    def work(arena: FileArena) -> Any:
        writer = RequestWriter(arena, "1-a", "server")
        writer.words[layout.W_ERRORS] = 3
        return writer

    rings = MergedReader()
    with Process(folder, work):
        rings.discover_rings(folder, 1)
        rings.poll(1)
        assert rings.count_errors() == 3
    rings.poll(SECOND)
    assert rings.count_writers() == 0
    assert rings.count_errors() == 3


# ── a reader that was killed ─────────────────────────────────────────────────────────────────────────────────────


def read_on(rings: MergedReader, assembler: Assembler, *at: int) -> list[int]:
    """The trace ids that are concluded by wakes at these instants; notes it in the rings as a pipeline does."""
    found: list[int] = []
    for now in at:
        assembler.feed_events(rings.poll(now))
        found += [int.from_bytes(r.trace_id, "big") for r in assembler.drain_records(rings.horizon)]
        rings.mark_processed(rings.horizon)
    return found


@pytest.mark.parametrize("died_after", range(1, 9))
def test_a_reader_that_takes_over_tells_each_request_that_was_not_told_and_no_other(
    folder: Path, died_after: int
) -> None:
    """Whenever the one before it was killed."""
    step = 200_000_000
    wakes = [number * step for number in range(1, 20)]

    def work(arena: FileArena) -> Any:
        writer = RequestWriter(arena, "1-a", "server")
        for number in range(1, 11):
            at = number * step // 2
            handle = writer.open_request(arrival(at, number))
            writer.close_request(handle, ended(at + step // 3))
        return writer

    with Process(folder, work):
        first, second = MergedReader(), MergedReader()
        first.discover_rings(folder, 1)
        told = read_on(first, Assembler(), *wakes[:died_after])
        second.discover_rings(folder, wakes[died_after])
        told_after = read_on(second, Assembler(), *wakes[died_after:])
        assert sorted(told + told_after) == list(range(1, 11))
        first.close(remove=False)
        second.close(remove=False)


def test_a_reader_that_takes_over_counts_no_error_and_no_loss_that_was_counted_before() -> None:
    rings, arena = MergedReader(), MemoryArena()
    writer, steps = RequestWriter(arena, "1-a", "server"), StepWriter(arena, "1-a-1", "toy")
    writer.words[layout.W_PROCESSED_UNTIL] = 5
    writer.words[layout.W_ERRORS], writer.words[layout.W_UNRECORDED], steps.words[layout.W_LOST] = 3, 2, 1
    for name, memory in arena.buffers:
        rings.add_ring(name, memory, SECOND)
    assert (rings.count_errors(), rings.count_unrecorded()) == (0, 0)
    writer.words[layout.W_ERRORS], steps.words[layout.W_LOST] = 4, 3
    assert (rings.count_errors(), rings.count_unrecorded()) == (1, 2)
    rings.close(remove=False)
    assert (rings.count_errors(), rings.count_unrecorded()) == (1, 2), "nor when the process is gone"


def test_what_was_concluded_is_never_taken_back(folder: Path) -> None:
    rings, arena = MergedReader(), MemoryArena()
    writer = RequestWriter(arena, "1-a", "server")
    rings.add_ring(*arena.buffers[0], 1)
    rings.mark_processed(500)
    rings.mark_processed(300)
    assert writer.words[layout.W_PROCESSED_UNTIL] == 500


def test_a_request_whose_arrival_was_overwritten_is_known_to_the_next_reader(folder: Path) -> None:
    def work(arena: FileArena) -> Any:
        writer = RequestWriter(arena, "1-a", "server")
        writer.open_request(arrival(10, 7))
        for at in range(20_000):
            writer.write_event(99, events.RequestReceived(at))
        writer.words[layout.W_PROCESSED_UNTIL] = 5
        return writer

    rings, assembler = MergedReader(), Assembler()
    with Process(folder, work):
        rings.discover_rings(folder, SECOND)
        for now in (SECOND, 2 * SECOND):
            assembler.feed_events(rings.poll(now))
        (request,) = assembler.open_requests.values()
        assert request.arrived.trace_id == (7).to_bytes(16, "big")
        assert request.telemetry_lost
        assert assembler.events_lost == 0  # most of it was read before
        rings.close(remove=False)


# ── flush ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_flush_is_asked_and_answered_by_number() -> None:
    rings, arena = MergedReader(), MemoryArena()
    writer = RequestWriter(arena, "1-a", "server")
    rings.add_ring(*arena.buffers[0], 1)
    assert rings.list_pending_flushes() == []
    writer.words[layout.W_FLUSH_REQUESTED] = 3
    asked = rings.list_pending_flushes()
    writer.words[layout.W_FLUSH_REQUESTED] = 4
    rings.complete_flushes(asked)
    assert writer.words[layout.W_FLUSH_DONE] == 3
    assert rings.list_pending_flushes() == [(asked[0][0], 4)]


# ── what is known otherwise ──────────────────────────────────────────────────────────────────────────────────────


def test_what_was_learned_otherwise_is_handed_out_in_its_turn() -> None:
    rings, arena = MergedReader(), MemoryArena()
    writer = RequestWriter(arena, "1-a", "server")
    rings.add_ring(*arena.buffers[0], 1)
    rings.poll(100)
    writer.open_request(arrival(150))
    rings.add_event(events.RecordedEvent(1, 0, events.PauseSeen(160, 120, "throttled")))
    writer.open_request(arrival(170, 2))
    assert rings.poll(200) == []
    assert kinds(rings.poll(300)) == ["RequestArrived", "PauseSeen", "RequestArrived"]


def test_writers_are_those_who_hold_the_locks_of_files(folder: Path) -> None:
    rings, arena = MergedReader(), MemoryArena()
    RequestWriter(arena, "1-a", "server")
    rings.add_ring(*arena.buffers[0], 1)
    with Process(folder, writing("2-b", 10)) as process:
        rings.discover_rings(folder, 100)
        assert [pid for _, pid in rings.list_writers()] == [process.pid]
        process.kill()
        assert rings.list_writers() == []
        rings.close(remove=False)
