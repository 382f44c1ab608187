"""Detects steps that other machines on the same processor disturbed.

The other half of a core may be in use by another virtual machine, for seconds at a time. Then the caches are cold, and
1 µs of Python that runs every few ms takes 20 to 60 µs. Arithmetic takes up to twice as long. So a probe is timed after
each step: a few instructions of Python where the loop leaves the caches alone, and arithmetic where a model fills them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from benchmarks import machine


class Limit(NamedTuple):
    """An undisturbed probe takes at most `times` this percentile of all probes."""

    times: float
    percentile: float


LIMIT = Limit(2.5, 1)
"""For `time_probe`, relative to the fastest probes."""
PACE_LIMIT = Limit(1.25, 50)
"""For `time_arithmetic`, relative to the usual time: the clock of a processor changes for minutes, which disturbs no
single step. Disturbed times are about one and a half of it."""
MAX_WAIT_S = 30.0
_ADDITIONS = 3000
_WAIT_S = 0.0035
_PROBES = 9


def time_probe() -> int:
    """Returns the time (ns) of an addition of fractions: 2 µs if undisturbed."""
    began = time.perf_counter_ns()
    Fraction(22, 7) + Fraction(1, 5)
    return time.perf_counter_ns() - began


def time_arithmetic() -> int:
    """Returns the time (ns) of 0.1 ms of arithmetic."""
    began, total = time.perf_counter_ns(), 0
    for number in range(_ADDITIONS):
        total += number * number
    return time.perf_counter_ns() - began


def compute_limit(probes: Sequence[int] | np.ndarray, limit: Limit = LIMIT) -> float:
    """Returns the longest time of an undisturbed probe, in the unit of `probes`."""
    return float(limit.times * np.percentile(probes, limit.percentile))


def wait_until_undisturbed(core: set[int]) -> None:
    """Waits until the caches of this core are undisturbed, at most `MAX_WAIT_S`."""
    before, until = machine.read_allowed_cores(), time.monotonic() + MAX_WAIT_S
    machine.pin_this_thread(core)
    fastest = min(time_probe() for _ in range(_PROBES))
    while float(np.median([_probe_after_wait() for _ in range(_PROBES)])) > LIMIT.times * fastest:
        if time.monotonic() > until:
            break
    machine.pin_this_thread(before)


def _probe_after_wait() -> int:
    until = time.perf_counter() + _WAIT_S
    while time.perf_counter() < until:
        pass
    return time_probe()
