"""Runs a load at a fixed pace and measures its CPU time, without the CPU time of the engine itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import machine, neighbours
from benchmarks.engine import Engine, iterate_at_pace
from benchmarks.receiver import Receiver

OFFERED = 50_000
"""Step spans per second."""


class Part(NamedTuple):
    """The result of some seconds of load; CPU in ns, without that of the bare engine."""

    rate: float
    seconds: float
    expected: int
    arrived: dict[str, Any]
    server_cpu: float
    sidecar_cpu: float
    probes: list[int]
    """Probes of `neighbours` before each step, ns."""


def measure_part(
    engine: Engine,
    binding: Any,
    receiver: Receiver,
    flush: Callable[[], None],
    sidecar: int,
    seconds: float,
    offered: int = OFFERED,
) -> Part:
    """Measures one part at `offered` step spans per second. A bare half before and one after it are subtracted."""
    bare_cpu, _, probes = run_paced(engine, seconds / 2, offered)
    binding.switch_on()
    steps = engine.steps
    sidecar_cpu = machine.read_cpu_ns(sidecar) if sidecar else 0
    server_cpu, lasted, more_probes = run_paced(engine, seconds, offered)
    rate = (engine.steps - steps) * engine.size / lasted
    binding.switch_off()
    expected = binding.end_requests()  # as many arrived before the part as end after it
    before = time.process_time_ns()
    flush()
    server_cpu += time.process_time_ns() - before
    sidecar_cpu = machine.read_cpu_ns(sidecar) - sidecar_cpu if sidecar else 0
    bare_cpu_after, _, last_probes = run_paced(engine, seconds / 2, offered)
    engine.answered.clear()
    return Part(
        rate,
        lasted,
        expected,
        receiver.read_counts(),
        server_cpu - bare_cpu - bare_cpu_after,
        sidecar_cpu,
        probes + more_probes + last_probes,
    )


def run_paced(engine: Engine, seconds: float, offered: int) -> tuple[int, float, list[int]]:
    """Runs steps at a pace of `offered` spans per second. Delays are not caught up on.

    Returns the CPU time of the process without the pauses (ns), the duration (s), and the probe before each step (ns).
    """
    pause = engine.size / offered
    began, process_cpu, thread_cpu = time.perf_counter(), time.process_time_ns(), time.thread_time_ns()
    stepping, probes = 0, []
    for _ in iterate_at_pace(int(seconds / pause), pause):
        probes.append(neighbours.time_probe())
        before = time.thread_time_ns()
        engine.run_step()
        stepping += time.thread_time_ns() - before
    others = (time.process_time_ns() - process_cpu) - (time.thread_time_ns() - thread_cpu)
    return stepping + others, time.perf_counter() - began, probes


def do_nothing() -> None:
    """Replaces a flush."""
