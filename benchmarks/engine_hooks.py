"""Measures what our hooks add to a call of each engine of `benchmarks.truth_engines`, and to each of its steps.

CPU time of the calling thread, with the hooks installed and removed in turn. The engine's own work varies more than the hooks
cost, so many rounds are compared in pairs. Needs `.venv-engines`.
"""

from __future__ import annotations

import gc
import random
import tempfile
import time
from pathlib import Path

from benchmarks.truth_engines import ENGINES, Engine
from benchmarks.verdict import Line, estimate_median, make_line
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.registry import load_instrumentors
from tests.support.rings import Recording

ROUNDS, QUICK_ROUNDS, CALLS = 101, 11, 5
ON, OFF, AGAIN = "on", "off", "off again"


def measure(quick: bool) -> list[Line]:
    """Returns a row for each engine: µs per call, and per step where it has several."""
    known = {instrumentor.name: instrumentor for instrumentor in load_instrumentors()}
    recording, lines = Recording(), list[Line]()
    with tempfile.TemporaryDirectory() as folder:
        for make in ENGINES:
            engine = make(Path(folder))
            hooks = [known[name] for name in engine.instrumentors]
            lines.append(_measure_engine(engine, hooks, recording, QUICK_ROUNDS if quick else ROUNDS))
    recording.stop()
    return lines


def _measure_engine(engine: Engine, hooks: list[Instrumentor], recording: Recording, rounds: int) -> Line:
    rng = random.Random(1)
    taken: dict[str, list[float]] = {ON: [], OFF: [], AGAIN: []}
    for number in range(rounds + 3):
        for variant in rng.sample(list(taken), 3):
            for instrumentor in hooks:
                instrumentor.install() if variant == ON else instrumentor.remove()
            spent = _time_calls(engine)
            recording.records()
            if number >= 3:
                taken[variant].append(spent)
    for instrumentor in hooks:
        instrumentor.remove()
    costs = [on - (off + again) / 2 for on, off, again in zip(taken[ON], taken[OFF], taken[AGAIN])]
    bare = estimate_median(taken[OFF]).value
    unit = f"a step, of {engine.steps}" if engine.steps > 1 else "a call"
    estimate = estimate_median(costs).scale_by(1 / 1000 / engine.steps)
    return make_line(
        f"{engine.title}: hooks, {unit}", "µs", estimate, note=f"a call {bare / 1000:.0f} µs without"
    )


def _time_calls(engine: Engine) -> float:
    """Returns the thread's CPU time of a call, ns."""
    gc.disable()
    began = time.thread_time_ns()
    for _ in range(CALLS):
        engine.call()
    taken = time.thread_time_ns() - began
    gc.enable()
    return taken / CALLS
