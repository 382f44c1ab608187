"""Merges the rings of a server into one complete stream, ordered by time, without duplicates."""

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

from otel_infer.assembly.assembler import Assembler
from otel_infer.assembly.requests.ended_requests import GRACE_NS
from otel_infer.ringbuffer import events, layout
from otel_infer.ringbuffer.arena import FileArena, MemoryArena
from otel_infer.ringbuffer.batch_writer import BatchWriter, HandleTable
from otel_infer.ringbuffer.merged_reader import LIVENESS_NS, MergedReader
from otel_infer.ringbuffer.reader import RequestReader
from otel_infer.ringbuffer.step_rings import StepRingAllocator
from otel_infer.ringbuffer.step_writer import StepWriter
from otel_infer.ringbuffer.writer import RequestWriter

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
    """A process that writes rings until it is killed; the locks must belong to another process."""

    def __init__(self, folder: Path, work: Work) -> None:
        ready, written = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _writers = work(FileArena(folder))
                os.write(written, b"1")
                signal.pause()
            finally:
                os._exit(1)
        os.close(written)
        assert os.read(ready, 1) == b"1", "the process failed"
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


def event_names(polled: list[events.RecordedEvent]) -> list[str]:
    return [type(recorded.event).__name__ for recorded in polled]


def events_of_type(polled: list[events.RecordedEvent], event_type: type) -> list[Any]:
    return [recorded.event for recorded in polled if type(recorded.event) is event_type]


def writing(name: str, *at: int) -> Work:
    """Opens requests at these instants and leaves them in flight."""

    def work(arena: FileArena) -> RequestWriter:
        writer = RequestWriter(arena, name, "server")
        for instant in at:
            writer.open_request(arrival(instant, instant))
        return writer

    return work


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_events_of_two_processes_are_merged_by_time(folder: Path) -> None:
    rings = MergedReader()
    with Process(folder, writing("1-a", 10, 30, 50)), Process(folder, writing("2-b", 20, 40, 60)):
        rings.discover_rings(folder, 100)
        got = [*rings.poll(100), *rings.poll(200)]
        assert [arrived.at for arrived in events_of_type(got, events.RequestArrived)] == [
            10,
            20,
            30,
            40,
            50,
            60,
        ]
        assert len(rings.processes) == 2
        rings.close(remove=False)


def test_a_poll_returns_events_before_the_previous_poll(folder: Path) -> None:
    rings = MergedReader()
    arena = MemoryArena()
    writer = RequestWriter(arena, "1-a", "server")
    rings.add_ring(*arena.buffers[0], 1)
    assert event_names(rings.poll(100)) == ["ProcessSeen"]
    writer.open_request(arrival(150))
    writer.open_request(arrival(250))
    assert rings.poll(200) == []
    assert [arrived.at for arrived in events_of_type(rings.poll(300), events.RequestArrived)] == [150]
    assert rings.horizon == 200
    assert [arrived.at for arrived in events_of_type(rings.poll(400), events.RequestArrived)] == [250]
    assert rings.poll(500) == []


def test_a_final_poll_returns_all_events(folder: Path) -> None:
    rings, arena = MergedReader(), MemoryArena()
    writer = RequestWriter(arena, "1-a", "server")
    rings.add_ring(*arena.buffers[0], 1)
    writer.open_request(arrival(150))
    assert event_names(rings.poll(100, final=True)) == ["ProcessSeen", "RequestArrived"]


def test_steps_of_a_process_refer_to_its_requests(folder: Path) -> None:
    def work(arena: FileArena) -> Any:
        writer = RequestWriter(arena, "1-a", "server")
        batch_writer = BatchWriter(StepWriter(arena, "1-a-1", "toy"), HandleTable())
        handle = writer.open_request(arrival(10))
        batch_writer.handles.bind_handle("sequence", handle)
        batch_writer.write_done(batch_writer.write_scheduled(["sequence"]), size=1)
        return writer, batch_writer

    rings = MergedReader()
    with Process(folder, work):
        rings.discover_rings(folder, 1)
        rings.discover_rings(folder, 2)  # a second discovery adds nothing
        got = rings.poll(1, final=True)
        (engine,) = events_of_type(got, events.EngineSeen)
        (arrived,) = [recorded for recorded in got if isinstance(recorded.event, events.RequestArrived)]
        (scheduled,) = events_of_type(got, events.StepScheduled)
        assert engine.process == arrived.ring
        assert scheduled.joined == (arrived.handle,)
        rings.close(remove=False)


