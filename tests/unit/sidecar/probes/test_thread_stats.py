"""Counters of an engine's thread, from the files of the kernel."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path

import pytest

from otel_infer import _clock
from otel_infer.ringbuffer import events, layout
from otel_infer.ringbuffer.arena import FileArena
from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.ringbuffer.recorder import Recorder
from otel_infer.sidecar.probes.thread_stats import RESCAN_INTERVAL_NS, EngineThreadProbe

MS = 1_000_000
TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


class Machine:
    """/proc in a folder, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.at = folder, 1000 * MS
        self.probe = EngineThreadProbe(folder, lambda: self.at)

    def thread(
        self, pid: int, tid: int, *, ran=0, waited=0, faults=0, ticks=0, namespace_id: int = 0
    ) -> None:
        task = self.proc / str(pid) / "task" / str(tid)
        task.mkdir(parents=True, exist_ok=True)
        (task / "schedstat").write_text(f"{ran * MS} {waited * MS} 7\n")
        stat = ["S", *"1 1 1 0 -1 4194560".split(), str(faults), "0", "0", "0", "5", str(ticks), *["0"] * 30]
        (task / "stat").write_text(f"{tid} (a (strange) name) {' '.join(stat)}\n")
        (task / "status").write_text(f"Name:\tx\nNSpid:\t{tid}\t{namespace_id or tid}\n")

    def sample(self, at_ms: int, *threads: tuple[int, int, int, int]) -> list[events.RecordedEvent]:
        self.at = at_ms * MS
        return self.probe.read_events(lambda: threads)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


THREAD = (5, 100, 100, 102)


def test_the_increase_since_the_last_sample_is_recorded(machine: Machine) -> None:
    machine.thread(100, 102, ran=10, waited=3, faults=50, ticks=1)
    assert machine.sample(1000, THREAD) == []
    machine.thread(100, 102, ran=40, waited=9, faults=950, ticks=3)
    assert machine.sample(1050, THREAD) == [
        events.RecordedEvent(5, 0, events.ThreadSeen(1050 * MS, 1000 * MS, 30 * MS, 6 * MS, 2 * TICK, 900))
    ]


def test_an_idle_thread_yields_no_event(machine: Machine) -> None:
    machine.thread(100, 102, ran=10)
    assert machine.sample(1000, THREAD) == machine.sample(1050, THREAD) == []


def test_activity_after_idle_time_also_records_idle_time(machine: Machine) -> None:
    machine.thread(100, 102)
    for at in (1000, 1050, 1100):
        assert machine.sample(at, THREAD) == []
    machine.thread(100, 102, ran=20)
    quiet, busy = (recorded.event for recorded in machine.sample(1150, THREAD))
    assert quiet == events.ThreadSeen(1100 * MS, 1000 * MS, 0, 0, 0, 0)
    assert busy == events.ThreadSeen(1150 * MS, 1100 * MS, 20 * MS, 0, 0, 0)


def test_a_thread_is_found_by_its_namespace_id(machine: Machine) -> None:
    machine.thread(4000, 4000, namespace_id=1)
    machine.thread(4000, 4002, namespace_id=3)
    thread = (5, 4000, 1, 3)
    machine.sample(1000, thread)
    machine.thread(4000, 4002, ran=20, namespace_id=3)
    assert [recorded.event.ran_ns for recorded in machine.sample(1050, thread)] == [20 * MS]


@pytest.mark.parametrize("content", ["", "invalid", "1 x 3"])
def test_unreadable_counters_yield_no_event(machine: Machine, content: str) -> None:
    machine.thread(100, 102)
    (machine.proc / "100" / "task" / "102" / "schedstat").write_text(content)
    before = len(os.listdir("/proc/self/fd"))
    assert machine.sample(1000, THREAD) == machine.sample(1050, THREAD) == []
    assert len(os.listdir("/proc/self/fd")) <= before  # what other tests left may be closed meanwhile


def test_an_ended_thread_is_released_and_others_sampled(machine: Machine) -> None:
    machine.thread(100, 102)
    machine.thread(100, 103)
    other = (6, 100, 100, 103)
    machine.sample(1000, THREAD, other)
    (machine.proc / "100" / "task" / "102" / "schedstat").write_text("")  # a read then returns no text
    machine.thread(100, 103, ran=1)
    assert [recorded.ring for recorded in machine.sample(1050, THREAD, other)] == [6]
    before = len(os.listdir("/proc/self/fd"))
    machine.thread(100, 103, ran=2)
    assert machine.sample(1050 + RESCAN_INTERVAL_NS // MS) == []
    assert len(os.listdir("/proc/self/fd")) == before - 2


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel has no schedstat")
def test_a_real_engine_thread_is_sampled(tmp_path: Path) -> None:
    recorder, done, sampled = Recorder(), threading.Event(), threading.Event()
    recorder.start(lambda: FileArena(tmp_path), lambda: None, lambda reason: None)

    def engine() -> None:
        assert recorder.acquire_batch_writer("toy") is not None
        sampled.wait(10)
        until = time.thread_time() + 0.03
        while time.thread_time() < until:
            hashlib.sha256(bytes(1 << 16))
        done.set()
        sampled.clear()
        sampled.wait(10)

    began_at, working = _clock.now(), threading.Thread(target=engine)
    working.start()
    rings = MergedReader()
    for _ in range(100):
        rings.discover_rings(tmp_path, _clock.now())
        if rings._processes and next(iter(rings._processes.values())).engines:
            break
        time.sleep(0.02)
    (process,) = rings._processes.values()
    steps = process.engines[0]
    assert steps.header.words[layout.W_THREAD] == working.native_id
    # A process does not see its own ring locks as held, so the test lists the thread itself.
    probe, threads = EngineThreadProbe(), [(steps.ring, os.getpid(), os.getpid(), working.native_id or 0)]
    (from_start,) = probe.read_events(lambda: threads)  # a young thread is counted from its start
    assert from_start.event.since <= began_at + 20 * MS
    sampled.set()
    assert done.wait(10)
    (seen,) = probe.read_events(lambda: threads)
    sampled.set()
    working.join()
    assert seen.event.ran_ns >= 25 * MS
    probe.close()
    rings.close(remove=True)
    recorder.stop()
