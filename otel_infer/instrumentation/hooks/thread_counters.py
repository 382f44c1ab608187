"""Records the kernel's counters of a thread for one generation, at its end. Linux.

The sidecar reads the threads of engines every 200 ms (`sidecar.probes.thread_stats`), while they generate. So a generation
lacks its last part, and a short one all of it. Each reading takes about 20 µs, one at the begin and one at the end.
"""

from __future__ import annotations

import os
import threading
from typing import NamedTuple

from otel_infer import _clock
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.batch_writer import BatchWriter
from otel_infer.ringbuffer.recorder import recorder

_FOLDER = "/proc/thread-self"
_FAULTS, _SYSTEM = 7, 12
"""Fields of `stat` after the name: minflt and stime (proc_pid_stat(5))."""
_MAX_READ_BYTES = 1024
_TICK_US = 1_000_000 // os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 10_000


class _Counters(NamedTuple):
    """Times in µs, up to `at` (monotonic ns)."""

    at: int
    ran_us: int
    waited_us: int
    system_us: int
    faults: int


class _ThreadState(threading.local):
    """The counters at the begin of this thread's generation; None outside, and once they were used."""

    begun: _Counters | None = None


_thread_state = _ThreadState()


def begin_thread_run() -> None:
    """Reads the counters of the calling thread, which begins a generation."""
    _thread_state.begun = _read_counters()


def record_thread_run(writer: BatchWriter, engine: str) -> None:
    """Records the counters of the calling thread since its generation began, once. `writer`: of its steps."""
    before, _thread_state.begun = _thread_state.begun, None
    now = _read_counters() if before is not None else None
    if before is None or now is None:
        return
    counts = (max(last - first, 0) for last, first in zip(now[1:], before[1:]))
    event = events.ThreadRan(now.at, before.at, engine, writer.number, *map(events.clamp_count, counts))
    recorder.record_process(event)


def _read_counters() -> _Counters | None:
    """Returns the counters of the calling thread; None without Linux, or with a kernel that has none."""
    try:
        ran_ns, waited_ns, *_ = map(int, _read_file("schedstat").split())
        fields = _read_file("stat").rpartition(b")")[2].split(None, _SYSTEM + 1)
        system_us, faults = int(fields[_SYSTEM]) * _TICK_US, int(fields[_FAULTS])
    except (OSError, ValueError, IndexError):
        return None
    return _Counters(_clock.now(), ran_ns // 1000, waited_ns // 1000, system_us, faults)


def _read_file(name: str) -> bytes:
    descriptor = os.open(f"{_FOLDER}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _MAX_READ_BYTES)
    finally:
        os.close(descriptor)