def test_a_step_ring_waits_for_its_request_ring(folder: Path) -> None:
    with Process(folder, lambda arena: StepWriter(arena, "1-a-1", "toy")):
        rings = MergedReader()
        rings.discover_rings(folder, 1)
        assert len(rings.processes) == 0
        with Process(folder, writing("1-a", 10)):
            rings.discover_rings(folder, 2)
            assert len(events_of_type(rings.poll(3, final=True), events.EngineSeen)) == 1
            assert rings.rejected == []
            rings.close(remove=False)


def test_invalid_files_are_skipped_and_unfinished_rings_awaited(folder: Path) -> None:
    (folder / "1-a.requests").write_bytes(b"no ring at all".ljust(8192, b"x"))
    (folder / "2-b.requests").write_bytes(bytes(8192))
    (folder / "3-c.requests").touch()
    (folder / "notes.txt").touch()
    rings = MergedReader()
    rings.discover_rings(folder, 1)
    rings.discover_rings(folder, 2)
    assert len(rings.processes) == 0
    assert not rings.has_seen_rings
    (folder / "2-b.requests").unlink()
    with Process(folder, writing("2-b", 10)):
        rings.discover_rings(folder, 3)
        assert len(rings.processes) == 1
        rings.close(remove=False)


@pytest.mark.parametrize("call", ["open", "mmap"])
def test_a_ring_that_cannot_be_opened_is_retried(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    rings = MergedReader()

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE if call == "open" else errno.ENOMEM, "too many")

    with Process(folder, writing("1-a", 10)), monkeypatch.context() as full:
        full.setattr(os if call == "open" else mmap, call, fail)
        rings.discover_rings(folder, 1)
        full.undo()
        assert len(rings.processes) == 0 and rings.rejected == []
        rings.discover_rings(folder, 2)
        assert len(rings.processes) == 1
        rings.close(remove=False)


def test_a_ring_of_another_boot_is_rejected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rings = MergedReader()
    with Process(folder, writing("1-a", 10)):
        monkeypatch.setattr(layout, "read_boot_id", lambda: "another")
        rings.discover_rings(folder, 1)
        (rejection,) = rings.rejected
        assert rejection.startswith("1-a.requests: ")
        assert "another boot" in rejection
        assert len(rings.processes) == 0


def test_a_missing_folder_has_no_events(folder: Path) -> None:
    rings = MergedReader()
    rings.discover_rings(folder / "nowhere", 1)
    assert rings.poll(2) == []


# ── process death ────────────────────────────────────────────────────────────────────────────────────────────────


def test_process_death_ends_its_requests_and_removes_rings(folder: Path) -> None:
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
        errors = {int.from_bytes(record.trace_id, "big"): record.error_type for record in records}
        assert errors == {10: "", 20: "process_died"}
        assert sorted(path.name for path in folder.iterdir()) == ["2-b.requests", "2-b.stacks"]
        assert len(rings.processes) == 1
        rings.close(remove=False)


def test_the_name_of_a_removed_ring_is_reusable(folder: Path) -> None:
    """Worker processes start and end for months, and pids repeat."""
    rings, arrived = MergedReader(), []
    for turn in (1, 2):
        with Process(folder, writing("1-a", 10 * turn)):
            rings.discover_rings(folder, turn * SECOND)
        arrived += events_of_type(
            [*rings.poll(turn * SECOND), *rings.poll(turn * SECOND + 1)], events.RequestArrived
        )
        assert list(folder.iterdir()) == []
    assert [event.at for event in arrived] == [10, 20]


def test_a_process_dead_before_discovery_is_recorded(folder: Path) -> None:
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


