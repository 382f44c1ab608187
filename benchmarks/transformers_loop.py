"""A real decode loop: transformers' continuous batching with a tiny model in this process, every step exported as a span.

A load is as many requests as fit, all of one length. Once all of them decode, a few steps with and a few without the
integration take turns: bare is the library as it came. Before every step the integration is removed and installed, or
installed and removed, so that all begin alike, and the first of a turn is not counted: the interpreter has to learn anew what
it calls. The more tokens there are the longer a step takes, twice as long in the end; that is taken out.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
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
    Hooked,
    Rounds,
    lines_of,
    overhead,
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
    against_itself,
    bootstrapped,
    line,
    lost_line,
    median,
    or_charged,
    pooled,
    times_less,
)

AT_ONCE = 256
Step = tuple[int, int, int, int]
"""Of one step, ns: the clock on the wall, CPU time, the slower pace (`neighbours`) of those before and after
it, and what the hooks took of it."""
Column = NDArray[np.float64]
LEAD, TAIL = 24, 16
"""Steps of a load in which requests are still prefilled, or some are done already."""
STEPS = 18
"""Of each kind, in a load."""
TURN, STOCK_TURN = 3, 6
"""Steps of a kind in a row. What the stock SDK has to export of a step, its thread does during the next ones."""
TOKENS = LEAD + 3 * STEPS + TAIL


def measure(quick: bool) -> list[Line]:
    """Ours first, then the stock SDK on the same manager to the same receiver."""
    loads, stock_loads, own_loads = (1, 1, 1) if quick else (600, 36, 12)
    import transformers.generation.continuous_batching  # noqa: F401 - what the hooks sit on

    machine.keep_memory()
    with Receiver() as receiver:
        mine, others = machine.cores()
        for pid in (receiver.pid, os.getpid()):  # the thread of the loop goes to its core by itself
            machine.pin_process(pid, others)
        load = Load(mine, AT_ONCE // 8 if quick else AT_ONCE)
        with load.running(), Exporting(receiver.endpoint, ("transformers",)) as exporting:
            found = load.rounds(Ours(), loads, TURN)
            exporting.flush()
            lost = lost_line(f"{load.said}: step spans lost or doubled", load.hooked, receiver.counted())
            with load.own.of_ours():
                own = load.own_times(Ours(), own_loads)
        with load.running():
            stock = StockHooks(Stock(receiver.endpoint))
            theirs = load.rounds(stock, stock_loads, STOCK_TURN, stock.stock.flush)
            stock.own = load.own
            stock_own = load.own_times(stock, -(-own_loads // 2))
            stock.stock.close()
    whole = lines_of(load.said, found, loads, theirs, neighbours.PACE_LIMIT)
    return [*whole, *own_lines(load.said, own, stock_own, found, theirs), lost]


def own_lines(
    said: str, ours: list[Column], theirs: list[Column], ours_whole: Rounds, theirs_whole: Rounds
) -> list[Line]:
    """What the hooks themselves take of a step in the same loop, against a bare step's p50 and against what the stock SDK
    adds to a step: as a whole, which can be seen, and by its hooks alone, without the thread that exports."""
    blocks = [block for whole in (ours_whole, theirs_whole) for block in (*whole.bare, *whole.again)]
    bare = float(np.median([np.median(block.wall) for block in blocks]))
    mine, stock = (median([float(np.median(steps)) for steps in own]) for own in (ours, theirs))
    p99 = bootstrapped(len(ours), lambda rows: pooled(ours, rows, 99) / bare)
    slower, off, *_ = overhead(theirs_whole, "wall")
    added = slower.scaled(bare)
    claim, gate = f"{said}: hooks alone", Gate(STOCK_FACTOR, at_least=True)
    least = Figure(*(one - abs(off.value) * bare for one in added))
    control = or_charged(against_itself(off), times_less(mine, least), gate)
    return [
        line(f"{claim}, p50", "µs", mine.scaled(1 / 1000)),
        line(f"{claim}, p50, of a step", "%", mine.scaled(100 / bare), Gate(P50_LIMIT)),
        line(f"{claim}, p99, of a step", "%", p99.scaled(100), Gate(P99_LIMIT)),
        line(
            f"{claim}, less than the stock SDK adds",
            "×",
            times_less(mine, added),
            gate,
            control,
            f"stock adds {_us(added)}, its hooks alone {_us(stock)}",
        ),
        line(f"{claim}, less than the stock SDK's alone", "×", times_less(mine, stock)),
    ]


def _us(figure: Figure) -> str:
    return "{:.0f} µs [{:.0f}, {:.0f}]".format(*figure.scaled(1 / 1000))


class Planned(NamedTuple):
    """A step that is to come: bare or hooked, or as the one before; `noted`: where it is noted down, if at all."""

    bare: bool | None = None
    noted: list[Step] | None = None


class Load:
    """Loads on one manager, whose steps are timed by a wrapper that stays on in every block. `hooked`: step spans to come."""

    def __init__(self, core: set[int], at_once: int) -> None:
        self.core, self.at_once = core, at_once
        self.said = f"transformers loop, {at_once} running"
        self.model = continuous.tiny_model()
        self.hooked = 0
        self._manager: Any = None
        self._hooks: Hooked | None = None
        self._chance = random.Random(1)
        self.own = OwnTime()
        self._plan: list[Planned] = []
        """The steps still to come, the next one last."""

    @contextmanager
    def running(self) -> Any:
        """A manager that runs; the thread of its loop has a core of its own."""
        self._manager = manager = continuous.manager(self.model, self.at_once, TOKENS)
        body = type(manager)._generation_loop_body
        manager._generation_loop_body = self._timing(body.__get__(manager))
        manager.start()
        try:
            yield
        finally:
            manager.stop(block=True)
            manager.destroy()

    def rounds(self, hooks: Hooked, loads: int, turn: int, after: Callable[[], None] | None = None) -> Rounds:
        """So many loads, one after the other, each of which is a round; the hooks are off in the end. `turn`: steps of a kind
        before another has its turn."""
        kinds, steps = [], []
        for _ in range(loads):
            turns = [kind for _ in range(STEPS // turn) for kind in self._chance.sample(range(3), 3)]
            planned = [Planned(kind != 1, [] if number else None) for kind in turns for number in range(turn)]
            kinds.append(np.repeat(turns, turn - 1))
            steps.append(self._noted(planned, hooks))
            if after is not None:
                after()
        self.hooked = len(steps) * self.at_once * (TOKENS - 1 - 2 * STEPS)
        return of_kinds(evened(np.array(steps, float)), kinds)

    def _noted(self, planned: list[Planned], hooks: Hooked) -> list[Step]:
        """What one load noted down in these steps of it."""
        lead, last = [Planned()] * LEAD, [Planned(bare=False)]
        self._plan = [*reversed([*lead, *planned, *last])]
        self._run(hooks)
        return [step for one in planned for step in one.noted or ()]

    def own_times(self, hooks: Hooked, loads: int) -> list[Column]:
        """What the hooks took of each step, an array for each load, ns; they are never off."""
        found = []
        for _ in range(loads):
            self.own.nothing = True
            clocks = float(np.median(self._own_time(hooks)))
            self.own.nothing = False
            found.append(self._own_time(hooks) - clocks)
        return found

    def _own_time(self, hooks: Hooked) -> Column:
        return np.array(
            [own for *_, own in self._noted([Planned(noted=[]) for _ in range(3 * STEPS)], hooks)]
        )

    def _run(self, hooks: Hooked) -> None:
        """One load, as planned; the hooks are off in the end."""
        hooks.put_on()
        self._hooks = hooks
        for number in range(self.at_once):
            self._manager.add_request(continuous.prompt(number), max_new_tokens=TOKENS)
        for _ in range(self.at_once):
            result = self._manager.get_result(timeout=60)
            if result is None or result.error:
                raise RuntimeError(f"a request failed: {result and result.error}")
        time.sleep(0.02)  # the loop is on its way into its wait
        hooks.take_off()

    def _timing(self, body: Callable[..., bool]) -> Callable[..., bool]:
        manager, pinned, pace = self._manager, False, 0

        def timed(*args: Any, **kwargs: Any) -> bool:
            nonlocal pinned, pace
            if not pinned:
                pinned = True
                machine.pin_this_thread(self.core)
            planned = self._plan[-1] if self._plan else Planned()
            if planned.bare is not None and self._hooks is not None:
                turns = (self._hooks.take_off, self._hooks.put_on)
                for turn in reversed(turns) if planned.bare else turns:
                    turn()
            before = manager.current_batch
            self.own.began()
            wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
            goes_on = body(*args, **kwargs)
            cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
            if manager.current_batch != before and self._plan:
                self._plan.pop()
                took, before_it, pace = self.own.ns, pace, neighbours.pace()
                if planned.noted is not None:
                    planned.noted.append((wall, cpu, max(before_it, pace), took))
            return goes_on

        return timed


def of_kinds(steps: Column, kinds: Sequence[NDArray[Any]]) -> Rounds:
    """Loads of steps of columns, by the kind of each step."""
    return Rounds(
        *([Block(*load[order == kind].T[:3]) for load, order in zip(steps, kinds)] for kind in range(3))
    )


def evened(steps: Column) -> Column:
    """Loads of steps of columns, without what a step takes longer the later in its load it comes, whatever its kind: the first
    two columns, by a parabola over all loads. The third is the probe, which does not grow: in multiples of its usual time
    in that load."""
    even: Column = steps.copy()
    positions = np.arange(steps.shape[1])
    for column in range(2):
        grown = np.polyval(
            np.polyfit(np.tile(positions, len(steps)), steps[:, :, column].ravel(), 2), positions
        )
        even[:, :, column] *= np.median(grown) / grown
    even[:, :, 2] /= np.median(steps[:, :, 2], axis=1, keepdims=True)
    return even


class Ours:
    """The integration, installed and removed."""

    def __init__(self) -> None:
        from otel_infer.instrumentation.transformers import instrumentor

        self.integration = instrumentor

    def put_on(self) -> None:
        """As when the library was imported."""
        self.integration.install()
        status = self.integration.status
        if status.drift or not status.hooks_active:
            raise RuntimeError(f"not instrumented: {status.drift}")

    def take_off(self) -> None:
        """The library as it came."""
        self.integration.remove()
