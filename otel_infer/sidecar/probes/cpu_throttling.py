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
LOOK_NS = 100_000_000
"""The period over which quotas are counted, if nobody has set another."""
EARLY_NS = 5_000_000
"""Who wakes as often does not come to look to the µs: what is so much too soon is in time."""
RENEW_NS = 250_000_000
"""How often it is asked which processes there are."""
STAT = "cpu.stat"
_MOST = 4096
_UNITS_NS = {"throttled_usec": 1000, "throttled_time": 1}
"""The names of version 2 and version 1."""


def throttled_ns(stat: str) -> int | None:
    """What a `cpu.stat` says was spent throttled in all; None if it does not say, as that of the root of version 2."""
    for line in stat.splitlines():
        name, _, value = line.partition(" ")
        if name in _UNITS_NS and value.strip().isdecimal():
            return int(value) * _UNITS_NS[name]
    return None


def stat_files(memberships: str, ours: str, mount: Path) -> tuple[Path, ...]:
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
    return tuple(file for file in found if _read(file) is not None)


def _read(file: Path) -> int | None:
    try:
        return throttled_ns(file.read_text(encoding="ascii", errors="replace"))
    except OSError:
        return None


class _Group:
    """The groups that a process is in, as they were at the last look; their files stay open."""

    def __init__(self, files: tuple[Path, ...], at: int) -> None:
        self._readings: dict[int, int | None] = {}
        self._looked_at = at
        for file in files:
            try:
                descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # it went away in between
                continue
            self._readings[descriptor] = _read_open(descriptor)

    def look(self, now: Callable[[], int]) -> tuple[int, int]:
        """(instant of this look, ns throttled since the last one)."""
        grown = 0
        for descriptor, before in self._readings.items():
            reading = _read_open(descriptor)
            if reading is not None:
                grown = max(grown, reading - (reading if before is None else before))
                self._readings[descriptor] = reading
        at = now()
        window, self._looked_at = at - self._looked_at, at
        return at, min(grown, window)

    def close(self) -> None:
        for descriptor in self._readings:
            os.close(descriptor)
        self._readings = {}


def _read_open(descriptor: int) -> int | None:
    try:
        return throttled_ns(os.pread(descriptor, _MOST, 0).decode("ascii", "replace"))
    except OSError:
        return None


class Throttling:
    """Looks at most every 100 ms. Where there are no control groups it is silent, and has nothing to look at."""

    def __init__(
        self,
        proc: Path = Path("/proc"),
        mount: Path = Path("/sys/fs/cgroup"),
        now: Callable[[], int] = _clock.now,
    ) -> None:
        self._proc, self._mount, self._now = proc, mount, now
        self._files: dict[int, tuple[Path, ...]] = {}
        self._groups: dict[tuple[Path, ...], _Group] = {}
        self._looked_at = self._renewed_at = 0

    def look(self, processes: Callable[[], Iterable[tuple[int, int]]]) -> list[events.RingFact]:
        """What was added since the last look. `processes`: (ring, pid as seen from here) of those that live."""
        now = self._now()
        if now - self._looked_at < LOOK_NS - EARLY_NS:
            return []
        self._looked_at = now
        if now - self._renewed_at >= RENEW_NS:
            self._renewed_at = now
            self._renew(dict(processes()))
        said = []
        for files, group in self._groups.items():
            at, length = group.look(self._now)
            seen = events.PauseSeen(at, at - length, CAUSE)
            held_up = [ring for ring, its in self._files.items() if its == files and length]
            said += [events.RingFact(ring, 0, seen) for ring in held_up]
        return said

    def close(self) -> None:
        """Lets go of all files."""
        self._renew({})

    def _renew(self, here: dict[int, int]) -> None:
        known, before = self._files, self._groups
        self._files = {ring: known[ring] if ring in known else self._found(pid) for ring, pid in here.items()}
        groups = {files for files in self._files.values() if files}
        self._groups = {
            files: before.pop(files) if files in before else _Group(files, self._looked_at)
            for files in groups
        }
        for group in before.values():
            group.close()

    def _found(self, pid: int) -> tuple[Path, ...]:
        try:
            memberships, ours = (
                (self._proc / who / "cgroup").read_text(encoding="utf-8", errors="replace")
                for who in (str(pid), "self")
            )
        except OSError:
            return ()
        return stat_files(memberships, ours, self._mount)
