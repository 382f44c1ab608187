"""One clock for the whole server: CLOCK_MONOTONIC, in integer nanoseconds.

Every instant in a fact is monotonic, because it is the same clock in every process of one machine and never steps.
Wall time enters once per request, as a pair of both clocks taken at arrival.
"""

from __future__ import annotations

import time

now = time.monotonic_ns
"""The current instant, monotonic ns."""


def wall_pair() -> tuple[int, int]:
    """The current instant on both clocks: (monotonic ns, unix ns), taken within a few hundred ns of each other."""
    before = time.monotonic_ns()
    wall = time.time_ns()
    return (before + time.monotonic_ns()) // 2, wall
