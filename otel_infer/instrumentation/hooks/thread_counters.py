"""Records the kernel's counters of a thread that runs one generation, at its end. Linux.

The sidecar reads the threads of engines every 200 ms (`sidecar.probes.thread_stats`). A thread per request may end
before that, and its last part is always missing. So such a thread records its own totals once, at about 20 µs. A thread
that generates again is a worker of a pool, which the sidecar reads.
"""

from __future__ import annotations

import os
import threading
import time

from otel_infer import _clock
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.batch_writer import BatchWriter
from otel_infer.ringbuffer.recorder import recorder

_FOLDER = "/proc/thread-self"
_FAULTS, _SYSTEM, _STARTED = 7, 12, 19
"""Fields of `stat` after the name: minflt, stime and starttime (proc_pid_stat(5))."""
_MAX_READ_BYTES = 1024
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 10_000_000


class _ThreadState(threading.local):
    """Whether this thread has generated before."""

    has_generated = False


_thread_state = _ThreadState()


def record_thread_run(writer: BatchWriter, engine: str) -> None:
    """Records the totals of the calling thread, which wrote to this ring, unless it has generated before."""
    if _thread_state.has_generated:
        return
    _thread_state.has_generated = True
    try:
        ran_ns, waited_ns, *_ = map(int, _read_file("schedstat").split())
        fields = _read_file("stat").rpartition(b")")[2].split(None, _STARTED + 1)
        age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - int(fields[_STARTED]) * _TICK_NS
    except (OSError, ValueError, IndexError, AttributeError):  # not Linux, or a kernel without these counters
        return
    now = _clock.now()
    counts = ran_ns // 1000, waited_ns // 1000, int(fields[_SYSTEM]) * _TICK_NS // 1000, int(fields[_FAULTS])
    event = events.ThreadRan(now, now - age_ns, engine, writer.number, *map(events.clamp_count, counts))
    recorder.record_process(event)


def _read_file(name: str) -> bytes:
    descriptor = os.open(f"{_FOLDER}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _MAX_READ_BYTES)
    finally:
        os.close(descriptor)
