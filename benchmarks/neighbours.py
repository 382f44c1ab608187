"""Who has the other half of the processor's core: on a virtual machine others may, in seconds of this and seconds of that.

While they work, the core's caches fill with what is theirs, and a µs of Python that comes once in some ms costs 20 to 60 µs;
and whatever computes takes up to twice as long. What a hook costs then says who the neighbours are. So after every step
of a loop a probe, which has nothing to do with what is measured, says whether that step was disturbed: a bit of Python
where a loop leaves the caches alone, some arithmetic where its own model fills them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from benchmarks import machine


class Limit(NamedTuple):
    """How many times as long as this percentile of all of them a probe may take after a step that is called undisturbed."""

    times: float
    percentile: float


LIMIT = Limit(2.5, 1)
"""Of `probe`: of its best."""
PACE_LIMIT = Limit(1.25, 50)
"""Of `pace`: of its usual one, since a processor's clock changes for minutes, which disturbs no single step. Its values lie
around one time and around one and a half."""
PATIENCE_S = 30.0
_ADDED = 3000
_WAIT_S = 0.0035
_TIMES = 9


def probe() -> int:
    """What the bit of Python takes just now, ns; 2 µs where nobody disturbs."""
    began = time.perf_counter_ns()
    Fraction(22, 7) + Fraction(1, 5)
    return time.perf_counter_ns() - began


def pace() -> int:
    """What a tenth of a ms of arithmetic takes just now, ns."""
    began, total = time.perf_counter_ns(), 0
    for number in range(_ADDED):
        total += number * number
    return time.perf_counter_ns() - began


def undisturbed_below(probes: Sequence[int] | np.ndarray, limit: Limit = LIMIT) -> float:
    """What the probe takes at most after an undisturbed step, by all the probes of one measurement, in their unit."""
    return float(limit.times * np.percentile(probes, limit.percentile))


def wait_until_undisturbed(core: set[int]) -> None:
    """Returns when that core's caches stay ours for a while, or after `PATIENCE_S`."""
    before, until = machine.allowed(), time.monotonic() + PATIENCE_S
    machine.pin_this_thread(core)
    best = min(probe() for _ in range(_TIMES))
    while float(np.median([_after_a_wait() for _ in range(_TIMES)])) > LIMIT.times * best:
        if time.monotonic() > until:
            break
    machine.pin_this_thread(before)


def _after_a_wait() -> int:
    until = time.perf_counter() + _WAIT_S
    while time.perf_counter() < until:
        pass
    return probe()
