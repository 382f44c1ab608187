"""Reads who uses the cores that a server may run on: other processes, or which threads of its own. Linux.

    /proc/stat              ─▶ busy time of these cores, without processes of low priority (nice)
    /proc/PID/stat          ─▶ CPU time of the server's processes
    /proc/PID/task/TID/stat ─▶ CPU time of Python's threads that are no main thread, run no engine and work for no request

All are sums in ticks of 10 ms on most systems, read once a second. Of threads, those count that lived at both readings.
Threads of native libraries compute for the threads that call them, so they are no others (`ringbuffer.python_threads`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from otel_infer import _clock
from otel_infer.ringbuffer import events
from otel_infer.sidecar.probes.thread_stats import ThreadIds

INTERVAL_NS = 1_000_000_000
MAX_AGE_NS = 5 * INTERVAL_NS
"""Readings further apart are not compared: the server was idle meanwhile."""
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_USER, _SYSTEM = 11, 12
"""Fields of `stat` after the name: utime and stime (proc_pid_stat(5))."""
_STATES_OF_CPU = 8
"""user, nice, system, idle, iowait, irq, softirq, steal (proc_stat(5)); guest time is part of user."""
_NOT_BUSY = (1, 3, 4)
"""nice, idle, iowait."""


class CpuUsageProbe:
    """Compares two readings per second; where the kernel has no such counters it returns nothing."""

    def __init__(self, proc: Path = Path("/proc"), now: Callable[[], int] = _clock.now) -> None:
        self._proc, self._now = proc, now
        self._at = 0
        self._busy_ns = self._server_ns = 0
        self._thread_ns: dict[tuple[int, int], int] = {}

    def read_events(
        self,
        writers: Callable[[], Iterable[tuple[int, int]]],
        model_threads: Callable[[], Iterable[ThreadIds]],
        python_threads: Callable[[], Iterable[tuple[int, int]]],
        is_idle: bool = False,
    ) -> list[events.RecordedEvent]:
        """Returns the use of the CPUs since the last reading, if one is due.

        `writers`: (ring, pid). `python_threads`: (pid, thread id) of all threads that Python started.
        """
        now = self._now()
        if is_idle or now - self._at < INTERVAL_NS:
            return []
        processes = list(writers())
        try:
            cores = sorted(os.sched_getaffinity(processes[0][1])) if processes else []
            busy_ns = self._read_busy_ns(cores)
            server_ns = sum(self._read_cpu_ns(f"{pid}/stat") for _, pid in processes)
        except (OSError, ValueError, IndexError):  # a process has ended, or there is no such file
            return []
        engines = {(pid, own_thread) for _, pid, _, own_thread in model_threads()}
        threads = self._read_threads(set(python_threads()) - engines)
        since, self._at = self._at, now
        others = sum(
            max(ns - self._thread_ns[key], 0) for key, ns in threads.items() if key in self._thread_ns
        )
        busy, server = busy_ns - self._busy_ns, server_ns - self._server_ns
        self._busy_ns, self._server_ns, self._thread_ns = busy_ns, server_ns, threads
        if not processes or not since or now - since > MAX_AGE_NS or min(busy, server) < 0:
            return []
        seen = events.CpuSeen(now, since, len(cores), busy, server, others)
        return [events.RecordedEvent(processes[0][0], 0, seen)]

    def _read_busy_ns(self, cores: list[int]) -> int:
        """Returns the time in which these cores worked for processes of normal priority, ns."""
        names = {f"cpu{core}" for core in cores}
        ticks = 0
        for line in (self._proc / "stat").read_text(encoding="ascii").splitlines():
            name, _, numbers = line.partition(" ")
            if name in names:
                states = [int(number) for number in numbers.split()[:_STATES_OF_CPU]]
                ticks += sum(states) - sum(states[state] for state in _NOT_BUSY)
        return ticks * _TICK_NS

    def _read_cpu_ns(self, stat: str) -> int:
        content = (self._proc / stat).read_bytes()
        fields = content.rpartition(b")")[2].split(None, _SYSTEM + 1)
        return (int(fields[_USER]) + int(fields[_SYSTEM])) * _TICK_NS

    def _read_threads(self, threads: set[tuple[int, int]]) -> dict[tuple[int, int], int]:
        """Returns the CPU time of those threads that are no main thread, by (pid, thread id)."""
        read: dict[tuple[int, int], int] = {}
        for pid, number in threads:
            if number != pid:
                try:
                    read[pid, number] = self._read_cpu_ns(f"{pid}/task/{number}/stat")
                except (OSError, ValueError, IndexError):  # the thread has ended
                    continue
        return read
