"""How often the sidecar wakes up and reads rings: by how fast they fill, and at once for a pending flush."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from otel_infer import _clock
from otel_infer.config.environment import Config
from otel_infer.ringbuffer import directory, events, layout
from otel_infer.ringbuffer.arena import MemoryArena
from otel_infer.ringbuffer.step_writer import StepWriter
from otel_infer.ringbuffer.writer import RequestWriter
from otel_infer.sidecar.main import Sidecar
from otel_infer.sidecar.pipeline import CYCLE_NS
from otel_infer.sidecar.read_schedule import (
    IDLE_WAKE_INTERVAL_NS,
    REQUESTS_WAKE_INTERVAL_NS,
    WAKE_INTERVAL_NS,
)

CELLS = 128
SECOND = 1_000_000_000
START = 10**12


class Server:
    """A process with a small ring, and a sidecar whose cycles the test runs."""

    def __init__(self, folder: Path, settings: Config | None = None) -> None:
        self.arena = arena = MemoryArena()
        self.writer = RequestWriter(arena, "1-a", "server", layout.RingSizes(CELLS, 16, 16, 64))
        self.lock = directory.FileLock(folder / directory.SIDECAR_LOCK)
        assert self.lock.acquire()
        self.sidecar = Sidecar(self.lock, settings or Config(), {})
        self.sidecar._rings.add_ring(*arena.buffers[0], START)
        self.reads: list[int] = []
        read = self.sidecar._pipeline.run_cycle

        def run_cycle(now: int, final: bool = False) -> bool:
            self.reads.append((now - START) // CYCLE_NS)
            return read(now, final)

        self.sidecar._pipeline.run_cycle = run_cycle  # type: ignore[method-assign]

    def add_step_ring(self, cells: int) -> StepWriter:
        steps = StepWriter(self.arena, "1-a-1", "engine", layout.RingSizes(step_cells=cells))
        self.sidecar._rings.add_ring(*self.arena.buffers[1], START)
        return steps

    def run_cycles(self, count: int, events_each: int) -> list[int]:
        """Runs `count` cycles, 50 ms apart, with `events_each` events before each; returns the cycles that read the rings."""
        for number in range(count):
            for _ in range(events_each):
                self.writer.write_event(0, events.PauseSeen(START, START - 1, "gc"))
            self.sidecar._run_cycle(START + number * CYCLE_NS)
        return self.reads


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.lock.release()


def test_rings_are_read_every_two_seconds(server: Server) -> None:
    """A read returns what was recorded until shortly before it."""
    released: list[int] = []
    feed = server.sidecar._pipeline.assembler.feed_events

    def feed_events(recorded: list[events.RecordedEvent]) -> None:
        released.append(sum(isinstance(each.event, events.MarkSeen) for each in recorded))
        feed(recorded)

    server.sidecar._pipeline.assembler.feed_events = feed_events  # type: ignore[method-assign, assignment]
    for number in range(81):
        if number % 10 == 0:
            server.writer.write_event(0, events.MarkSeen(START + number * CYCLE_NS, START, "preemption", 1))
        server.sidecar._run_cycle(START + number * CYCLE_NS)
    assert server.reads == [0, 40, 80]
    assert released == [0, 4, 4], "the events of cycles 0 to 30, and 40 to 70"


def test_a_live_terminal_reads_twice_a_second(tmp_path: Path) -> None:
    server = Server(tmp_path, Config(console=True))
    assert server.run_cycles(21, events_each=1) == [0, 10, 20]
    server.lock.release()


def test_a_suddenly_filled_ring_is_read_next_cycle(server: Server) -> None:
    server.run_cycles(3, events_each=0)
    for _ in range(CELLS // 4 + 1):
        server.writer.write_event(0, events.PauseSeen(START, START - 1, "gc"))
    server.sidecar._run_cycle(START + 3 * CYCLE_NS)
    assert server.reads == [0, 3]


def test_a_suddenly_filled_step_ring_is_read_next_cycle(server: Server) -> None:
    steps = server.add_step_ring(cells=128)
    server.run_cycles(3, events_each=0)
    for number in range(CELLS // 4 + 1):
        steps.write_record(events.DONE_CODE, events.DONE_HEAD.pack(START, number, 0, 1, 0))
    server.sidecar._run_cycle(START + 3 * CYCLE_NS)
    assert server.reads == [0, 3]


def test_filling_rings_are_read_every_cycle(server: Server) -> None:
    reads = server.run_cycles(13, events_each=CELLS // 16)
    assert reads[-7:] == list(range(6, 13)), "the fill rate is known after the first events"


def test_the_first_event_after_idle_time_is_read_next_cycle(server: Server) -> None:
    server.run_cycles(200, events_each=0)
    server.reads.clear()
    server.writer.write_event(0, events.PauseSeen(START, START - 1, "gc"))
    for number in range(201, 243):
        server.sidecar._run_cycle(START + number * CYCLE_NS)
    assert server.reads == [201, 241]


def test_a_flush_request_is_served_at_once(server: Server) -> None:
    server.run_cycles(2, events_each=1)
    server.writer.words[layout.W_FLUSH_REQUESTED] += 1
    server.reads.clear()
    for number in (2, 3, 4):
        server.sidecar._run_cycle(START + number * CYCLE_NS)
    assert server.reads[:3] == [2, 3, 4]
    assert server.writer.words[layout.W_FLUSH_DONE] == server.writer.words[layout.W_FLUSH_REQUESTED]


def test_a_requested_tape_is_written_at_once(server: Server, tmp_path: Path) -> None:
    """The rings are read in each cycle until it has the events that were recorded before the request."""
    server.run_cycles(3, events_each=1)
    (tmp_path / "dump-0123456789abcdef.requested").touch()
    server.reads.clear()
    for number in (3, 4, 5):
        server.sidecar._run_cycle(START + number * CYCLE_NS)
    server.sidecar._flight_recorder.close(10)
    assert server.reads == [3, 4]
    assert (tmp_path / "dump-0123456789abcdef.tape").exists()


def test_the_wake_interval_depends_on_load(server: Server) -> None:
    """A pending flush shortens it, and counters of engine threads are read more often."""
    server.run_cycles(11, events_each=1)
    schedule = server.sidecar._schedule
    assert schedule.wake_interval(START + 11 * CYCLE_NS) == REQUESTS_WAKE_INTERVAL_NS
    assert schedule.wake_interval(START + 11 * CYCLE_NS + 6 * SECOND) == CYCLE_NS, "a read is due"
    server.add_step_ring(cells=1024)
    assert schedule.wake_interval(START + 11 * CYCLE_NS) == WAKE_INTERVAL_NS
    server.writer.words[layout.W_FLUSH_REQUESTED] += 1
    server.sidecar._run_cycle(START + 12 * CYCLE_NS)
    assert schedule.wake_interval(START + 12 * CYCLE_NS) == CYCLE_NS


def test_an_idle_server_is_looked_at_least_often(server: Server) -> None:
    server.run_cycles(150, events_each=0)
    assert server.sidecar._schedule.wake_interval(START + 150 * CYCLE_NS) == IDLE_WAKE_INTERVAL_NS


def test_a_webhook_starts_once_its_port_is_free(tmp_path: Path) -> None:
    """After a restart of the server, its previous sidecar holds the port for a few seconds."""
    lock = directory.FileLock(tmp_path / directory.SIDECAR_LOCK)
    assert lock.acquire()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sidecar = Sidecar(lock, Config(dump_port=str(port)), {})
        assert sidecar._webhook is None
        now = _clock.now()
        sidecar._start_webhook(now + 3 * SECOND)
        assert sidecar._webhook is None
    sidecar._start_webhook(now + 4 * SECOND)  # too soon
    assert sidecar._webhook is None
    sidecar._start_webhook(now + 6 * SECOND)
    assert sidecar._webhook is not None
    sidecar._webhook.close()
    lock.release()
