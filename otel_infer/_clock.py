"""The clock of the whole server: CLOCK_MONOTONIC, in integer nanoseconds.

Every instant of an event is monotonic, because all processes of a machine share this clock and it never
steps. Wall time is recorded once per request, as a pair of both clocks at its arrival.
"""

from __future__ import annotations

import operator
import os
import time
from typing import Any

now = time.monotonic_ns
"""Returns the current instant, monotonic ns."""
wall_now = time.time_ns
"""Returns the current instant, unix ns."""


def read_clocks() -> tuple[int, int]:
    """Returns the current instant on both clocks: (monotonic ns, unix ns), read within a few hundred ns of
    each other.
    """
    before = time.monotonic_ns()
    wall = time.time_ns()
    return (before + time.monotonic_ns()) // 2, wall


def read_process_start() -> int:
    """Returns when this process started, monotonic ns, with a resolution of 10 ms; 0 where the system does
    not report it.
    """
    try:
        with open("/proc/self/stat", "rb") as stat:
            ticks = int(stat.read().rpartition(b")")[2].split()[19])
        since_boot = ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        # The kernel counts from boot and includes suspend, as CLOCK_BOOTTIME does.
        started_at = now() - (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - since_boot)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0
    return started_at if 0 < started_at <= now() else 0


def wall_to_monotonic(wall_at: Any) -> int:
    """Returns the monotonic ns of a wall clock's ns; now, if it is no number or in the future."""
    now, wall_now = read_clocks()
    try:
        return min(now - (wall_now - operator.index(wall_at)), now)
    except TypeError:
        return now
