"""The decode loop of transformers' continuous batching with a tiny model, each step exported as a span.

A load has as many requests as fit, all of one length. Once all of them decode, a few steps with and a few without the integration
take turns. Before each step the integration is removed and installed, or installed and removed, so that all steps begin alike. The
first step of a turn does not count, because the interpreter specializes again. Steps get longer with the number of tokens, up to
twice as long at the end; this growth is removed.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks import continuous, machine, neighbours
from benchmarks.blocks import (
    P50_LIMIT,
    P99_LIMIT,
    STOCK_FACTOR,
    Block,
    Rounds,
    Switchable,
    compute_overhead,
    make_lines,
)
from benchmarks.ours import Exporting
from benchmarks.own_time import OwnTime
from benchmarks.receiver import Receiver
from benchmarks.stock import Stock
from benchmarks.stock_batching import StockHooks
from benchmarks.verdict import (
    Figure,
    Gate,
    Line,
    bootstrap_figure,
    divide_figures,
    estimate_median,
    make_control,
    make_line,
    make_lost_line,
    pool_percentile,
    relax_control,
)

AT_ONCE, FEWER = 256, (8, 64)
FEWER_P50_LIMIT, FEWER_P99_LIMIT = 0.5, 1.0
"""Gates of the hooks alone where fewer run, % of a step."""
Step = tuple[int, int, int, int]
"""A step, ns: wall clock, CPU time, the slower of the probes before and after it, and the hooks' own time."""
Column = NDArray[np.float64]
LEAD, TAIL = 24, 16
"""Steps of a load in which some requests are still in prefill, or already finished."""
STEPS = 18
"""Steps of each kind in a load."""
TURN, STOCK_TURN = 3, 6
"""Consecutive steps of a kind. The stock SDK exports a step during the next ones."""
TOKENS = LEAD + 3 * STEPS + TAIL


