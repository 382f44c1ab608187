"""Reads kernel counters of an engine's thread from outside its process. Linux.

    /proc/PID/task/TID/schedstat ─▶ time on a CPU, time runnable without a CPU
    /proc/PID/task/TID/stat      ─▶ time in the kernel, minor page faults

The thread itself does nothing for it. An event holds the increase since the last reading, without the instant
in between. `assembly.engine.thread_delays` compares it with the steps of that time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from otel_infer import _clock
from otel_infer.ringbuffer import events

IDLE_INTERVAL_NS = 1_000_000_000
"""Time between two readings of an idle server."""
RESCAN_INTERVAL_NS = 250_000_000
"""Time between look-ups of the engines' threads."""
MIN_QUIET_NS = 1_000_000
"""A shorter idle time is not recorded separately."""
MAX_THREADS = 64
"""Threads that are read. Where more run steps, few of them have a CPU at a time, and a reading costs 10 µs each."""
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_FAULTS, _SYSTEM, _STARTED = 7, 12, 19
"""Fields of `stat` after the name: minflt, stime and starttime (proc_pid_stat(5))."""
YOUNG_NS = 2_000_000_000
"""A thread that is younger when it is found is counted from its start."""
_MAX_READ_BYTES = 1024

ThreadIds = tuple[int, int, int, int]
"""(step ring, pid as seen from here, pid and thread id as their process sees them)."""


class _ThreadCounts(NamedTuple):
    ran_ns: int
    waited_ns: int
    system_ns: int
    faults: int


class _ThreadFiles:
    """Open files of one thread, so that a reading takes one call per file."""

    def __init__(self, task: Path, at: int) -> None:
        self._files: list[int] = []
        try:
            for name in ("schedstat", "stat"):
                self._files.append(os.open(task / name, os.O_RDONLY | os.O_CLOEXEC))
            self._last_counts = self._read_counts(self._read_scheduled())
            self._sampled_at, self._quiet_at = at, 0
            age_ns = self._read_age()
            if 0 <= age_ns < YOUNG_NS:  # its counters began with it
                self._last_counts, self._sampled_at = _ThreadCounts(0, 0, 0, 0), at - age_ns
        except Exception:
            self.close()
            raise

    def read_samples(self, now: Callable[[], int]) -> list[events.ThreadSeen]:
        """Returns the increase since the last reading; an idle time is returned with the next increase."""
        scheduled = self._read_scheduled()
        if scheduled == self._last_counts[:2]:
            self._quiet_at = now()
            return []
        counts, at = self._read_counts(scheduled), now()
        increases = [after - before for after, before in zip(counts, self._last_counts)]
        since, quiet_at = self._sampled_at, self._quiet_at
        self._last_counts, self._sampled_at, self._quiet_at = counts, at, 0
        if quiet_at - since < MIN_QUIET_NS:
            return [events.ThreadSeen(at, since, *increases)]
        return [events.ThreadSeen(quiet_at, since, 0, 0, 0, 0), events.ThreadSeen(at, quiet_at, *increases)]

    def _read_scheduled(self) -> tuple[int, int]:
        """Returns the time on a CPU, and the time runnable without one, ns."""
        ran, waited, *_ = os.pread(self._files[0], _MAX_READ_BYTES, 0).split()
        return int(ran), int(waited)

    def _read_counts(self, scheduled: tuple[int, int]) -> _ThreadCounts:
        fields = os.pread(self._files[1], _MAX_READ_BYTES, 0).rpartition(b")")[2].split(None, _SYSTEM + 1)
        return _ThreadCounts(*scheduled, int(fields[_SYSTEM]) * _TICK_NS, int(fields[_FAULTS]))

    def _read_age(self) -> int:
        """Returns the time since the thread began, ns, to a tick; -1 where it is unknown."""
        fields = os.pread(self._files[1], _MAX_READ_BYTES, 0).rpartition(b")")[2].split(None, _STARTED + 1)
        if len(fields) <= _STARTED:
            return -1
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) - int(fields[_STARTED]) * _TICK_NS

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = []


class EngineThreadProbe:
    """Probe of the threads of all engines; where the kernel has no such counters it returns nothing."""

    def __init__(self, proc: Path = Path("/proc"), now: Callable[[], int] = _clock.now) -> None:
        self._proc, self._now = proc, now
        self._threads: dict[ThreadIds, _ThreadFiles | None] = {}
        self._rescanned_at = self._sampled_at = 0

    def read_events(
        self, threads: Callable[[], Iterable[ThreadIds]], is_idle: bool = False
    ) -> list[events.RecordedEvent]:
        """Returns the increases since the last reading.

        `is_idle`: nothing was recorded for seconds. Then there are no new threads to look for, and no steps whose
        time would have to be told apart.
        """
        now = self._now()
        if is_idle and now - self._sampled_at < IDLE_INTERVAL_NS:
            return []
        self._sampled_at = now
        if not is_idle and now - self._rescanned_at >= RESCAN_INTERVAL_NS:
            self._rescanned_at = now
            self._update_threads(list(threads())[:MAX_THREADS])
        recorded: list[events.RecordedEvent] = []
        for thread, files in self._threads.items():
            if files is None:
                continue
            try:
                samples = files.read_samples(self._now)
            except (OSError, ValueError, IndexError):  # the thread has ended
                files.close()
                self._threads[thread] = None
                continue
            recorded += [events.RecordedEvent(thread[0], 0, sample) for sample in samples]
        return recorded

    def close(self) -> None:
        """Closes all files."""
        self._update_threads([])

    def _update_threads(self, threads: list[ThreadIds]) -> None:
        known = self._threads
        if threads == list(known):
            return
        self._threads = {
            thread: known.pop(thread) if thread in known else self._open_thread(thread) for thread in threads
        }
        for files in known.values():
            if files is not None:
                files.close()

    def _open_thread(self, thread: ThreadIds) -> _ThreadFiles | None:
        _, pid, own_pid, own_thread = thread
        tasks = self._proc / str(pid) / "task"
        number = own_thread if pid == own_pid else resolve_thread_id(tasks, own_thread)
        try:
            return _ThreadFiles(tasks / str(number), self._now()) if number else None
        except (OSError, ValueError, IndexError):
            return None


def resolve_thread_id(tasks: Path, own: int) -> int:
    """Returns the thread with this id in its own namespace (`NSpid` of proc_pid_status(5)); 0 = none."""
    try:
        for status in tasks.glob("*/status"):
            for line in status.read_text(encoding="utf-8", errors="replace").splitlines():
                if line.startswith("NSpid:") and line.split()[-1] == str(own):
                    return int(status.parent.name)
    except OSError:
        pass
    return 0
