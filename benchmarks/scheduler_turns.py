"""Takes turns with the scheduler of an engine without a model, and times the hooks of otel_infer in them.

It takes one turn per line of input. A line is a JSON list: number running, whether one joins and one leaves per step, whether
something else uses the caches during the step, the number of steps. The reply is a pair of medians over the steps, in ns: the time in
the hooked functions minus the time in the originals inside them, and the same without hooks, which is the timer's own.

The module imports nothing of `benchmarks`, because it runs with older releases of otel_infer too.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

WARM_UP_STEPS = 8
PROMPT, PROMPTS = 8, 16
"""Tokens of the shortest prompt, and the number of lengths."""
Hooked = Mapping[type, tuple[str, ...]]
"""The functions that hooks replace, by their class."""
_now = time.perf_counter_ns


class HookTimer:
    """The time of hooks, ns: in the functions of `hooked`, without the originals inside them."""

    def __init__(self, hooked: Hooked) -> None:
        self.ns, self._hooked = 0, hooked

    def add_time(self, function: Callable[..., Any], sign: int) -> Callable[..., Any]:
        """Returns the function, timed."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = _now()
            try:
                return function(*args, **kwargs)
            finally:
                self.ns += sign * (_now() - began)

        return timed

    def read_functions(self) -> list[tuple[type, str, Any]]:
        """Returns the functions as they are now."""
        return [
            (owner, name, getattr(owner, name)) for owner, names in self._hooked.items() for name in names
        ]

    def wrap_all(self, functions: list[tuple[type, str, Any]], sign: int) -> None:
        """Puts the timed functions in their places."""
        for owner, name, function in functions:
            setattr(owner, name, self.add_time(function, sign))


class ModelFreeEngine(Protocol):
    """A scheduler, its requests, and results of one token each in place of a model."""

    def add_request(self, max_tokens: int, prompt: int) -> None:
        """Adds a request with a prompt of this many tokens."""

    timer: HookTimer

    def run_step(self, during: Callable[[], None]) -> int:
        """Schedules a batch, calls `during`, delivers one token per request; returns the number running."""

    def end_all(self) -> None:
        """Ends all requests."""


class CacheUser:
    """Uses the processor's caches as a model does."""

    def __init__(self) -> None:
        self._numbers = list(range(400_000))
        random.Random(3).shuffle(self._numbers)
        self._weights = torch.ones(2_000_000)

    def use_caches(self) -> None:
        """Reads 60,000 numbers that lie apart, and 8 MB."""
        total = 0
        for number in self._numbers[:60_000]:
            total += number
        self._weights.add_(1)


def run_turn(
    engine: ModelFreeEngine, timer: HookTimer, user: CacheUser, turn: tuple[int, bool, bool, int]
) -> list[int]:
    """Returns the timer's ns of each step."""
    size, changes, uses_caches, steps = turn
    long = 2 * (WARM_UP_STEPS + steps)
    for number in range(size):
        engine.add_request(number + 1 + WARM_UP_STEPS if changes else long, PROMPT + number % PROMPTS)
    samples = []
    gc.disable()
    for number in range(WARM_UP_STEPS + steps):
        timer.ns = 0
        if changes and number > WARM_UP_STEPS:
            engine.add_request(size, PROMPT + number % PROMPTS)
        running = engine.run_step(user.use_caches if uses_caches else lambda: None)
        samples.append(timer.ns)
        assert running == size, (running, size)
    gc.enable()
    engine.end_all()
    return samples[WARM_UP_STEPS:]


def install_hooks(library: str) -> Callable[[], int]:
    """Installs the hooks of the otel_infer that is imported; returns a function that returns how many hooks failed."""
    newer = importlib.util.find_spec("otel_infer.ringbuffer") is not None
    ring = importlib.import_module("otel_infer.ringbuffer.recorder" if newer else "otel_infer.ring.recorder")
    arena = importlib.import_module("otel_infer.ringbuffer.arena" if newer else "otel_infer.ring.write")
    ring.recorder.start(arena.MemoryArena, lambda: None, lambda reason: None)
    if newer:
        importlib.import_module(f"otel_infer.instrumentation.{library}").instrumentor.install()
        return importlib.import_module("otel_infer.instrumentation.hooks.probe").count_errors
    importlib.import_module(f"otel_infer.integrations.{library}").integration.install()
    return importlib.import_module("otel_infer.patching").errors


def take_turns(
    make_engine: Callable[[], ModelFreeEngine], hooked: Hooked, library: str, called: Hooked | None = None
) -> None:
    """Takes turns until the input ends. The engine is made with the hooks installed.

    `called`: hooked functions without work of their own, which the engine calls by its timer, because their hooks look at
    what is in their place.
    """
    timer, plain, user = HookTimer(hooked), HookTimer(called or {}), CacheUser()
    timer.wrap_all(timer.read_functions(), -1)
    bare = timer.read_functions(), plain.read_functions()
    count_errors = install_hooks(library)
    variants = (timer.read_functions(), plain.read_functions()), bare
    engine = make_engine()
    engine.timer = timer
    print("ready", flush=True)
    for line in sys.stdin:
        turn = json.loads(line)
        results = []
        for functions, unchanged in variants:
            timer.wrap_all(functions, 1)
            for owner, name, function in unchanged:
                setattr(owner, name, function)
            results.append(statistics.median(run_turn(engine, timer, user, turn)))
        if count_errors():
            raise RuntimeError("a hook raised and was disabled, so the measurement is invalid")
        print(json.dumps(results), flush=True)
