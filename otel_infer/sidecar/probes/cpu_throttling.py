"""How long the CPU quota of its control group held up a process of the server, seen from beside it. Linux.

    /proc/PID/cgroup ─▶ cpu.stat of its group and of those above ─▶ throttled time that was added since the last look

The kernel says a sum, and says it when a throttling is over. So what is stated is an interval of that length, up to the
look, and never longer than the time since the look before. Its error: the throttling was up to that much earlier; where
several CPUs were throttled at once their times are added up, so it was up to as many times shorter; of one that began
before the last look no more is said than fits. The quotas of a group and of those above it may hold it up at the same
time: the largest is what is known.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

from otel_infer import _clock
from otel_infer.ringbuffer import events

CAUSE = "throttled"
SAMPLE_INTERVAL_NS = 100_000_000
"""The period over which quotas are counted, if nobody has set another."""
EARLY_TOLERANCE_NS = 5_000_000
"""Who wakes as often does not come to look to the µs: what is so much too soon is in time."""
RESCAN_INTERVAL_NS = 250_000_000
"""How often it is asked which processes there are."""
STAT = "cpu.stat"
_MAX_READ_BYTES = 4096
_UNITS_NS = {"throttled_usec": 1000, "throttled_time": 1}
"""The names of version 2 and version 1."""


def parse_throttled_ns(stat: str) -> int | None:
    """What a `cpu.stat` says was spent throttled in all; None if it does not say, as that of the root of version 2."""
    for line in stat.splitlines():
        name, _, value = line.partition(" ")
        if name in _UNITS_NS and value.strip().isdecimal():
            return int(value) * _UNITS_NS[name]
    return None


def find_stat_files(memberships: str, ours: str, mount: Path) -> tuple[Path, ...]:
    """The files that say it of a process with these memberships (`/proc/PID/cgroup`), its own group first.

    `ours`: the memberships of the reader. In a container the path may be the host's, and what is mounted this container
    alone: that is the right one for whoever is in the same group as we are.
    """
    found: list[Path] = []
    for line in memberships.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        group = PurePosixPath(path)
        if number == "0" and not controllers:
            base = mount
        elif "cpu" in controllers.split(","):
            base = mount / "cpu"
        else:
            continue
        if not group.is_absolute() or ".." in group.parts:  # outside of what can be seen from here
            continue
        if (base / path.lstrip("/")).is_dir():
            found += [base / str(level).lstrip("/") / STAT for level in (group, *group.parents)]
        elif memberships == ours:
            found.append(base / STAT)
    return tuple(file for file in found if _read_throttled_ns(file) is not None)


def _read_throttled_ns(file: Path) -> int | None:
    try:
        return parse_throttled_ns(file.read_text(encoding="ascii", errors="replace"))
    except OSError:
        return None


class _CgroupStats:
    """The groups that a process is in, as they were at the last look; their files stay open."""

    def __init__(self, files: tuple[Path, ...], at: int) -> None:
        self._readings: dict[int, int | None] = {}
        self._sampled_at = at
        for file in files:
            try:
                descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # it went away in between
                continue
            self._readings[descriptor] = _read_descriptor(descriptor)

    def read_throttling(self, now: Callable[[], int]) -> tuple[int, int]:
        """(instant of this look, ns throttled since the last one)."""
        grown = 0
        for descriptor, before in self._readings.items():
            reading = _read_descriptor(descriptor)
            if reading is not None:
                grown = max(grown, reading - (reading if before is None else before))
                self._readings[descriptor] = reading
        at = now()
        window, self._sampled_at = at - self._sampled_at, at
        return at, min(grown, window)

    def close(self) -> None:
        for descriptor in self._readings:
            os.close(descriptor)
        self._readings = {}


def _read_descriptor(descriptor: int) -> int | None:
    try:
        return parse_throttled_ns(os.pread(descriptor, _MAX_READ_BYTES, 0).decode("ascii", "replace"))
    except OSError:
        return None


class CpuThrottlingProbe:
    """Looks at most every 100 ms. Where there are no control groups it is silent, and has nothing to look at."""

    def __init__(
        self,
        proc: Path = Path("/proc"),
        mount: Path = Path("/sys/fs/cgroup"),
        now: Callable[[], int] = _clock.now,
    ) -> None:
        self._proc, self._mount, self._now = proc, mount, now
        self._files: dict[int, tuple[Path, ...]] = {}
        self._groups: dict[tuple[Path, ...], _CgroupStats] = {}
        self._sampled_at = self._rescanned_at = 0

    def read_events(self, processes: Callable[[], Iterable[tuple[int, int]]]) -> list[events.RecordedEvent]:
        """What was added since the last look. `processes`: (ring, pid as seen from here) of those that live."""
        now = self._now()
        if now - self._sampled_at < SAMPLE_INTERVAL_NS - EARLY_TOLERANCE_NS:
            return []
        self._sampled_at = now
        if now - self._rescanned_at >= RESCAN_INTERVAL_NS:
            self._rescanned_at = now
            self._update_groups(dict(processes()))
        said = []
        for files, group in self._groups.items():
            at, length = group.read_throttling(self._now)
            seen = events.PauseSeen(at, at - length, CAUSE)
            held_up = [ring for ring, its in self._files.items() if its == files and length]
            said += [events.RecordedEvent(ring, 0, seen) for ring in held_up]
        return said

    def close(self) -> None:
        """Lets go of all files."""
        self._update_groups({})

    def _update_groups(self, here: dict[int, int]) -> None:
        known, before = self._files, self._groups
        self._files = {
            ring: known[ring] if ring in known else self._find_stat_files(pid) for ring, pid in here.items()
        }
        groups = {files for files in self._files.values() if files}
        self._groups = {
            files: before.pop(files) if files in before else _CgroupStats(files, self._sampled_at)
            for files in groups
        }
        for group in before.values():
            group.close()

    def _find_stat_files(self, pid: int) -> tuple[Path, ...]:
        try:
            memberships, ours = (
                (self._proc / who / "cgroup").read_text(encoding="utf-8", errors="replace")
                for who in (str(pid), "self")
            )
        except OSError:
            return ()
        return find_stat_files(memberships, ours, self._mount)
