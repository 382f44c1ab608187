"""What a token costs of which nothing is kept, by the reason why: CPU of the server and of the sidecar.

As in `throughput` an engine without work of its own steps at a fixed pace. Where step spans are switched off, or the caller
does not sample, none may come out; far over the default budget, no more than the budget.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from benchmarks import machine
from benchmarks.engine import Engine
from benchmarks.ours import Binding, Exporting
from benchmarks.parts import OFFERED, Part, part
from benchmarks.receiver import Receiver
from benchmarks.verdict import Gate, Line, exactly, line, median
from otel_infer.config.environment import Config
from otel_infer.export.sampling.tail_sampler import BURST_SECONDS

BUDGET = Config().step_budget
OVER = 10


class Case(NamedTuple):
    """`steps`: OTEL_INFER_STEPS. `offered`: step spans a second. `budget`: of those, how many a second may come out."""

    said: str
    steps: str
    sampled: bool
    offered: int
    budget: int


CASES = (
    Case("steps off", "off", True, OFFERED, 0),
    Case("sampled out", "auto", False, OFFERED, 0),
    Case(f"{OVER}× over the budget", "auto", True, BUDGET * OVER, BUDGET),
)


def measure(quick: bool) -> list[Line]:
    """Each case with a sidecar of its own."""
    seconds, parts = (0.8, 2) if quick else (8.0, 5)
    rows = []
    with Receiver() as receiver:
        _, others = machine.cores()
        machine.pin_process(receiver.pid, others)
        engine = Engine(python_us=0, wait_us=0)
        for case in CASES:
            with Exporting(receiver.endpoint, steps=case.steps) as exporting:
                machine.pin_apart()
                began = time.perf_counter()
                found = [
                    part(
                        engine,
                        Binding(engine, case.sampled),
                        receiver,
                        exporting.flush,
                        exporting.pid,
                        seconds,
                        case.offered,
                    )
                    for _ in range(parts)
                ]
                rows += lines_of(case, found, time.perf_counter() - began)
    return rows


def lines_of(case: Case, parts: list[Part], seconds: float) -> list[Line]:
    """CPU per token, and whether what came out is what may."""
    claim, tokens = f"CPU per token, {case.said}", sum(part.expected for part in parts)
    kept = sum(part.arrived["steps"] for part in parts)
    allowed = int(case.budget * (seconds + BURST_SECONDS))
    note = f"{tokens:,} tokens, {kept:,} step spans"
    server, sidecar = (
        median([cpu / part.expected for cpu, part in zip(used, parts)]).scaled(1 / 1000)
        for used in ([part.server_cpu for part in parts], [part.sidecar_cpu for part in parts])
    )
    return [
        line(f"{claim}: server", "µs", server, note=note),
        line(f"{claim}: sidecar", "µs", sidecar),
        line(f"{claim}: step spans that came out", "", exactly(kept), Gate(allowed)),
    ]
