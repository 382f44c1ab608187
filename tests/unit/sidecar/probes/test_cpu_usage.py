"""Who uses the cores of a server: other processes, its engine, or other threads of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from otel_infer.ringbuffer.events import CpuSeen
from otel_infer.sidecar.probes.cpu_usage import CpuUsageProbe

TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
SECOND = 1_000_000_000
SERVER, ENGINE, WORKER, NATIVE = 700, 701, 702, 710
CORES = sorted(os.sched_getaffinity(0))


class FakeKernel:
    """A /proc of one server with a main thread, an engine's thread and another one; its clock."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.at = folder, SECOND
        self.busy_ticks = self.nice_ticks = 0
        self.cpu_ticks = {SERVER: 0, ENGINE: 0, WORKER: 0}
        self.write()

    def write(self) -> None:
        core = f"cpu{CORES[0]} {self.busy_ticks} {self.nice_ticks} 0 5000 7 0 0 0 0 0"
        others = [f"cpu{number} 0 0 0 5000 0 0 0 0 0 0" for number in CORES[1:]]
        total = f"cpu  {self.busy_ticks} {self.nice_ticks} 0 9999 0 0 0 0 0 0"
        self.put("stat", "\n".join([total, core, *others, "ctxt 5"]))
        self.put(f"{SERVER}/stat", format_stat(sum(self.cpu_ticks.values())))
        for thread, ticks in self.cpu_ticks.items():
            self.put(f"{SERVER}/task/{thread}/stat", format_stat(ticks))

    def put(self, name: str, content: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)

    def read(self, probe: CpuUsageProbe, is_idle: bool = False) -> list[CpuSeen]:
        self.write()
        writers, threads = [(3, SERVER)], [(4, SERVER, SERVER, ENGINE)]
        started = [(SERVER, thread) for thread in self.cpu_ticks if thread != NATIVE]
        read = probe.read_events(lambda: writers, lambda: threads, lambda: started, is_idle)
        assert all((recorded.ring, recorded.handle) == (3, 0) for recorded in read)
        return [recorded.event for recorded in read]


def format_stat(ticks: int) -> str:
    """Returns a `stat` with this user time, of a process whose name has a blank and a parenthesis."""
    return f"1 (a b) c) S {' '.join('0' * 10)} {ticks} 0 0 0"


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(CORES))
    return FakeKernel(tmp_path)


@pytest.fixture
def probe(kernel: FakeKernel) -> CpuUsageProbe:
    return CpuUsageProbe(kernel.folder, lambda: kernel.at)


def test_first_reading_is_no_use(kernel: FakeKernel, probe: CpuUsageProbe) -> None:
    assert kernel.read(probe) == []


def test_use_is_divided(kernel: FakeKernel, probe: CpuUsageProbe) -> None:
    """Of 90 busy ticks the server took 60: 20 its main thread, 30 its engine, 10 another thread."""
    kernel.read(probe)
    kernel.at += SECOND
    kernel.busy_ticks, kernel.cpu_ticks = 90, {SERVER: 20, ENGINE: 30, WORKER: 10}
    (seen,) = kernel.read(probe)
    assert seen == CpuSeen(
        kernel.at, kernel.at - SECOND, len(CORES), 90 * TICK_NS, 60 * TICK_NS, 10 * TICK_NS
    )


def test_threads_of_native_libraries_are_no_others(kernel: FakeKernel, probe: CpuUsageProbe) -> None:
    """OpenMP, ggml or ONNX Runtime start them, and they compute for the threads that call the library."""
    kernel.cpu_ticks[NATIVE] = 0
    kernel.read(probe)
    kernel.at += SECOND
    kernel.busy_ticks, kernel.cpu_ticks = 95, {SERVER: 5, ENGINE: 40, WORKER: 10, NATIVE: 40}
    (seen,) = kernel.read(probe)
    assert (seen.server_ns, seen.other_threads_ns) == (95 * TICK_NS, 10 * TICK_NS)


def test_processes_of_low_priority_are_not_busy(kernel: FakeKernel, probe: CpuUsageProbe) -> None:
    kernel.read(probe)
    kernel.at += SECOND
    kernel.nice_ticks = 100
    (seen,) = kernel.read(probe)
    assert seen.busy_ns == 0


def test_reading_is_due_once_a_second_of_a_busy_server(kernel: FakeKernel, probe: CpuUsageProbe) -> None:
    kernel.read(probe)
    kernel.at += SECOND // 2
    assert kernel.read(probe) == []
    kernel.at += SECOND
    assert kernel.read(probe, is_idle=True) == []
    assert len(kernel.read(probe)) == 1


def test_readings_far_apart_are_not_compared(kernel: FakeKernel, probe: CpuUsageProbe) -> None:
    kernel.read(probe)
    kernel.at += 60 * SECOND
    assert kernel.read(probe) == []
    kernel.at += SECOND
    assert len(kernel.read(probe)) == 1


def test_new_thread_counts_from_its_second_reading(kernel: FakeKernel, probe: CpuUsageProbe) -> None:
    kernel.read(probe)
    kernel.at += SECOND
    kernel.cpu_ticks[703] = 50
    (seen,) = kernel.read(probe)
    assert seen.other_threads_ns == 0
    kernel.at += SECOND
    kernel.cpu_ticks[703] = 80
    (seen,) = kernel.read(probe)
    assert seen.other_threads_ns == 30 * TICK_NS


@pytest.mark.parametrize("missing", ["stat", f"{SERVER}/stat"])
def test_missing_counters_are_no_use(kernel: FakeKernel, probe: CpuUsageProbe, missing: str) -> None:
    (kernel.folder / missing).unlink()
    read = probe.read_events(lambda: [(3, SERVER)], list, list)
    assert read == []


def test_server_without_processes_has_no_use(kernel: FakeKernel, probe: CpuUsageProbe) -> None:
    assert probe.read_events(list, list, list) == []


def test_this_process_is_read() -> None:
    at = [SECOND]
    probe = CpuUsageProbe(now=lambda: at[0])
    writers = [(1, os.getpid())]
    if not Path("/proc/self/stat").exists():
        pytest.skip("this kernel has no /proc")
    assert probe.read_events(lambda: writers, list, list) == []
    at[0] += SECOND
    (recorded,) = probe.read_events(lambda: writers, list, list)
    assert recorded.event.cores == len(os.sched_getaffinity(0))
    assert recorded.event.server_ns >= 0
