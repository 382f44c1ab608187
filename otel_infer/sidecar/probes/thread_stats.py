"""What the kernel counts of an engine's thread, read from beside it. Linux.

    /proc/PID/task/TID/schedstat ─▶ time on a CPU, time it could have run and had none
    /proc/PID/task/TID/stat      ─▶ time in the kernel, pages that had to be mapped to it

The thread itself does nothing for it. What is stated is what was added since the last look, so it is not known where in
between it was: `strain` sets it against the steps of that time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from otel_infer import _clock
from otel_infer.ringbuffer import events

RESCAN_INTERVAL_NS = 250_000_000
"""How often it is asked which threads there are."""
MIN_QUIET_NS = 1_000_000
"""A quiet time that is not worth a word."""
_TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_FAULTS, _SYSTEM = 7, 12
"""Fields of `stat` after the name: minflt and stime (proc_pid_stat(5))."""
_MAX_READ_BYTES = 1024

ThreadIds = tuple[int, int, int, int]
"""(ring of steps, pid as seen from here, pid and thread as their process sees them)."""


class _ThreadCounts(NamedTuple):
    ran_ns: int
    waited_ns: int
    system_ns: int
    faults: int


class _ThreadFiles:
    """The files of one thread, open: to look again is one call each."""

    def __init__(self, task: Path, at: int) -> None:
        self._files: list[int] = []
        try:
            for name in ("schedstat", "stat"):
                self._files.append(os.open(task / name, os.O_RDONLY | os.O_CLOEXEC))
            self._last_counts, self._sampled_at, self._quiet_at = self._read_counts(), at, 0
        except Exception:
            self.close()
            raise

    def read_samples(self, now: Callable[[], int]) -> list[events.ThreadSeen]:
        """What was added since the last look; while nothing is, nothing is said until something was."""
        counts, at = self._read_counts(), now()
        added = [after - before for after, before in zip(counts, self._last_counts)]
        if not added[0] and not added[1]:
            self._quiet_at = at
            return []
        since, quiet_at = self._sampled_at, self._quiet_at
        self._last_counts, self._sampled_at, self._quiet_at = counts, at, 0
        if quiet_at - since < MIN_QUIET_NS:
            return [events.ThreadSeen(at, since, *added)]
        return [events.ThreadSeen(quiet_at, since, 0, 0, 0, 0), events.ThreadSeen(at, quiet_at, *added)]

    def _read_counts(self) -> _ThreadCounts:
        scheduled, stat = self._files
        ran, waited, *_ = os.pread(scheduled, _MAX_READ_BYTES, 0).split()
        fields = os.pread(stat, _MAX_READ_BYTES, 0).rpartition(b")")[2].split(None, _SYSTEM + 1)
        return _ThreadCounts(int(ran), int(waited), int(fields[_SYSTEM]) * _TICK_NS, int(fields[_FAULTS]))

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = []


class EngineThreadProbe:
    """The threads of all engines. Where the kernel says nothing of them it is silent."""

    def __init__(self, proc: Path = Path("/proc"), now: Callable[[], int] = _clock.now) -> None:
        self._proc, self._now = proc, now
        self._threads: dict[ThreadIds, _ThreadFiles | None] = {}
        self._rescanned_at = 0

    def read_events(self, threads: Callable[[], Iterable[ThreadIds]]) -> list[events.RecordedEvent]:
        """What was added since the last look."""
        now = self._now()
        if now - self._rescanned_at >= RESCAN_INTERVAL_NS:
            self._rescanned_at = now
            self._update_threads(list(threads()))
        said: list[events.RecordedEvent] = []
        for thread, watched in self._threads.items():
            if watched is None:
                continue
            try:
                seen = watched.read_samples(self._now)
            except (OSError, ValueError, IndexError):  # it has ended
                watched.close()
                self._threads[thread] = None
                continue
            said += [events.RecordedEvent(thread[0], 0, one) for one in seen]
        return said

    def close(self) -> None:
        """Lets go of all files."""
        self._update_threads([])

    def _update_threads(self, here: list[ThreadIds]) -> None:
        known = self._threads
        self._threads = {
            thread: known.pop(thread) if thread in known else self._open_thread(thread) for thread in here
        }
        for watched in known.values():
            if watched is not None:
                watched.close()

    def _open_thread(self, thread: ThreadIds) -> _ThreadFiles | None:
        _, pid, own_pid, own_thread = thread
        tasks = self._proc / str(pid) / "task"
        number = own_thread if pid == own_pid else self._resolve_thread_id(tasks, own_thread)
        try:
            return _ThreadFiles(tasks / str(number), self._now()) if number else None
        except (OSError, ValueError, IndexError):
            return None

    @staticmethod
    def _resolve_thread_id(tasks: Path, own: int) -> int:
        """The thread that its own namespace knows by this number (`NSpid` of proc_pid_status(5)); 0 = none."""
        try:
            for status in tasks.glob("*/status"):
                for line in status.read_text(encoding="utf-8", errors="replace").splitlines():
                    if line.startswith("NSpid:") and line.split()[-1] == str(own):
                        return int(status.parent.name)
        except OSError:
            pass
        return 0
