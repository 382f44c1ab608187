"""How often the sidecar reads rings: by how fast they fill, and at once for whoever waits."""

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
    """A process with a small ring, and the sidecar that reads it, woken by hand."""

    def __init__(self, folder: Path) -> None:
        arena = MemoryArena()
        self.writer = RequestWriter(arena, "1-a", "server", layout.RingSizes(CELLS, 16, 16, 64))
        self.lock = directory.FileLock(folder / directory.SIDECAR_LOCK)
        assert self.lock.acquire()
        self.sidecar = Sidecar(self.lock, Config(), {})
        self.sidecar._rings.add_ring(*arena.buffers[0], START)
        self.reads: list[int] = []
        read = self.sidecar._pipeline.run_cycle

        def wake(now: int, final: bool = False) -> bool:
            self.reads.append((now - START) // CYCLE_NS)
            return read(now, final)

        self.sidecar._pipeline.run_cycle = wake  # type: ignore[method-assign]

    def wakes(self, count: int, facts_each: int) -> list[int]:
        """Which of so many wakes, 50 ms apart, read the rings, where so much is stated before each."""
        for number in range(count):
            for _ in range(facts_each):
                self.writer.write_event(0, events.PauseSeen(START, START - 1, "gc"))
            self.sidecar._run_cycle(START + number * CYCLE_NS)
        return self.reads


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.lock.release()


def test_rings_that_do_not_fill_are_read_at_every_tenth_wake(server: Server) -> None:
    assert server.wakes(31, facts_each=1) == [0, 10, 20, 30]


def test_a_ring_that_was_filled_at_once_is_read_at_the_next_wake(server: Server) -> None:
    server.wakes(3, facts_each=0)
    for _ in range(CELLS // 8 + 1):
        server.writer.write_event(0, events.PauseSeen(START, START - 1, "gc"))
    server.sidecar._run_cycle(START + 3 * CYCLE_NS)
    assert server.reads == [0, 3]


def test_rings_that_fill_are_read_at_each_wake(server: Server) -> None:
    assert server.wakes(13, facts_each=CELLS // 16) == [0, *range(3, 13)], (
        "it is known after the first portion"
    )


def test_whoever_waits_for_a_flush_does_not_wait_for_the_tenth_wake(server: Server) -> None:
    server.wakes(2, facts_each=1)
    server.writer.words[layout.W_FLUSH_REQUESTED] += 1
    server.reads.clear()
    for number in (2, 3, 4):
        server.sidecar._run_cycle(START + number * CYCLE_NS)
    assert server.reads[:3] == [2, 3, 4]
    assert server.writer.words[layout.W_FLUSH_DONE] == server.writer.words[layout.W_FLUSH_REQUESTED]


def test_it_wakes_half_as_often_where_nothing_presses(server: Server) -> None:
    """Nothing does until rings fill, or somebody waits for a flush; while nothing happens at all it sleeps longer still."""
    server.wakes(11, facts_each=1)
    assert server.sidecar._cycle_interval_ns(START + 11 * CYCLE_NS) == LIGHT_LOAD_CYCLE_NS
    server.writer.words[layout.W_FLUSH_REQUESTED] += 1
    server.sidecar._run_cycle(START + 12 * CYCLE_NS)
    assert server.sidecar._cycle_interval_ns(START + 12 * CYCLE_NS) == CYCLE_NS
    assert server.sidecar._cycle_interval_ns(START + 100 * CYCLE_NS) == IDLE_CYCLE_NS


def test_a_webhook_whose_port_is_taken_is_there_when_it_is_free(tmp_path: Path) -> None:
    """The last sidecar of a server that was started again has it for some seconds."""
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
