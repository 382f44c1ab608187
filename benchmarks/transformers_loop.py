"""A real decode loop: transformers' continuous batching with a tiny model in this process, every step exported as a span.

A load is as many requests as fit, all of one length. Once all of them decode, blocks of steps with and without the
integration take turns, each some steps after it was installed or removed: bare is the library as it came.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks import caches, continuous, machine
from benchmarks.blocks import STOCK_FACTOR, Block, Hooked, Rounds, lines_of
from benchmarks.ours import Exporting
from benchmarks.own_time import OwnTime
from benchmarks.receiver import Receiver
from benchmarks.stock import Stock
from benchmarks.verdict import Gate, Line, line, lost_line, median, times_less

AT_ONCE = 256
Step = tuple[int, int, int, int]
"""Of one step, ns: the clock on the wall, CPU time, the probe of `caches`, and what the hooks took of it."""
LEAD, TAIL = 24, 16
"""Steps of a load in which requests are still prefilled, or some are done already."""
STEPS = 5
"""In a block; one more comes before, which is not counted."""
ROUNDS = 3
"""Of three blocks each, in a load."""
TOKENS = LEAD + 3 * ROUNDS * (STEPS + 1) + TAIL


def measure(quick: bool) -> list[Line]:
    """Ours first, then the stock SDK on the same manager to the same receiver."""
    loads, stock_loads = (1, 1) if quick else (60, 6)
    import transformers.generation.continuous_batching  # noqa: F401 - what the hooks sit on

    machine.keep_memory()
    with Receiver() as receiver:
        mine, others = machine.cores()
        machine.pin_process(receiver.pid, others)
        load = Load(mine, AT_ONCE // 8 if quick else AT_ONCE)
        with load.running(), Exporting(receiver.endpoint, ("transformers",)) as exporting:
            found = load.rounds(Ours(), loads)
            exporting.flush()
            lost = lost_line(f"{load.said}: step spans lost or doubled", load.hooked, receiver.counted())
            with load.own.of_ours():
                own = load.own_times(Ours(), stock_loads)
        with load.running():
            stock = StockHooks(Stock(receiver.endpoint))
            theirs = load.rounds(stock, stock_loads, stock.stock.flush)
            stock.own = load.own
            stock_own = load.own_times(stock, stock_loads)
            stock.stock.close()
    return [*lines_of(load.said, found, loads * ROUNDS, theirs), *own_lines(load.said, own, stock_own), lost]


def own_lines(said: str, ours: list[float], theirs: list[float]) -> list[Line]:
    """What the hooks themselves take in the same loop; the stock SDK's exporting thread is not in it."""
    mine, stock = median(ours), median(theirs)
    claim, gate = f"{said}: hooks alone, of a step", Gate(STOCK_FACTOR, at_least=True)
    note = f"stock {stock.value / 1000:.0f} µs [{stock.low / 1000:.0f}, {stock.high / 1000:.0f}]"
    return [
        line(claim, "µs", mine.scaled(1 / 1000)),
        line(f"{claim}, less than the stock SDK", "×", times_less(mine, stock), gate, note=note),
    ]


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
        self._plan: list[list[Step] | None] = []
        """Of each step still to come, where it is noted down; None = nowhere."""
        self._bare: list[bool] = []

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

    def rounds(self, hooks: Hooked, loads: int, after: Callable[[], None] | None = None) -> Rounds:
        """So many loads, one after the other; the hooks are off in the end."""
        found, self.hooked = Rounds([], [], []), 0
        for _ in range(loads):
            blocks = self._planned()
            self._run(hooks)
            if after is not None:
                after()
            for kind, steps in blocks:
                found[kind].append(Block(*np.array(steps).T[:3]))
        return found

    def own_times(self, hooks: Hooked, loads: int) -> list[float]:
        """What the hooks took of a step, a median of each load, ns; they are never off."""
        found = []
        for _ in range(loads):
            steps: list[Step] = []
            self._plan = [steps] * (TOKENS - LEAD - TAIL) + [None] * LEAD
            self._bare = [False] * len(self._plan)
            self._run(hooks)
            found.append(float(np.median([own for *_, own in steps])))
        return found

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

    def _planned(self) -> list[tuple[int, list[Step]]]:
        """What the loop is to do in each step of the next load; the blocks that will come of it, by kind."""
        blocks: list[tuple[int, list[Step]]] = []
        plan: list[list[Step] | None] = [None] * LEAD
        bare = [False] * LEAD
        for _ in range(ROUNDS):
            for kind in self._chance.sample(range(3), 3):
                blocks.append((kind, []))
                plan += [None, *[blocks[-1][1]] * STEPS]
                bare += [kind != 1] * (STEPS + 1)
        self.hooked += self.at_once * (TOKENS - 1 - sum(bare))
        self._plan, self._bare = plan[::-1], bare[::-1]
        return blocks

    def _timing(self, body: Callable[..., bool]) -> Callable[..., bool]:
        manager, pinned, is_bare = self._manager, False, False

        def timed(*args: Any, **kwargs: Any) -> bool:
            nonlocal pinned, is_bare
            if not pinned:
                pinned = True
                machine.pin_this_thread(self.core)
            if is_bare != (wanted := bool(self._bare and self._bare[-1])) and self._hooks is not None:
                is_bare = wanted
                (self._hooks.take_off if wanted else self._hooks.put_on)()
            before = manager.current_batch
            self.own.began()
            wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
            goes_on = body(*args, **kwargs)
            cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
            if manager.current_batch != before and self._plan:
                self._bare.pop()
                if (block := self._plan.pop()) is not None:
                    block.append((wall, cpu, caches.probe(), self.own.ns))
            return goes_on

        return timed


