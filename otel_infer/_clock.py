"""One clock for the whole server: CLOCK_MONOTONIC, in integer nanoseconds.

Every instant in a fact is monotonic, because it is the same clock in every process of one machine and never steps.
Wall time enters once per request, as a pair of both clocks taken at arrival.
"""

from __future__ import annotations

import os
import time

now = time.monotonic_ns
"""The current instant, monotonic ns."""
wall_now = time.time_ns
"""The current instant, unix ns."""


def read_clocks() -> tuple[int, int]:
    """The current instant on both clocks: (monotonic ns, unix ns), taken within a few hundred ns of each other."""
    before = time.monotonic_ns()
    wall = time.time_ns()
    return (before + time.monotonic_ns()) // 2, wall


def read_process_start() -> int:
    """When this process began, monotonic ns, to 10 ms; 0 where the system does not say."""
    try:
        with open("/proc/self/stat", "rb") as stat:
            ticks = int(stat.read().rpartition(b")")[2].split()[19])
        since_boot = ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        # Since boot by the clock that goes on while the machine sleeps.
        started_at = now() - (time.clock_gettime_ns(time.CLOCK_BOOTTIME) - since_boot)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0
    return started_at if 0 < started_at <= now() else 0
