"""Measures a step on the engine's thread: hooked functions against the same functions bare, with 256 sequences.

CPU time of the thread, pinned in each round to the fastest core. Cases and variants take turns in random order. The engine's own work
on its lists is in both variants. The control is bare against bare, as a share of the gate. The pace of the machine is listed beside
it, because a gate in µs is missed while another machine uses half of the core.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from benchmarks import machine, own_list, queue_hooks, transformers_hooks
from benchmarks.hook_cases import Case, Steps
from benchmarks.verdict import CONTROL_LIMIT, Control, Gate, Line, estimate_median, make_line
from otel_infer.instrumentation.hooks import probe

BEST_PERCENTILE = 2
SMALL_DIFFERENCE_NS = 20
"""Difference of the bare runs that is too large a share of a gate of 0.2 µs, and changes nothing where the gate is kept by more."""


class Samples(NamedTuple):
    """ns per step of each round; `pace`: of a fixed piece of Python beside it."""

    bare: list[float]
    hooked: list[float]
    again: list[float]
    pace: list[float]


def measure(quick: bool) -> list[Line]:
    """Measures all cases in turn, so that changes of the machine affect all of them alike."""
    steps, rounds = (50, 7) if quick else (500, 101)
    cores = os.sched_getaffinity(0)
    cases = list(_make_cases())
    samples = {case.claim: Samples([], [], [], []) for case in cases}
    rng = random.Random(1)
    for case in cases:
        _measure_round(case, steps, Samples([], [], [], []), rng)
    for _ in range(rounds):
        machine.pin_this_thread(machine.find_fastest_core(cores))
        for case in rng.sample(cases, len(cases)):
            _measure_round(case, steps, samples[case.claim], rng)
    if probe.count_errors():
        raise RuntimeError("a hook raised and was disabled, so the measurement is invalid")
    paces = [pace for of_case in samples.values() for pace in of_case.pace]
    best = float(np.percentile(paces, BEST_PERCENTILE))
    return [make_case_line(case, samples[case.claim], best) for case in cases]


def _make_cases() -> Iterator[Case]:
    batch = transformers_hooks.prepare_batch()
    own_list.record_in_memory()
    yield from own_list.make_cases()
    yield from transformers_hooks.make_cases(*batch)
    yield from queue_hooks.make_cases()


def _measure_round(case: Case, steps: int, samples: Samples, rng: random.Random) -> None:
    """Runs bare, hooked and bare again in random order, and the machine's pace."""
    variants = (case.bare, case.hooked, case.bare)
    for kind in rng.sample(range(3), 3):
        case.before(steps)
        samples[kind].append(_measure_cpu_ns(variants[kind], steps))
    samples.pace.append(machine.measure_pace())


def make_case_line(case: Case, samples: Samples, best: float) -> Line:
    """Returns the row of a case. `best`: the machine's best pace, as in `Samples`."""
    bare, hooked, again, pace = samples
    cost = estimate_median([on - (first + second) / 2 for on, first, second in zip(hooked, bare, again)])
    note = f"bare {estimate_median(bare).value / 1000:.2f} µs, hooked {min(hooked) / 1000:.2f} to {max(hooked) / 1000:.2f} µs"
    if case.gate_ns is None:
        return make_line(case.claim, "µs", cost.scale_by(1 / 1000), note=note)
    difference = estimate_median([second - first for first, second in zip(bare, again)]).value
    share = difference / case.gate_ns
    slower = estimate_median(pace).value / best - 1
    text = f"{share * 100:+.2f} %, machine {slower * 100:+.0f} %"
    # A missed gate counts only if it would also be missed at the machine's best pace.
    conclusive = cost.high <= case.gate_ns or cost.value / (1 + slower) > case.gate_ns
    is_small = abs(difference) <= SMALL_DIFFERENCE_NS and cost.high + abs(difference) <= case.gate_ns
    is_equal = abs(share) <= CONTROL_LIMIT or is_small
    control = Control(text, is_equal and conclusive)
    return make_line(case.claim, "µs", cost.scale_by(1 / 1000), Gate(case.gate_ns / 1000), control, note)


def _measure_cpu_ns(run_steps: Steps, steps: int) -> float:
    gc.disable()
    began = time.thread_time_ns()
    run_steps(steps)
    taken = time.thread_time_ns() - began
    gc.enable()
    return taken / steps