def test_a_late_found_death_dates_from_last_event(folder: Path) -> None:
    """The next sidecar may start hours later."""
    with Process(folder, writing("1-a", SECOND, 2 * SECOND)):
        pass
    rings, assembler = MergedReader(), Assembler()
    hour = 3600 * SECOND
    rings.discover_rings(folder, hour)
    for now in (hour, hour + SECOND, hour + 2 * SECOND):
        assembler.feed_events(rings.poll(now))
    records = assembler.drain_records(hour + 3 * SECOND)
    assert {record.ended_at for record in records} == {2 * SECOND + LIVENESS_NS}


def test_death_in_full_ring_dates_from_last_event(folder: Path) -> None:
    """The loss that a new reader reports for a full ring is dated at the time of reading."""

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


def test_steps_before_a_process_death_are_read(folder: Path) -> None:
    def work(arena: FileArena) -> Any:
        requests = RequestWriter(arena, "1-a", "server")
        while not folder.joinpath("seen").exists():
            time.sleep(0.001)
        batch_writer = BatchWriter(StepWriter(arena, "1-a-1", "toy"), HandleTable())
        batch_writer.write_done(batch_writer.write_scheduled(["m"]))
        folder.joinpath("done").touch()
        return requests, batch_writer

    rings = MergedReader()
    pid = os.fork()
    if pid == 0:
        try:
            _writers = work(FileArena(folder))
            signal.pause()
        finally:
            os._exit(1)
    while not folder.joinpath("1-a.requests").exists():
        time.sleep(0.001)
    while not rings.processes:
        rings.discover_rings(folder, 1)
    rings.poll(1)
    folder.joinpath("seen").touch()
    while not folder.joinpath("done").exists():
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    now = time.monotonic_ns()
    polled = rings.poll(now, final=True)
    assert len(events_of_type(polled, events.StepScheduled)) == 1
    assert not list(folder.glob("1-a*"))


def test_events_during_a_poll_precede_the_death(folder: Path) -> None:
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
        polled = rings.poll(SECOND, final=True)  # a cycle that began before the request ended
    assembler.feed_events(polled)
    assert [record.error_type for record in assembler.drain_records(late + GRACE_NS)] == [""]


