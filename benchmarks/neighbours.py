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

import numpy as np

from benchmarks import machine

LIMIT = 2.5
"""How many times as long as its best the probe may take after a step that is called undisturbed."""
BEST_PERCENTILE = 1
PATIENCE_S = 30.0
PACE_LIMIT = 1.25
"""The same for `pace`, whose values lie around one time and around one and a half."""
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


def undisturbed_below(probes: Sequence[int] | np.ndarray, limit: float = LIMIT) -> float:
    """ns: what the probe takes at most after an undisturbed step, by all the probes of one measurement."""
    return float(limit * np.percentile(probes, BEST_PERCENTILE))


def wait_until_undisturbed(core: set[int]) -> None:
    """Returns when that core's caches stay ours for a while, or after `PATIENCE_S`."""
    before, until = machine.allowed(), time.monotonic() + PATIENCE_S
    machine.pin_this_thread(core)
    best = min(probe() for _ in range(_TIMES))
    while float(np.median([_after_a_wait() for _ in range(_TIMES)])) > LIMIT * best:
        if time.monotonic() > until:
            break
    machine.pin_this_thread(before)


def _after_a_wait() -> int:
    until = time.perf_counter() + _WAIT_S
    while time.perf_counter() < until:
        pass
    return probe()
