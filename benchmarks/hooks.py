"""What one step costs on the engine's thread: hooked functions against the same functions bare, at 256 sequences.

CPU time of the thread, in each round pinned to the core that is the fastest just then; cases and their variants take turns in every round. What the engine does to
its own lists is in the bare variant too, and so is subtracted. The control is the bare variant against itself, as a share
of the gate; beside it stands the pace of the machine, since a gate in µs is missed by anybody while a neighbour has half of
the core.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from benchmarks import machine, own_list, transformers_hooks
from benchmarks.hook_cases import Case, Steps
from benchmarks.verdict import CONTROL_LIMIT, Control, Gate, Line, line, median
from otel_infer.instrumentation.hooks import probe

BEST_PERCENTILE = 2


class Found(NamedTuple):
    """ns a step of each round; `pace`: of a fixed piece of Python beside it."""

    bare: list[float]
    hooked: list[float]
    again: list[float]
    pace: list[float]


def measure(quick: bool) -> list[Line]:
    """All cases take turns, so that each has seen the same moods of the machine."""
    steps, rounds = (50, 7) if quick else (500, 101)
    everywhere = os.sched_getaffinity(0)
    cases = list(_cases())
    found = {case.claim: Found([], [], [], []) for case in cases}
    chance = random.Random(1)
    for case in cases:
        _round(case, steps, Found([], [], [], []), chance)
    for _ in range(rounds):
        machine.pin_this_thread(machine.fastest(everywhere))
        for case in chance.sample(cases, len(cases)):
            _round(case, steps, found[case.claim], chance)
    if probe.count_errors():
        raise RuntimeError("a hook raised and was disabled: nothing was measured")
    best = float(np.percentile([pace for one in found.values() for pace in one.pace], BEST_PERCENTILE))
    return [_line(case, found[case.claim], best) for case in cases]


def _cases() -> Iterator[Case]:

    batch = transformers_hooks.batch_of_all()
    own_list.record_in_memory()
    yield from own_list.cases()
    yield from transformers_hooks.cases(*batch)


def _round(case: Case, steps: int, found: Found, chance: random.Random) -> None:
    """Bare, hooked and bare again, in an order drawn anew, and how fast the machine was meanwhile."""
    variants = (case.bare, case.hooked, case.bare)
    for kind in chance.sample(range(3), 3):
        case.before(steps)
        found[kind].append(_cpu_ns(variants[kind], steps))
    found.pace.append(machine.pace())


def _line(case: Case, found: Found, best: float) -> Line:
    bare, hooked, again, pace = found
    cost = median([on - (one + other) / 2 for on, one, other in zip(hooked, bare, again)])
    note = f"bare {median(bare).value / 1000:.2f} µs, hooked {min(hooked) / 1000:.2f} to {max(hooked) / 1000:.2f} µs"
    if case.gate_ns is None:
        return line(case.claim, "µs", cost.scaled(1 / 1000), note=note)
    share = median([other - one for one, other in zip(bare, again)]).value / case.gate_ns
    slower = median(pace).value / best - 1
    said = f"{share * 100:+.2f} %, machine {slower * 100:+.0f} %"
    # Passed on a slow machine is passed; failed there says something only if it would be at the machine's own best.
    told = cost.high <= case.gate_ns or cost.value / (1 + slower) > case.gate_ns
    control = Control(said, abs(share) <= CONTROL_LIMIT and told)
    return line(case.claim, "µs", cost.scaled(1 / 1000), Gate(case.gate_ns / 1000), control, note)


def _cpu_ns(steps_of: Steps, steps: int) -> float:
    gc.disable()
    began = time.thread_time_ns()
    steps_of(steps)
    taken = time.thread_time_ns() - began
    gc.enable()
    return taken / steps