def test_a_request_ended_before_live_lookup_keeps_outcome(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its absence from the live table must not end it a second time, with another outcome."""
    arena = MemoryArena()
    writer = RequestWriter(arena, "1-a", "server", layout.RingSizes(64, 16, 16, 64))
    rings, assembler = MergedReader(), Assembler()
    rings.add_ring(*arena.buffers[0], 1)
    handle = writer.open_request(arrival(10, 10))
    for now in (20, 30):
        assembler.feed_events(rings.poll(now))
    for at in range(100):  # overwrites the whole ring
        writer.write_event(0, events.PauseSeen(40 + at, 40, "gc"))
    failed = events.RequestEnded(1_105, events.ERROR, "ValueError", 500, 0, 0, 0)
    monkeypatch.setattr("otel_infer._clock.now", lambda: 1_110)
    original = RequestReader.read_live_requests

    def read_live(reader: RequestReader) -> Any:
        if reader.lost and writer.in_flight:
            writer.close_request(handle, failed)  # after the cycle began, before the table is read
        return original(reader)

    monkeypatch.setattr(RequestReader, "read_live_requests", read_live)
    for now in (1_000, 1_100, 1_200, 1_300):
        assembler.feed_events(rings.poll(now))
    (record,) = assembler.drain_records(1_300 + GRACE_NS)
    assert (record.error_type, record.status_code, record.telemetry_lost) == ("ValueError", 500, True)


def test_an_arrival_during_live_table_read_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = MemoryArena()
    writer = RequestWriter(arena, "1-a", "server", layout.RingSizes(64, 16, 16, 64))
    rings, assembler = MergedReader(), Assembler()
    rings.add_ring(*arena.buffers[0], 1)
    for now in (20, 30):
        assembler.feed_events(rings.poll(now))
    for at in range(100):  # overwrites the whole ring
        writer.write_event(0, events.PauseSeen(40 + at, 40, "gc"))
    monkeypatch.setattr("otel_infer._clock.now", lambda: 1_110)
    original, opened = RequestReader.read_live_requests, list[int]()

    def read_live(reader: RequestReader) -> Any:
        found = list(original(reader))
        if not opened:
            opened.append(writer.open_request(arrival(1_112, 12)))  # after the table was copied
        return iter(found)

    monkeypatch.setattr(RequestReader, "read_live_requests", read_live)
    for now in (1_000, 1_100, 1_200, 1_300):
        assembler.feed_events(rings.poll(now))
    assert assembler.count_active() == {"queued": 0, "running": 1}


def test_an_overwritten_end_is_not_a_process_death(folder: Path) -> None:
    def work(arena: FileArena) -> Any:
        writer = RequestWriter(arena, "1-a", "server", layout.RingSizes(64, 16, 16, 64))
        first, _ = writer.open_request(arrival(10, 10)), writer.open_request(arrival(20, 20))
        writer.close_request(first, ended(30))
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
    errors = {int.from_bytes(record.trace_id, "big"): record.error_type for record in records}
    assert errors == {20: "process_died"}


def test_unrecorded_requests_stay_counted_after_process_death(folder: Path) -> None:
    def work(arena: FileArena) -> Any:
        writer, steps = RequestWriter(arena, "1-a", "server"), StepWriter(arena, "1-a-1", "toy")
        writer.words[layout.W_UNRECORDED], steps.words[layout.W_LOST] = 2, 1
        return writer

    rings = MergedReader()
    with Process(folder, work):
        rings.discover_rings(folder, 1)
        assert rings.read_counts()["unrecorded"] == 3
    rings.poll(SECOND)
    assert (len(rings.processes), rings.read_counts()["unrecorded"]) == (0, 3)


def test_errors_stay_counted_after_process_death(folder: Path) -> None:
    def work(arena: FileArena) -> Any:
        writer = RequestWriter(arena, "1-a", "server")
        writer.words[layout.W_ERRORS] = 3
        return writer

    rings = MergedReader()
    with Process(folder, work):
        rings.discover_rings(folder, 1)
        rings.poll(1)
        assert rings.read_counts()["errors"] == 3
    rings.poll(SECOND)
    assert len(rings.processes) == 0
    assert rings.read_counts()["errors"] == 3


# ── restart of the reader ────────────────────────────────────────────────────────────────────────────────────────


def run_cycles(rings: MergedReader, assembler: Assembler, *at: int) -> list[int]:
    """Returns the trace ids of records completed by cycles at these instants; marks them processed, like a pipeline."""
    found: list[int] = []
    for now in at:
        assembler.feed_events(rings.poll(now))
        found += [int.from_bytes(r.trace_id, "big") for r in assembler.drain_records(rings.horizon)]
        rings.mark_processed(rings.horizon)
    return found


@pytest.mark.parametrize("died_after", range(1, 9))
def test_a_new_reader_exports_each_remaining_request_once(folder: Path, died_after: int) -> None:
    """The previous reader is killed after any number of cycles."""
    step = 200_000_000
    cycles = [number * step for number in range(1, 20)]

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
        before = run_cycles(first, Assembler(), *cycles[:died_after])
        second.discover_rings(folder, cycles[died_after])
        after = run_cycles(second, Assembler(), *cycles[died_after:])
        assert sorted(before + after) == list(range(1, 11))
        first.close(remove=False)
        second.close(remove=False)


def test_a_new_reader_counts_only_new_errors() -> None:
    """And only new losses."""
    rings, arena = MergedReader(), MemoryArena()
    writer, steps = RequestWriter(arena, "1-a", "server"), StepWriter(arena, "1-a-1", "toy")
    writer.words[layout.W_PROCESSED_UNTIL] = 5
    writer.words[layout.W_ERRORS], writer.words[layout.W_UNRECORDED], steps.words[layout.W_LOST] = 3, 2, 1
    for name, memory in arena.buffers:
        rings.add_ring(name, memory, SECOND)
    assert (rings.read_counts()["errors"], rings.read_counts()["unrecorded"]) == (0, 0)
    writer.words[layout.W_ERRORS], steps.words[layout.W_LOST] = 4, 3
    assert (rings.read_counts()["errors"], rings.read_counts()["unrecorded"]) == (1, 2)
    rings.close(remove=False)
    assert (rings.read_counts()["errors"], rings.read_counts()["unrecorded"]) == (1, 2), (
        "the counts stay when the process has ended"
    )


def test_the_processed_horizon_never_moves_back(folder: Path) -> None:
    rings, arena = MergedReader(), MemoryArena()
    writer = RequestWriter(arena, "1-a", "server")
    rings.add_ring(*arena.buffers[0], 1)
    rings.mark_processed(500)
    rings.mark_processed(300)
    assert writer.words[layout.W_PROCESSED_UNTIL] == 500


def test_a_new_reader_recovers_an_overwritten_arrival(folder: Path) -> None:
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
        assert assembler.events_lost == 0  # the previous reader read these events
        rings.close(remove=False)


# ── flush ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_flush_requests_are_completed_by_number() -> None:
    rings, arena = MergedReader(), MemoryArena()
    writer = RequestWriter(arena, "1-a", "server")
    rings.add_ring(*arena.buffers[0], 1)
    assert rings.list_pending_flushes() == []
    writer.words[layout.W_FLUSH_REQUESTED] = 3
    pending = rings.list_pending_flushes()
    writer.words[layout.W_FLUSH_REQUESTED] = 4
    rings.complete_flushes(pending)
    assert writer.words[layout.W_FLUSH_DONE] == 3
    assert rings.list_pending_flushes() == [(pending[0][0], 4)]


# ── events from outside the rings ────────────────────────────────────────────────────────────────────────────────


def test_added_events_are_merged_by_time() -> None:
    rings, arena = MergedReader(), MemoryArena()
    writer = RequestWriter(arena, "1-a", "server")
    rings.add_ring(*arena.buffers[0], 1)
    rings.poll(100)
    writer.open_request(arrival(150))
    rings.add_event(events.RecordedEvent(1, 0, events.PauseSeen(160, 120, "throttled")))
    writer.open_request(arrival(170, 2))
    assert rings.poll(200) == []
    assert event_names(rings.poll(300)) == ["RequestArrived", "PauseSeen", "RequestArrived"]


def test_writers_are_processes_with_locked_ring_files(folder: Path) -> None:
    rings, arena = MergedReader(), MemoryArena()
    RequestWriter(arena, "1-a", "server")
    rings.add_ring(*arena.buffers[0], 1)
    with Process(folder, writing("2-b", 10)) as process:
        rings.discover_rings(folder, 100)
        assert [pid for _, pid in rings.list_writers()] == [process.pid]
        process.kill()
        assert rings.list_writers() == []
        rings.close(remove=False)


def test_steps_of_many_engine_threads_are_read_from_few_files() -> None:
    """Rings are taken while the reader runs, and each has its own number and batch."""
    arena, rings = MemoryArena(), MergedReader()
    RequestWriter(arena, "1-a", "server")
    allocator = StepRingAllocator(arena, "1-a")
    now, numbers, steps = 1_000, list[int](), 0
    for round_number in range(3):
        for _ in range(60):
            step_writer, number = allocator.create_writer("toy")
            batch = BatchWriter(step_writer, HandleTable(), number)
            batch.write_done(batch.write_scheduled([number]))
        now += SECOND
        for name, memory in arena.buffers:
            rings.add_ring(name, memory, now)
        for recorded in rings.poll(now, final=True):
            if isinstance(recorded.event, events.EngineSeen):
                numbers.append(recorded.event.ring_number)
            steps += isinstance(recorded.event, events.StepScheduled)
        assert sorted(numbers) == list(range(1, 60 * (round_number + 1) + 1))
    assert steps == 180
    assert sum(name.endswith(layout.SUFFIX_STEPS) for name, _ in arena.buffers) < 20