def measure(quick: bool) -> list[Line]:
    """Measures otel_infer, then the stock SDK with the same model and receiver."""
    loads, stock_loads, own_loads = (1, 1, 1) if quick else (600, 36, 12)
    import transformers.generation.continuous_batching  # noqa: F401 - loads the hooked modules

    machine.keep_memory()
    with Receiver() as receiver:
        mine, others = machine.choose_cores()
        for pid in (receiver.pid, os.getpid()):  # the thread of the loop moves to its core itself
            machine.pin_process(pid, others)
        load = Load(mine, AT_ONCE // 8 if quick else AT_ONCE)
        with load.run_manager(), Exporting(receiver.endpoint, ("transformers",)) as exporting:
            ours = load.measure_rounds(OurHooks(), loads, TURN)
            exporting.flush()
            lost = make_lost_line(
                f"{load.name}: step spans lost or doubled", load.hooked, receiver.read_counts()
            )
            with load.own_time.time_our_hooks():
                our_times = load.measure_own_times(OurHooks(), own_loads)
            fewer = [
                line for at_once in FEWER for line in measure_fewer(Load(mine, at_once), own_loads, exporting)
            ]
        with load.run_manager():
            stock = StockHooks(Stock(receiver.endpoint))
            theirs = load.measure_rounds(stock, stock_loads, STOCK_TURN, stock.stock.flush)
            stock.own = load.own_time
            stock_times = load.measure_own_times(stock, -(-own_loads // 2))
            stock.stock.close()
    lines = make_lines(load.name, ours, loads, theirs, neighbours.PACE_LIMIT)
    return [*lines, *make_own_lines(load.name, our_times, stock_times, ours, theirs), lost, *fewer]


def measure_fewer(load: Load, loads: int, exporting: Exporting) -> list[Line]:
    """Returns the rows of the hooks' own time where fewer requests run, of a bare step."""
    with load.run_manager():
        rounds = load.measure_rounds(OurHooks(), loads, TURN)
        with load.own_time.time_our_hooks():
            times = load.measure_own_times(OurHooks(), loads)
        exporting.flush()
    bare = float(np.median([np.median(block.wall) for block in (*rounds.bare, *rounds.again)]))
    p50 = estimate_median([float(np.median(steps)) for steps in times])
    p99 = bootstrap_figure(len(times), lambda rows: pool_percentile(times, rows, 99) / bare)
    claim, note = f"{load.name}: hooks alone", f"bare p50 {bare / 1000:.0f} µs"
    return [
        make_line(f"{claim}, p50", "µs", p50.scale_by(1 / 1000)),
        make_line(
            f"{claim}, p50, of a step", "%", p50.scale_by(100 / bare), Gate(FEWER_P50_LIMIT), note=note
        ),
        make_line(f"{claim}, p99, of a step", "%", p99.scale_by(100), Gate(FEWER_P99_LIMIT)),
    ]


def make_own_lines(
    loop: str, our_times: list[Column], stock_times: list[Column], ours: Rounds, theirs: Rounds
) -> list[Line]:
    """Returns the rows of the hooks' own time: against a bare step, against what the stock SDK adds to a step, and against
    the own time of its hooks."""
    blocks = [block for rounds in (ours, theirs) for block in (*rounds.bare, *rounds.again)]
    bare = float(np.median([np.median(block.wall) for block in blocks]))
    mine, stock = (
        estimate_median([float(np.median(steps)) for steps in times]) for times in (our_times, stock_times)
    )
    p99 = bootstrap_figure(len(our_times), lambda rows: pool_percentile(our_times, rows, 99) / bare)
    slower, difference, *_ = compute_overhead(theirs, "wall")
    added = slower.scale_by(bare)
    claim, gate = f"{loop}: hooks alone", Gate(STOCK_FACTOR, at_least=True)
    least = Figure(*(bound - abs(difference.value) * bare for bound in added))
    control = relax_control(make_control(difference), divide_figures(mine, least), gate)
    note = f"stock adds {_format_us(added)}, its hooks alone {_format_us(stock)}"
    below = divide_figures(mine, added)
    return [
        make_line(f"{claim}, p50", "µs", mine.scale_by(1 / 1000)),
        make_line(f"{claim}, p50, of a step", "%", mine.scale_by(100 / bare), Gate(P50_LIMIT)),
        make_line(f"{claim}, p99, of a step", "%", p99.scale_by(100), Gate(P99_LIMIT)),
        make_line(f"{claim}, less than the stock SDK adds", "×", below, gate, control, note),
        make_line(f"{claim}, less than the stock SDK's alone", "×", divide_figures(mine, stock)),
    ]


def _format_us(figure: Figure) -> str:
    return "{:.0f} µs [{:.0f}, {:.0f}]".format(*figure.scale_by(1 / 1000))


class PlannedStep(NamedTuple):
    """A future step: bare, hooked, or (None) as the previous one. `samples` receives its times; None = not measured."""

    bare: bool | None = None
    samples: list[Step] | None = None


class Load:
    """Loads on one manager. A wrapper times its steps in every block. `hooked`: the expected number of step spans."""

    def __init__(self, core: set[int], at_once: int) -> None:
        self.core, self.at_once = core, at_once
        self.name = f"transformers loop, {at_once} running"
        self.model = continuous.make_model()
        self.hooked = 0
        self._manager: Any = None
        self._hooks: Switchable | None = None
        self._rng = random.Random(1)
        self.own_time = OwnTime()
        self._plan: list[PlannedStep] = []
        """Future steps, the next one last."""

    @contextmanager
    def run_manager(self) -> Iterator[None]:
        """Runs a manager whose loop has a core of its own."""
        self._manager = manager = continuous.make_manager(self.model, self.at_once, TOKENS)
        body = type(manager)._generation_loop_body
        manager._generation_loop_body = self._time_steps(body.__get__(manager))
        manager.start()
        try:
            yield
        finally:
            manager.stop(block=True)
            manager.destroy()

    def measure_rounds(
        self, hooks: Switchable, loads: int, turn: int, after: Callable[[], None] | None = None
    ) -> Rounds:
        """Runs this many loads, each of which is a round. `turn`: consecutive steps of a kind."""
        kinds, steps = [], []
        for _ in range(loads):
            turns = [kind for _ in range(STEPS // turn) for kind in self._rng.sample(range(3), 3)]
            plan = [
                PlannedStep(kind != 1, [] if number else None) for kind in turns for number in range(turn)
            ]
            kinds.append(np.repeat(turns, turn - 1))
            steps.append(self._run_load(plan, hooks))
            if after is not None:
                after()
        self.hooked = len(steps) * self.at_once * (TOKENS - 1 - 2 * STEPS)
        return split_by_kind(remove_growth(np.array(steps, float)), kinds)

    def measure_own_times(self, hooks: Switchable, loads: int) -> list[Column]:
        """Returns the hooks' own time in each step of each load, ns. The hooks are always on."""
        times = []
        for _ in range(loads):
            self.own_time.empty = True
            clock_reads = float(np.median(self._measure_own_time(hooks)))
            self.own_time.empty = False
            times.append(self._measure_own_time(hooks) - clock_reads)
        return times

    def _measure_own_time(self, hooks: Switchable) -> Column:
        plan = [PlannedStep(samples=[]) for _ in range(3 * STEPS)]
        return np.array([own for *_, own in self._run_load(plan, hooks)])

    def _run_load(self, plan: list[PlannedStep], hooks: Switchable) -> list[Step]:
        """Runs one load and returns its measured steps. The hooks are off in the end."""
        self._plan = [PlannedStep(bare=False), *reversed(plan), *[PlannedStep()] * LEAD]
        hooks.switch_on()
        self._hooks = hooks
        for number in range(self.at_once):
            self._manager.add_request(continuous.make_prompt(number), max_new_tokens=TOKENS)
        for _ in range(self.at_once):
            result = self._manager.get_result(timeout=60)
            if result is None or result.error:
                raise RuntimeError(f"a request failed: {result and result.error}")
        time.sleep(0.02)  # until the loop waits
        hooks.switch_off()
        return [step for planned in plan for step in planned.samples or ()]

    def _time_steps(self, body: Callable[..., bool]) -> Callable[..., bool]:
        manager, pinned, pace = self._manager, False, 0

        def timed_body(*args: Any, **kwargs: Any) -> bool:
            nonlocal pinned, pace
            if not pinned:
                pinned = True
                machine.pin_this_thread(self.core)
            planned = self._plan[-1] if self._plan else PlannedStep()
            if planned.bare is not None and self._hooks is not None:
                switches = (self._hooks.switch_off, self._hooks.switch_on)
                for switch in reversed(switches) if planned.bare else switches:
                    switch()
            before = manager.current_batch
            self.own_time.reset()
            wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
            goes_on = body(*args, **kwargs)
            cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
            if manager.current_batch != before and self._plan:
                self._plan.pop()
                own, previous_pace, pace = self.own_time.ns, pace, neighbours.time_arithmetic()
                if planned.samples is not None:
                    planned.samples.append((wall, cpu, max(previous_pace, pace), own))
            return goes_on

        return timed_body


def split_by_kind(steps: Column, kinds: Sequence[NDArray[Any]]) -> Rounds:
    """Returns the steps of each load by their kind."""
    return Rounds(
        *([Block(*load[order == kind].T[:3]) for load, order in zip(steps, kinds)] for kind in range(3))
    )


def remove_growth(steps: Column) -> Column:
    """Returns the steps without the growth with their position in the load, for all kinds alike.

    The growth of the first two columns is a parabola over all loads. The third column, the probe, does not grow; it becomes a multiple
    of its usual time in the load.
    """
    even: Column = steps.copy()
    positions = np.arange(steps.shape[1])
    for column in range(2):
        fitted = np.polyfit(np.tile(positions, len(steps)), steps[:, :, column].ravel(), 2)
        growth = np.polyval(fitted, positions)
        even[:, :, column] *= np.median(growth) / growth
    even[:, :, 2] /= np.median(steps[:, :, 2], axis=1, keepdims=True)
    return even


class OurHooks:
    """The integration of otel_infer."""

    def __init__(self) -> None:
        from otel_infer.instrumentation.transformers import instrumentor

        self.integration = instrumentor

    def switch_on(self) -> None:
        """Installs the integration."""
        self.integration.install()
        status = self.integration.status
        if status.drift or not status.hooks_active:
            raise RuntimeError(f"not instrumented: {status.drift}")

    def switch_off(self) -> None:
        """Removes the integration."""
        self.integration.remove()
