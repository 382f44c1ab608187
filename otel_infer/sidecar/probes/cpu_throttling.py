"""Reads how long the CPU quota of its control group throttled a process, from outside the process. Linux.

    /proc/PID/cgroup ─▶ cpu.stat of its group and its ancestors ─▶ throttled time added since the last reading

The kernel reports a sum, and only after a throttling has ended. The recorded event is therefore an interval
of that length that ends at the reading. It is never longer than the time since the reading before.

The interval has these errors. The throttling happened up to that much earlier. Where several CPUs were
throttled together their times are added, so the real interval was up to as many times shorter. A throttling
that began before the last reading is cut to the time since then.

Quotas of a group and of its ancestors may throttle at the same time. The largest value is used.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

from otel_infer import _clock, semconv
from otel_infer.ringbuffer import events

SAMPLE_INTERVAL_NS = 100_000_000
"""The default period of CPU quotas."""
EARLY_TOLERANCE_NS = 5_000_000
"""Tolerance for a wake-up before the due time, because wake-ups are not exact to the µs."""
RESCAN_INTERVAL_NS = 250_000_000
"""Time between look-ups of the server's processes."""
STAT = "cpu.stat"
QUOTAS = "cpu.max", "cpu.cfs_quota_us"
"""Names of the quota of a group in cgroup version 2 and version 1."""
_UNLIMITED = b"max", b"-1"
_MAX_READ_BYTES = 4096
_UNITS_NS = {"throttled_usec": 1000, "throttled_time": 1}
"""Field names of cgroup version 2 and version 1, with their units in ns."""


def parse_throttled_ns(stat: str) -> int | None:
    """Returns the total throttled time of a `cpu.stat`, ns; None where absent (root of version 2)."""
    for line in stat.splitlines():
        name, _, value = line.partition(" ")
        if name in _UNITS_NS and value.strip().isdecimal():
            return int(value) * _UNITS_NS[name]
    return None


def find_stat_files(memberships: str, own: str, mount: Path) -> tuple[Path, ...]:
    """Returns the `cpu.stat` files for a process with these memberships, its own group first.

    Memberships are the text of `/proc/PID/cgroup`; `own` is the reader's. In a container the path may be the
    host's, while the mount shows this container only. The mount itself is then right for a process in the
    reader's own group.
    """
    candidates: list[Path] = []
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
        if not group.is_absolute() or ".." in group.parts:  # outside the hierarchy that is visible here
            continue
        if (base / path.lstrip("/")).is_dir():
            candidates += [base / str(level).lstrip("/") / STAT for level in (group, *group.parents)]
        elif memberships == own:
            candidates.append(base / STAT)
    return tuple(file for file in candidates if _read_throttled_ns(file) is not None)


def _read_throttled_ns(file: Path) -> int | None:
    try:
        return parse_throttled_ns(file.read_text(encoding="ascii", errors="replace"))
    except OSError:
        return None


class _CgroupStats:
    """Groups of a process, with their values at the last reading; their files stay open.

    `may_throttle`: one of them had a quota at one of the last two `read_quotas`. Without a quota their values do
    not change.
    """

    def __init__(self, files: tuple[Path, ...], at: int) -> None:
        self._readings: dict[int, int | None] = {}
        self._quotas: list[int] = []
        self._sampled_at = at
        self.may_throttle = self._has_quota = True
        for file in files:
            try:
                descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # removed meanwhile
                continue
            self._readings[descriptor] = _read_descriptor(descriptor)
            for name in QUOTAS:
                with contextlib.suppress(OSError):
                    self._quotas.append(os.open(file.with_name(name), os.O_RDONLY | os.O_CLOEXEC))

    def read_quotas(self, now: int) -> None:
        """Determines whether there is a quota, which may be set at any time; so it is where that is unknown."""
        had_quota, self._has_quota = self._has_quota, len(self._quotas) < len(self._readings)
        for descriptor in self._quotas:
            with contextlib.suppress(OSError):
                is_unlimited = os.pread(descriptor, _MAX_READ_BYTES, 0).startswith(_UNLIMITED)
                self._has_quota = self._has_quota or not is_unlimited
        self.may_throttle = had_quota or self._has_quota
        if not self.may_throttle:
            self._sampled_at = now

    def read_throttling(self, now: Callable[[], int]) -> tuple[int, int]:
        """Returns (instant of this reading, ns throttled since the last one)."""
        added = 0
        for descriptor, previous in self._readings.items():
            reading = _read_descriptor(descriptor)
            if reading is not None:
                added = max(added, reading - (reading if previous is None else previous))
                self._readings[descriptor] = reading
        at = now()
        window, self._sampled_at = at - self._sampled_at, at
        return at, min(added, window)

    def close(self) -> None:
        for descriptor in (*self._readings, *self._quotas):
            os.close(descriptor)
        self._readings, self._quotas = {}, []


def _read_descriptor(descriptor: int) -> int | None:
    try:
        return parse_throttled_ns(os.pread(descriptor, _MAX_READ_BYTES, 0).decode("ascii", "replace"))
    except OSError:
        return None


class CpuThrottlingProbe:
    """Probe that reads at most every 100 ms; without control groups it returns nothing."""

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

    def read_events(
        self, processes: Callable[[], Iterable[tuple[int, int]]], is_idle: bool = False
    ) -> list[events.RecordedEvent]:
        """Returns the throttling since the last reading.

        `processes` returns (ring, pid as seen from here) of the living processes. `is_idle`: nothing was recorded
        for seconds, so there are no new processes or quotas to look for.
        """
        if is_idle and not any(group.may_throttle for group in self._groups.values()):
            return []
        now = self._now()
        if now - self._sampled_at < SAMPLE_INTERVAL_NS - EARLY_TOLERANCE_NS:
            return []
        self._sampled_at = now
        if now - self._rescanned_at >= RESCAN_INTERVAL_NS:
            self._rescanned_at = now
            self._update_groups(dict(processes()))
            for group in self._groups.values():
                group.read_quotas(now)
        recorded = []
        for files, group in self._groups.items():
            if not group.may_throttle:
                continue
            at, length = group.read_throttling(self._now)
            pause = events.PauseSeen(at, at - length, semconv.CAUSE_THROTTLED)
            throttled = [ring for ring, stat_files in self._files.items() if stat_files == files and length]
            recorded += [events.RecordedEvent(ring, 0, pause) for ring in throttled]
        return recorded

    def close(self) -> None:
        """Closes all files."""
        self._update_groups({})

    def _update_groups(self, pids: dict[int, int]) -> None:
        known_files, previous = self._files, self._groups
        if pids.keys() == known_files.keys():
            return
        self._files = {
            ring: known_files[ring] if ring in known_files else self._find_stat_files(pid)
            for ring, pid in pids.items()
        }
        groups = {files for files in self._files.values() if files}
        self._groups = {
            files: previous.pop(files) if files in previous else _CgroupStats(files, self._sampled_at)
            for files in groups
        }
        for group in previous.values():
            group.close()

    def _find_stat_files(self, pid: int) -> tuple[Path, ...]:
        try:
            memberships, own = (
                (self._proc / process / "cgroup").read_text(encoding="utf-8", errors="replace")
                for process in (str(pid), "self")
            )
        except OSError:
            return ()
        return find_stat_files(memberships, own, self._mount)
