"""What one step costs on the engine's thread: hooked functions against the same functions bare, at 256 sequences.

CPU time of the thread, pinned to one core; the variants of a case take turns in every round. What the engine does to its
own lists is in the bare variant too, and so is subtracted. The control is the bare variant against itself, as a share of
the gate.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks import machine
from benchmarks.verdict import CONTROL_LIMIT, Control, Gate, Line, line, median

SEQUENCES = 256
UNCHANGED_NS, CHANGED_NS, DERIVED_NS, KEYFRAME_NS = 1000, 4000, 10_000, 10_000

Steps = Callable[[int], None]
"""Runs so many steps."""


class Case(NamedTuple):
    """One row: `hooked` against `bare`. `before` gets ready for so many steps, outside the time that is measured."""

    claim: str
    gate_ns: float | None
    bare: Steps
    hooked: Steps
    before: Callable[[int], None] = lambda steps: None


def measure(quick: bool) -> list[Line]:
    """The simulator's objects first, then transformers'."""
    steps, rounds = (200, 9) if quick else (1000, 61)
    mine, _ = machine.cores()
    machine.pin_this_thread(mine)
    return [timed(case, steps, rounds) for case in _cases()]


def _cases() -> Iterator[Case]:
    from benchmarks import simulated_hooks, transformers_hooks

    simulated_hooks.record_in_memory()
    yield from simulated_hooks.cases()
    yield from transformers_hooks.cases()


def timed(case: Case, steps: int, rounds: int) -> Line:
    """Every round runs bare, hooked and bare again, in an order of its own."""
    chance = random.Random(1)
    variants = (case.bare, case.hooked, case.bare)
    found: tuple[list[float], ...] = ([], [], [])
    for variant in variants:
        case.before(steps)
        variant(steps)
    for _ in range(rounds):
        for kind in chance.sample(range(3), 3):
            case.before(steps)
            found[kind].append(_cpu_ns(variants[kind], steps))
    bare, hooked, again = found
    cost = median([on - (one + other) / 2 for on, one, other in zip(hooked, bare, again)])
    off = median([other - one for one, other in zip(bare, again)]).value
    share = off / case.gate_ns if case.gate_ns else 0.0
    control = Control(f"{share * 100:+.2f} %", abs(share) <= CONTROL_LIMIT)
    gate = Gate(case.gate_ns / 1000) if case.gate_ns else None
    note = f"bare {median(bare).value / 1000:.2f} µs; rounds {min(hooked) / 1000:.2f} to {max(hooked) / 1000:.2f} µs hooked"
    return line(case.claim, "µs", cost.scaled(1 / 1000), gate, control if gate else None, note)


def _cpu_ns(steps_of: Steps, steps: int) -> float:
    gc.collect()
    gc.disable()
    began = time.thread_time_ns()
    steps_of(steps)
    taken = time.thread_time_ns() - began
    gc.enable()
    return taken / steps


def repeated(*functions: Callable[[], Any]) -> Steps:
    """Calls these one after another, so many times."""

    def run(steps: int) -> None:
        for _ in range(steps):
            for function in functions:
                function()

    return run
