"""Blocks of steps, hooked and bare in turn, and what follows from them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from benchmarks.verdict import (
    Control,
    Figure,
    Gate,
    Line,
    against_itself,
    line,
    median,
    quantile_ratio,
    times_less,
)

P50_LIMIT, P99_LIMIT, STOCK_FACTOR = 1.0, 2.0, 100.0
"""The gates: % of p50, % of p99, and how many times less than the stock SDK."""


class Block(NamedTuple):
    """Steps in order, ns each: by the clock on the wall, and CPU time of the thread that ran them."""

    wall: np.ndarray
    cpu: np.ndarray


class Rounds(NamedTuple):
    """One block of each kind per round: bare, hooked, and bare again as the control."""

    bare: list[Block]
    hooked: list[Block]
    again: list[Block]


class Hooked(Protocol):
    """Something that can be put on an engine and taken off again, both outside the time that is measured."""

    def put_on(self) -> None: ...

    def take_off(self) -> None: ...


def run_steps(step: Callable[[], None], count: int) -> Block:
    """So many steps, each timed; not one is left out."""
    wall, cpu = np.empty(count + 1, np.int64), np.empty(count + 1, np.int64)
    wall[0], cpu[0] = time.perf_counter_ns(), time.thread_time_ns()
    for i in range(1, count + 1):
        step()
        wall[i], cpu[i] = time.perf_counter_ns(), time.thread_time_ns()
    return Block(np.diff(wall), np.diff(cpu))


def alternating(
    run: Callable[[], Block], hooks: Hooked, rounds: int, after: Callable[[], None] | None = None
) -> Rounds:
    """So many rounds of three blocks in an order drawn anew for each; `after` is called after each hooked block.

    The hooks go on before every block, and off again before a bare one, so that all blocks begin alike.
    """
    chance, found = random.Random(1), Rounds([], [], [])
    for _ in range(rounds):
        for kind in chance.sample(range(3), 3):
            if kind == 1:
                hooks.put_on()
                found[kind].append(run())
                hooks.take_off()
                if after is not None:
                    after()
            else:
                hooks.put_on()
                hooks.take_off()
                found[kind].append(run())
    return found


def overhead(rounds: Rounds, clock: str) -> tuple[Figure, Figure, Figure, Figure]:
    """By this clock, as shares: p50 and its control (medians of block medians), p99 and its control.

    For p99 all steps are taken together, each as a multiple of the median bare step of its own round: the machine's own
    pace changes from one second to the next, by more than a step's tail.
    """
    bare, hooked, again = ([getattr(block, clock) for block in kind] for kind in rounds)
    both = [np.concatenate(pair) for pair in zip(bare, again)]
    p50 = [float(np.median(on) / np.median(off)) - 1 for on, off in zip(hooked, both)]
    p50_control = [float(np.median(one) / np.median(other)) - 1 for one, other in zip(again, bare)]
    one, on, other, off = (
        [steps / np.median(usual) for steps, usual in zip(kind, both)] for kind in (bare, hooked, again, both)
    )
    return median(p50), median(p50_control), quantile_ratio(on, off, 99), quantile_ratio(other, one, 99)


def lines_of(loop: str, ours: Rounds, stock: Rounds | None) -> list[Line]:
    """The rows of one loop: p50 and p99 by CPU time and by the wall clock, and against the stock SDK."""
    found = []
    for clock, said in (("cpu", "CPU time"), ("wall", "wall clock")):
        p50, p50_control, p99, p99_control = overhead(ours, clock)
        note = f"bare p50 {_p50(ours.bare, clock):.0f} µs, hooked {_p50(ours.hooked, clock):.0f} µs"
        percent, gates = 100, (Gate(P50_LIMIT), Gate(P99_LIMIT))
        found += [
            line(
                f"{loop}: p50, {said}", "%", p50.scaled(percent), gates[0], against_itself(p50_control), note
            ),
            line(f"{loop}: p99, {said}", "%", p99.scaled(percent), gates[1], against_itself(p99_control)),
        ]
        if stock is not None:
            theirs, their_control, _, _ = overhead(stock, clock)
            found.append(_against_stock(loop, said, p50, theirs, [p50_control, their_control]))
    return found


def _against_stock(loop: str, said: str, ours: Figure, theirs: Figure, controls: list[Figure]) -> Line:
    """Of the one whose control is worse, the control."""
    worst: Control = max((against_itself(one) for one in controls), key=lambda control: not control.holds)
    note = f"stock p50 {theirs.value * 100:+.0f} % [{theirs.low * 100:.0f}, {theirs.high * 100:.0f}]"
    claim = f"{loop}: less than the stock SDK, {said}"
    return line(claim, "×", times_less(ours, theirs), Gate(STOCK_FACTOR, at_least=True), worst, note)


def _p50(blocks: list[Block], clock: str) -> float:
    return float(np.median(np.concatenate([getattr(block, clock) for block in blocks]))) / 1000
