"""A real decode loop: transformers' continuous batching with a tiny model in this process, every step exported as a span.

A block is a whole load, from the first request added to the last result, as many requests at once as fit; a new one is
added for each that finishes. Between blocks the integration is installed or removed, so bare is the library as it came.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks import caches, continuous, machine
from benchmarks.blocks import Block, alternating, lines_of
from benchmarks.ours import Exporting
from benchmarks.receiver import Receiver
from benchmarks.stock import Stock
from benchmarks.verdict import Line, lost_line

AT_ONCE = 256
TOKENS = (32, 48, 64)
"""A short answer of a chat; what a request costs is spread over its steps."""


def measure(quick: bool) -> list[Line]:
    """Ours first, then the stock SDK on the same manager to the same receiver."""
    rounds, stock_rounds = (2, 1) if quick else (12, 3)
    import transformers.generation.continuous_batching  # noqa: F401 - what the hooks sit on

    machine.keep_memory()
    with Receiver() as receiver:
        mine, others = machine.cores()
        machine.pin_process(receiver.pid, others)
        load = Load(mine, AT_ONCE // 8 if quick else AT_ONCE)
        with load.running(), Exporting(receiver.endpoint, ("transformers",)) as exporting:
            ours = Ours()
            ours.take_off()
            load.block()
            found = alternating(load.block, ours, rounds)
            exporting.flush()
            expected = len(found.hooked) * load.decode_steps
            lost = lost_line(f"{load.said}: step spans lost or doubled", expected, receiver.counted())
        with load.running():
            load.block()
            stock = StockHooks(Stock(receiver.endpoint))
            theirs = alternating(load.block, stock, stock_rounds, after=stock.stock.flush)
            stock.stock.close()
    return [*lines_of(load.said, found, rounds, theirs), lost]


class Load:
    """One load on one manager, whose steps are timed by a wrapper that stays on in every block."""

    def __init__(self, core: set[int], at_once: int) -> None:
        self.core, self.at_once = core, at_once
        self.said = f"transformers loop, {at_once} running"
        self.model = continuous.tiny_model()
        self.lengths = [TOKENS[number % len(TOKENS)] for number in range(2 * at_once)]
        self.decode_steps = sum(self.lengths) - len(self.lengths)
        self._manager: Any = None
        self._steps: list[tuple[int, int, int]] = []

    @contextmanager
    def running(self) -> Any:
        """A manager that runs; the thread of its loop has a core of its own."""
        self._manager = manager = continuous.manager(self.model, self.at_once)
        body = type(manager)._generation_loop_body
        manager._generation_loop_body = self._timing(body.__get__(manager))
        manager.start()
        try:
            yield
        finally:
            manager.stop(block=True)
            manager.destroy()

    def block(self) -> Block:
        """The whole load; only iterations that ran a step count."""
        self._steps = []
        numbers = iter(range(len(self.lengths)))
        for _ in range(self.at_once):
            self._add(next(numbers))
        for _ in self.lengths:
            result = self._manager.get_result(timeout=60)
            if result is None or result.error:
                raise RuntimeError(f"a request failed: {result and result.error}")
            number = next(numbers, None)
            if number is not None:
                self._add(number)
        time.sleep(0.02)  # the loop is on its way into its wait
        return Block(*np.array(self._steps).T)

    def _add(self, number: int) -> None:
        self._manager.add_request(continuous.prompt(number), max_new_tokens=self.lengths[number])

    def _timing(self, body: Callable[..., bool]) -> Callable[..., bool]:
        manager, pinned = self._manager, False

        def timed(*args: Any, **kwargs: Any) -> bool:
            nonlocal pinned
            if not pinned:
                pinned = True
                machine.pin_this_thread(self.core)
            before = manager.current_batch
            wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
            goes_on = body(*args, **kwargs)
            cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
            if manager.current_batch != before:
                self._steps.append((wall, cpu, caches.probe()))
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
        self._originals = [getattr(owner, name) for owner, name, _ in self._places]

    def put_on(self) -> None:
        """Wraps the four functions."""
        for (owner, name, wrapping), original in zip(self._places, self._originals):
            setattr(owner, name, wrapping(original))

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
