"""Blocks of steps, hooked and bare in turn, and what follows from them.

A step which others disturbed says who the `neighbours` are, so gates are about the undisturbed ones, and the figure of all
stands beside it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from benchmarks import neighbours
from benchmarks.verdict import (
    CONTROL_LIMIT,
    Control,
    Figure,
    Gate,
    Line,
    against_itself,
    all_of,
    line,
    quantile_ratio,
    times_less,
)

P50_LIMIT, P99_LIMIT, STOCK_FACTOR = 1.0, 2.0, 100.0
"""The gates: % of p50, % of p99, and how many times less than the stock SDK."""
STOCK_PRECISION = 20
"""What the stock SDK adds must be known to one part in so many."""
PATIENCE = 3
"""How many times as many rounds as wanted are run, at most, until enough steps were undisturbed."""
LEAST = 5
"""Undisturbed steps that each block of a round must have."""
MOSTLY, ENOUGH = 0.8, 0.5
"""Of the steps of the wanted rounds, the share of undisturbed ones with which it is done, and without which nothing is said."""
ALIKE = 0.25
"""How much rarer undisturbed steps may be under the hooks, as a share, before they are no longer the same ones."""


class Block(NamedTuple):
    """Steps in order, ns each: by the clock on the wall, CPU time of the thread that ran them, and the probe of `neighbours`
    right after each, which may be in multiples of its usual time (1 where nobody asked)."""

    wall: np.ndarray
    cpu: np.ndarray
    probe: np.ndarray


class Rounds(NamedTuple):
    """One block of each kind per round: bare, hooked, and bare again as the control."""

    bare: list[Block]
    hooked: list[Block]
    again: list[Block]

    def undisturbed(self, limit: neighbours.Limit = neighbours.LIMIT) -> Rounds:
        """The steps whose probe took no longer than that, of the rounds that have some in each block."""
        probes = np.concatenate([block.probe for kind in self for block in kind])
        most = neighbours.undisturbed_below(probes, limit)
        kept = [
            [Block(*(column[block.probe <= most] for column in block)) for block in kind] for kind in self
        ]
        rounds = [blocks for blocks in zip(*kept) if min(len(block.probe) for block in blocks) >= LEAST]
        return Rounds(*([blocks[kind] for blocks in rounds] for kind in range(3)))

    def steps(self) -> list[int]:
        """How many there are, bare, hooked and bare again."""
        return [sum(len(block.probe) for block in kind) for kind in self]

    def share(self, quiet: Rounds, wanted: int) -> float:
        """How many of the steps that so many rounds have these undisturbed ones are, of the kind that has fewest."""
        return min(quiet.steps()) / (wanted * len(self.bare[0].probe))

    def is_enough(self, wanted: int) -> bool:
        """Whether it is done: so many rounds, and of their steps enough were undisturbed."""
        return len(self.bare) >= wanted and self.share(self.undisturbed(), wanted) >= MOSTLY

    def judged(self, wanted: int, limit: neighbours.Limit = neighbours.LIMIT) -> tuple[Rounds, Control]:
        """What the gates are about: the undisturbed steps, or all where those are too few to say anything."""
        quiet = self.undisturbed(limit)
        bare, hooked, _ = (few / all_ for few, all_ in zip(quiet.steps(), self.steps()))
        said = f"{bare:.0%} of the steps undisturbed, hooked {hooked:.0%}"
        enough = self.share(quiet, wanted) >= ENOUGH
        return quiet if enough else self, Control(said, enough and hooked >= (1 - ALIKE) * bare)


Figures = tuple[Figure, Figure, Figure, Figure]
"""p50 and its control, p99 and its control, as shares."""


class Hooked(Protocol):
    """Something that can be put on an engine and taken off again, both outside the time that is measured."""

    def put_on(self) -> None: ...

    def take_off(self) -> None: ...


def run_steps(step: Callable[[], None], count: int) -> Block:
    """So many steps, each timed, and after each the probe."""
    columns = np.empty((3, count), np.int64)
    for i in range(count):
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        step()
        cpu = time.thread_time_ns() - cpu
        columns[:, i] = time.perf_counter_ns() - wall, cpu, neighbours.probe()
    return Block(*columns)


def alternating(
    run: Callable[[], Block],
    hooks: Hooked,
    rounds: int,
    after: Callable[[], None] | None = None,
    patience: int = PATIENCE,
) -> Rounds:
    """Rounds of three blocks in an order drawn anew for each: so many, and more until enough was undisturbed, or patience ends.

    The hooks go on before every block, and off again before a bare one, so that all blocks begin alike; `after` is called
    after each hooked one.
    """
    chance, found = random.Random(1), Rounds([], [], [])
    while len(found.bare) < patience * rounds:
        for kind in chance.sample(range(3), 3):
            hooks.put_on()
            if kind != 1:
                hooks.take_off()
            found[kind].append(run())
            if kind == 1:
                hooks.take_off()
                if after is not None:
                    after()
        if found.is_enough(rounds):
            break
    return found


def overhead(rounds: Rounds, clock: str) -> Figures:
    """By this clock, as shares: p50 and its control, p99 and its control.

    The machine's own pace changes from one second to the next, by more than hooks cost. So each step counts as a multiple of
    the median step of a bare block of its round: a hooked one of each, a bare one of the other. If hooks cost nothing, both
    are the same then, however pace is distributed; all rounds are taken together.
    """
    bare, hooked, again = ([getattr(block, clock) for block in kind] for kind in rounds)
    on, one, other = [], [], []
    for first, between, last in zip(bare, hooked, again):
        usual, usual_again = np.median(first), np.median(last)
        on.append(np.concatenate([between / usual, between / usual_again]))
        one.append(first / usual_again)
        other.append(last / usual)
    off = [np.concatenate(pair) for pair in zip(one, other)]
    p50, p99 = (quantile_ratio(on, off, percent) for percent in (50, 99))
    p50_control, p99_control = (quantile_ratio(other, one, percent) for percent in (50, 99))
    return p50, p50_control, p99, p99_control


def lines_of(
    loop: str, ours: Rounds, wanted: int, stock: Rounds, limit: neighbours.Limit = neighbours.LIMIT
) -> list[Line]:
    """The rows of one loop: p50 and p99 by CPU time and by the wall clock, and against the stock SDK.

    Slower is a loop by the wall clock: the thread in which the stock SDK exports takes the GIL, not the engine's CPU time.
    """
    found = []
    judged, undisturbed = ours.judged(wanted, limit)
    for clock, said in (("cpu", "CPU time"), ("wall", "wall clock")):
        figures = overhead(judged, clock)
        note = f"bare p50 {_p50(judged.bare, clock):.0f} µs, hooked {_p50(judged.hooked, clock):.0f} µs"
        found += gated(loop, said, figures, undisturbed, note)
        everything = overhead(ours, clock)
        found.append(line(f"{loop}: p50, {said}, disturbed steps too", "%", everything[0].scaled(100)))
        theirs, their_control, _, _ = overhead(stock, clock)
        theirs_off = against_itself(their_control, max(CONTROL_LIMIT, theirs.value / STOCK_PRECISION))
        p50, p50_control, *_ = figures
        controls = [against_itself(p50_control), theirs_off]
        gate = Gate(STOCK_FACTOR, at_least=True) if clock == "wall" else None
        found.append(_against_stock(loop, said, p50, theirs, gate, all_of(*controls, undisturbed)))
    return found


def gated(claim: str, said: str, figures: Figures, undisturbed: Control, note: str = "") -> list[Line]:
    """p50 and p99 of the steps by one clock; a control may be off by half of the gate."""
    p50, p50_control, p99, p99_control = figures
    return [
        line(
            f"{claim}: {which}, {said}",
            "%",
            figure.scaled(100),
            Gate(limit),
            all_of(against_itself(control, limit / 200), undisturbed),
            note,
        )
        for which, limit, figure, control in (
            ("p50", P50_LIMIT, p50, p50_control),
            ("p99", P99_LIMIT, p99, p99_control),
        )
    ]


def _against_stock(
    loop: str, said: str, ours: Figure, theirs: Figure, gate: Gate | None, control: Control
) -> Line:
    note = f"stock p50 {theirs.value * 100:+.0f} % [{theirs.low * 100:.0f}, {theirs.high * 100:.0f}]"
    claim = f"{loop}: less than the stock SDK, {said}"
    return line(claim, "×", times_less(ours, theirs), gate, control, note)


def _p50(blocks: list[Block], clock: str) -> float:
    return float(np.median(np.concatenate([getattr(block, clock) for block in blocks]))) / 1000
