"""What the kernel says of an engine's thread, from files as it writes them."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path

import pytest

from otel_infer import _clock
from otel_infer.ringbuffer import events, layout
from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.ringbuffer.recorder import Recorder
from otel_infer.ringbuffer.writer import FileArena
from otel_infer.sidecar.probes.thread_stats import RESCAN_INTERVAL_NS, EngineThreadProbe

MS = 1_000_000
TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


class Machine:
    """/proc in a folder, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.at = folder, 1000 * MS
        self.threads = EngineThreadProbe(folder, lambda: self.at)

    def thread(self, pid: int, tid: int, *, ran=0, waited=0, faults=0, ticks=0, known_as: int = 0) -> None:
        task = self.proc / str(pid) / "task" / str(tid)
        task.mkdir(parents=True, exist_ok=True)
        (task / "schedstat").write_text(f"{ran * MS} {waited * MS} 7\n")
        stat = ["S", *"1 1 1 0 -1 4194560".split(), str(faults), "0", "0", "0", "5", str(ticks), *["0"] * 30]
        (task / "stat").write_text(f"{tid} (a (strange) name) {' '.join(stat)}\n")
        (task / "status").write_text(f"Name:\tx\nNSpid:\t{tid}\t{known_as or tid}\n")

    def look(self, at_ms: int, *threads: tuple[int, int, int, int]) -> list[events.RecordedEvent]:
        self.at = at_ms * MS
        return self.threads.read_events(lambda: threads)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


ONE = (5, 100, 100, 102)


def test_what_was_added_since_the_last_look_is_said(machine: Machine) -> None:
    machine.thread(100, 102, ran=10, waited=3, faults=50, ticks=1)
    assert machine.look(1000, ONE) == []
    machine.thread(100, 102, ran=40, waited=9, faults=950, ticks=3)
    assert machine.look(1050, ONE) == [
        events.RecordedEvent(5, 0, events.ThreadSeen(1050 * MS, 1000 * MS, 30 * MS, 6 * MS, 2 * TICK, 900))
    ]


def test_of_a_thread_that_did_nothing_nothing_is_said(machine: Machine) -> None:
    machine.thread(100, 102, ran=10)
    assert machine.look(1000, ONE) == machine.look(1050, ONE) == []


def test_after_a_quiet_time_it_is_told_how_long_that_was(machine: Machine) -> None:
    machine.thread(100, 102)
    for at in (1000, 1050, 1100):
        assert machine.look(at, ONE) == []
    machine.thread(100, 102, ran=20)
    quiet, busy = (said.event for said in machine.look(1150, ONE))
    assert quiet == events.ThreadSeen(1100 * MS, 1000 * MS, 0, 0, 0, 0)
    assert busy == events.ThreadSeen(1150 * MS, 1100 * MS, 20 * MS, 0, 0, 0)


def test_a_thread_is_found_by_the_number_its_own_namespace_has_for_it(machine: Machine) -> None:
    machine.thread(4000, 4000, known_as=1)
    machine.thread(4000, 4002, known_as=3)
    there = (5, 4000, 1, 3)
    machine.look(1000, there)
    machine.thread(4000, 4002, ran=20, known_as=3)
    assert [said.event.ran_ns for said in machine.look(1050, there)] == [20 * MS]


@pytest.mark.parametrize("content", ["", "what?", "1 x 3"])
def test_what_cannot_be_read_is_silent(machine: Machine, content: str) -> None:
    machine.thread(100, 102)
    (machine.proc / "100" / "task" / "102" / "schedstat").write_text(content)
    before = len(os.listdir("/proc/self/fd"))
    assert machine.look(1000, ONE) == machine.look(1050, ONE) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_thread_that_ended_is_let_go_of_and_those_beside_it_are_looked_at(machine: Machine) -> None:
    machine.thread(100, 102)
    machine.thread(100, 103)
    other = (6, 100, 100, 103)
    machine.look(1000, ONE, other)
    (machine.proc / "100" / "task" / "102" / "schedstat").write_text("")  # what reading it then comes to
    machine.thread(100, 103, ran=1)
    assert [said.ring for said in machine.look(1050, ONE, other)] == [6]
    before = len(os.listdir("/proc/self/fd"))
    machine.thread(100, 103, ran=2)
    assert machine.look(1050 + RESCAN_INTERVAL_NS // MS) == []
    assert len(os.listdir("/proc/self/fd")) == before - 2


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel counts no waits")
def test_a_real_thread_that_works_is_seen_through_its_ring(tmp_path: Path) -> None:
    recorder, done, looked = Recorder(), threading.Event(), threading.Event()
    recorder.start(lambda: FileArena(tmp_path), lambda: None, lambda reason: None)

    def engine() -> None:
        assert recorder.acquire_batch_writer("toy") is not None
        looked.wait(10)
        until = time.thread_time() + 0.03
        while time.thread_time() < until:
            hashlib.sha256(bytes(1 << 16))
        done.set()
        looked.clear()
        looked.wait(10)

    working = threading.Thread(target=engine)
    working.start()
    rings = MergedReader()
    for _ in range(100):
        rings.discover_rings(tmp_path, _clock.now())
        if rings._processes and next(iter(rings._processes.values())).engines:
            break
        time.sleep(0.02)
    (process,) = rings._processes.values()
    (steps, *_) = process.engines[0]
    assert int(steps.header.words[layout.W_THREAD]) == working.native_id
    # The lock of our own process's rings is invisible to us, so who holds it is said here.
    threads, there = EngineThreadProbe(), [(steps.ring, os.getpid(), os.getpid(), working.native_id or 0)]
    assert threads.read_events(lambda: there) == []
    looked.set()
    assert done.wait(10)
    (seen,) = threads.read_events(lambda: there)
    looked.set()
    working.join()
    assert seen.event.ran_ns >= 25 * MS
    threads.close()
    rings.close(remove=True)
    recorder.stop()
