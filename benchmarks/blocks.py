"""Runs blocks of steps with and without hooks in turn, and compares them.

The gates apply to steps that no other machine disturbed (`neighbours`). The figure of all steps is listed beside them.
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
    combine_controls,
    compare_percentiles,
    divide_figures,
    make_control,
    make_line,
)

P50_LIMIT, P99_LIMIT, STOCK_FACTOR = 1.0, 2.0, 100.0
"""Gates: % of p50, % of p99, and the factor below the stock SDK."""
STOCK_PRECISION = 20
"""The control of the stock SDK may be off by this fraction (1/20) of its cost."""
MAX_TIMES_ROUNDS = 3
"""Largest number of rounds, as a multiple of the wanted ones, until enough steps are undisturbed."""
MIN_UNDISTURBED = 5
"""Undisturbed steps that each block of a round must have."""
TARGET_SHARE, MIN_SHARE = 0.8, 0.5
"""Shares of undisturbed steps in the wanted rounds: the first ends the measurement, the second is needed for a verdict."""
MAX_LESS_UNDISTURBED = 0.25
"""How much rarer undisturbed steps may be with hooks, as a share, for a verdict."""


class Block(NamedTuple):
    """Steps in order, ns: wall clock, CPU time of their thread, and the probe of `neighbours` after each step. The probe may also be
    a multiple of its usual time."""

    wall: np.ndarray
    cpu: np.ndarray
    probe: np.ndarray


class Rounds(NamedTuple):
    """One block of each kind per round: bare, hooked, and a second bare one as the control."""

    bare: list[Block]
    hooked: list[Block]
    again: list[Block]

    def select_undisturbed(self, limit: neighbours.Limit = neighbours.LIMIT) -> Rounds:
        """Returns the undisturbed steps of the rounds that have enough of them in each block."""
        probes = np.concatenate([block.probe for kind in self for block in kind])
        longest = neighbours.compute_limit(probes, limit)
        kept = [
            [Block(*(column[block.probe <= longest] for column in block)) for block in kind] for kind in self
        ]
        rounds = [
            blocks for blocks in zip(*kept) if min(len(block.probe) for block in blocks) >= MIN_UNDISTURBED
        ]
        return Rounds(*([blocks[kind] for blocks in rounds] for kind in range(3)))

    def count_steps(self) -> list[int]:
        """Returns the numbers of steps of the three kinds."""
        return [sum(len(block.probe) for block in kind) for kind in self]

    def compute_share(self, undisturbed: Rounds, wanted: int) -> float:
        """Returns the undisturbed share of the steps of the wanted rounds, of the kind with the fewest."""
        return min(undisturbed.count_steps()) / (wanted * len(self.bare[0].probe))

    def is_enough(self, wanted: int) -> bool:
        """Returns whether there are enough rounds with enough undisturbed steps."""
        return (
            len(self.bare) >= wanted and self.compute_share(self.select_undisturbed(), wanted) >= TARGET_SHARE
        )

    def select_judged(
        self, wanted: int, limit: neighbours.Limit = neighbours.LIMIT
    ) -> tuple[Rounds, Control]:
        """Returns the steps for the gates: the undisturbed ones, or all if there are too few of them."""
        undisturbed = self.select_undisturbed(limit)
        bare, hooked, _ = (part / whole for part, whole in zip(undisturbed.count_steps(), self.count_steps()))
        text = f"{bare:.0%} of the steps undisturbed, hooked {hooked:.0%}"
        enough = self.compute_share(undisturbed, wanted) >= MIN_SHARE
        return undisturbed if enough else self, Control(
            text, enough and hooked >= (1 - MAX_LESS_UNDISTURBED) * bare
        )


Figures = tuple[Figure, Figure, Figure, Figure]
"""p50 and its control, p99 and its control, as shares."""


class Switchable(Protocol):
    """A variant that is switched on and off outside the measured time."""

    def switch_on(self) -> None: ...

    def switch_off(self) -> None: ...


def run_steps(step: Callable[[], object], count: int) -> Block:
    """Times each step, and a probe after it."""
    columns = np.empty((3, count), np.int64)
    for i in range(count):
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        step()
        cpu = time.thread_time_ns() - cpu
        columns[:, i] = time.perf_counter_ns() - wall, cpu, neighbours.time_probe()
    return Block(*columns)


def run_alternating(
    run: Callable[[], Block],
    variant: Switchable,
    rounds: int,
    after: Callable[[], None] | None = None,
    max_times_rounds: int = MAX_TIMES_ROUNDS,
) -> Rounds:
    """Runs rounds of three blocks in random order, until enough steps are undisturbed.

    The variant is switched on before each block, and off again before a bare one, so that all blocks begin alike. `after` is
    called after each block with the variant.
    """
    rng, measured = random.Random(1), Rounds([], [], [])
    while len(measured.bare) < max_times_rounds * rounds:
        for kind in rng.sample(range(3), 3):
            variant.switch_on()
            if kind != 1:
                variant.switch_off()
            measured[kind].append(run())
            if kind == 1:
                variant.switch_off()
                if after is not None:
                    after()
        if measured.is_enough(rounds):
            break
    return measured


def compute_overhead(rounds: Rounds, clock: str) -> Figures:
    """Returns p50 and its control, p99 and its control by this clock, as shares.

    The pace of the machine changes within seconds by more than the cost of hooks. So each step counts as a multiple of the median
    step of a bare block of its round: a hooked step of each of the two, a bare step of the other one. Without a cost both have the
    same distribution, however pace is distributed. Percentiles are over all rounds.
    """
    bare, hooked, again = ([getattr(block, clock) for block in kind] for kind in rounds)
    with_hooks, first_bare, second_bare = [], [], []
    for first, between, last in zip(bare, hooked, again):
        usual, usual_again = np.median(first), np.median(last)
        with_hooks.append(np.concatenate([between / usual, between / usual_again]))
        first_bare.append(first / usual_again)
        second_bare.append(last / usual)
    without = [np.concatenate(pair) for pair in zip(first_bare, second_bare)]
    p50, p99 = (compare_percentiles(with_hooks, without, percent) for percent in (50, 99))
    p50_control, p99_control = (compare_percentiles(second_bare, first_bare, percent) for percent in (50, 99))
    return p50, p50_control, p99, p99_control


def make_lines(
    loop: str, ours: Rounds, wanted: int, stock: Rounds, limit: neighbours.Limit = neighbours.LIMIT
) -> list[Line]:
    """Returns the rows of a loop: p50 and p99 by CPU time and wall clock, and the comparison with the stock SDK.

    The gate against the stock SDK uses the wall clock, because its exporting thread takes the GIL, not CPU time of the engine's thread.
    """
    lines = []
    judged, undisturbed = ours.select_judged(wanted, limit)
    for clock, clock_name in (("cpu", "CPU time"), ("wall", "wall clock")):
        figures = compute_overhead(judged, clock)
        note = f"bare p50 {_compute_p50(judged.bare, clock):.0f} µs, hooked {_compute_p50(judged.hooked, clock):.0f} µs"
        lines += make_gated_lines(loop, clock_name, figures, undisturbed, note)
        all_steps, *_ = compute_overhead(ours, clock)
        lines.append(
            make_line(f"{loop}: p50, {clock_name}, disturbed steps too", "%", all_steps.scale_by(100))
        )
        theirs, their_control, _, _ = compute_overhead(stock, clock)
        p50, p50_control, *_ = figures
        control = combine_controls(
            make_control(p50_control),
            make_control(their_control, max(CONTROL_LIMIT, theirs.value / STOCK_PRECISION)),
            undisturbed,
        )
        gate = Gate(STOCK_FACTOR, at_least=True) if clock == "wall" else None
        note = f"stock p50 {theirs.value * 100:+.0f} % [{theirs.low * 100:.0f}, {theirs.high * 100:.0f}]"
        claim = f"{loop}: less than the stock SDK, {clock_name}"
        lines.append(make_line(claim, "×", divide_figures(p50, theirs), gate, control, note))
    return lines


def make_gated_lines(
    claim: str, clock_name: str, figures: Figures, undisturbed: Control, note: str = ""
) -> list[Line]:
    """Returns the rows of p50 and p99 by one clock. A control may be off by half of its gate."""
    p50, p50_control, p99, p99_control = figures
    return [
        make_line(
            f"{claim}: {percentile}, {clock_name}",
            "%",
            figure.scale_by(100),
            Gate(limit),
            combine_controls(make_control(control, limit / 200), undisturbed),
            note,
        )
        for percentile, limit, figure, control in (
            ("p50", P50_LIMIT, p50, p50_control),
            ("p99", P99_LIMIT, p99, p99_control),
        )
    ]


def _compute_p50(blocks: list[Block], clock: str) -> float:
    return float(np.median(np.concatenate([getattr(block, clock) for block in blocks]))) / 1000
