"""How often the sidecar reads rings: by how fast they fill, and at once for a pending flush."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from otel_infer import _clock
from otel_infer.config.environment import Config
from otel_infer.ringbuffer import directory, events, layout
from otel_infer.ringbuffer.arena import MemoryArena
from otel_infer.ringbuffer.writer import RequestWriter
from otel_infer.sidecar.main import IDLE_CYCLE_NS, LIGHT_LOAD_CYCLE_NS, Sidecar
from otel_infer.sidecar.pipeline import CYCLE_NS

CELLS = 128
SECOND = 1_000_000_000
START = 10**12


class Server:
    """A process with a small ring, and a sidecar whose cycles the test runs."""

    def __init__(self, folder: Path) -> None:
        arena = MemoryArena()
        self.writer = RequestWriter(arena, "1-a", "server", layout.RingSizes(CELLS, 16, 16, 64))
        self.lock = directory.FileLock(folder / directory.SIDECAR_LOCK)
        assert self.lock.acquire()
        self.sidecar = Sidecar(self.lock, Config(), {})
        self.sidecar._rings.add_ring(*arena.buffers[0], START)
        self.reads: list[int] = []
        read = self.sidecar._pipeline.run_cycle

        def run_cycle(now: int, final: bool = False) -> bool:
            self.reads.append((now - START) // CYCLE_NS)
            return read(now, final)

        self.sidecar._pipeline.run_cycle = run_cycle  # type: ignore[method-assign]

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


def test_idle_rings_are_read_every_tenth_cycle(server: Server) -> None:
    assert server.run_cycles(31, events_each=1) == [0, 10, 20, 30]


def test_a_suddenly_filled_ring_is_read_next_cycle(server: Server) -> None:
    server.run_cycles(3, events_each=0)
    for _ in range(CELLS // 8 + 1):
        server.writer.write_event(0, events.PauseSeen(START, START - 1, "gc"))
    server.sidecar._run_cycle(START + 3 * CYCLE_NS)
    assert server.reads == [0, 3]


def test_filling_rings_are_read_every_cycle(server: Server) -> None:
    assert server.run_cycles(13, events_each=CELLS // 16) == [0, *range(3, 13)], (
        "the fill rate is known after the first events"
    )


def test_a_flush_request_is_served_at_once(server: Server) -> None:
    server.run_cycles(2, events_each=1)
    server.writer.words[layout.W_FLUSH_REQUESTED] += 1
    server.reads.clear()
    for number in (2, 3, 4):
        server.sidecar._run_cycle(START + number * CYCLE_NS)
    assert server.reads[:3] == [2, 3, 4]
    assert server.writer.words[layout.W_FLUSH_DONE] == server.writer.words[layout.W_FLUSH_REQUESTED]


def test_the_cycle_interval_depends_on_load(server: Server) -> None:
    """Light load doubles the interval, a pending flush shortens it, and without events it is longest."""
    server.run_cycles(11, events_each=1)
    assert server.sidecar._cycle_interval_ns(START + 11 * CYCLE_NS) == LIGHT_LOAD_CYCLE_NS
    server.writer.words[layout.W_FLUSH_REQUESTED] += 1
    server.sidecar._run_cycle(START + 12 * CYCLE_NS)
    assert server.sidecar._cycle_interval_ns(START + 12 * CYCLE_NS) == CYCLE_NS
    assert server.sidecar._cycle_interval_ns(START + 100 * CYCLE_NS) == IDLE_CYCLE_NS


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