class Ours:
    """The integration, installed and removed."""

    def __init__(self) -> None:
        from otel_infer.integrations.transformers import integration

        self.integration = integration

    def put_on(self) -> None:
        """As when the library was imported."""
        self.integration.install()
        status = self.integration.status
        if status.drift or not status.hooks_active:
            raise RuntimeError(f"not instrumented: {status.drift}")

    def take_off(self) -> None:
        """The library as it came."""
        self.integration.remove()


class StockHooks:
    """A span per token made with the stock SDK, or one per step, where ours states two facts per step."""

    def __init__(self, stock: Stock, per_token: bool = True) -> None:
        from transformers.generation.continuous_batching import continuous_api, scheduler

        self.stock, self.per_token = stock, per_token
        self._contexts: dict[str, Any] = {}
        self._spans: dict[str, Any] = {}
        self._batch: list[Any] = []
        self._began = self._step = 0
        manager, processor = continuous_api.ContinuousBatchingManager, continuous_api.ContinuousBatchProcessor
        self._places = (
            (manager, "add_request", self._adding),
            (scheduler.FIFOScheduler, "schedule_batch", self._scheduling),
            (processor, "update_batch", self._updating),
            (scheduler.Scheduler, "finish_request", self._finishing),
        )
        self.own: OwnTime | None = None
        self._originals = [getattr(owner, name) for owner, name, _ in self._places]

    def put_on(self) -> None:
        """Wraps the four functions."""
        for (owner, name, wrapping), original in zip(self._places, self._originals):
            timed = self.own.around(wrapping, original) if self.own is not None else wrapping(original)
            setattr(owner, name, timed)

    def take_off(self) -> None:
        """The library as it came."""
        for (owner, name, _), original in zip(self._places, self._originals):
            setattr(owner, name, original)

    def _adding(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def add_request(manager: Any, *args: Any, **kwargs: Any) -> Any:
            span, context = self.stock.request()
            request_id = f"stock_{id(span)}"
            self._spans[request_id], self._contexts[request_id] = span, context
            return original(manager, *args, **{**kwargs, "request_id": request_id})

        return add_request

    def _scheduling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def schedule_batch(scheduler: Any, *args: Any) -> Any:
            result = original(scheduler, *args)
            self._began, self._batch = time.time_ns(), result[0] or []
            return result

        return schedule_batch

    def _updating(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def update_batch(processor: Any) -> None:
            contexts = [
                self._contexts[future.state.request_id] for future in self._batch if future.has_new_token
            ]
            original(processor)
            self._step += 1
            contexts = contexts if self.per_token else contexts[:1]
            self.stock.step(contexts, self._step, self._began, time.time_ns())

        return update_batch

    def _finishing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def finish_request(scheduler: Any, request_id: str) -> None:
            original(scheduler, request_id)
            self._contexts.pop(request_id, None)
            self._spans.pop(request_id).end()

        return finish_request
