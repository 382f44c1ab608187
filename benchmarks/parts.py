"""A load for some seconds at a fixed pace: what it came to. What the engine takes without telemetry is taken off."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import machine, neighbours
from benchmarks.engine import Engine, at_pace
from benchmarks.receiver import Receiver

OFFERED = 50_000
"""Step spans a second."""


class Part(NamedTuple):
    """Some seconds of load and what they came to; CPU in ns, without what the bare engine takes."""

    rate: float
    seconds: float
    expected: int
    arrived: dict[str, Any]
    server_cpu: float
    sidecar_cpu: float
    probes: list[int]
    """Of `neighbours`, ns, before each step."""


def part(
    engine: Engine,
    binding: Any,
    receiver: Receiver,
    flush: Callable[[], None],
    sidecar: int,
    seconds: float,
    offered: int = OFFERED,
) -> Part:
    """One part at `offered` step spans a second: a bare half before and after the hooked one, whose CPU is subtracted."""
    bare_taken, _, probes = paced(engine, seconds / 2, offered)
    if binding is None:
        return Part(0, 0, 0, {}, 0, 0, probes)
    binding.put_on()
    steps = engine.steps
    sidecar_cpu = machine.cpu_ns(sidecar) if sidecar else 0
    taken, lasted, more = paced(engine, seconds, offered)
    rate = (engine.steps - steps) * engine.size / lasted
    binding.take_off()
    expected = binding.end_all()  # as many arrived before the part as end after it
    before = time.process_time_ns()
    flush()
    taken += time.process_time_ns() - before
    sidecar_cpu = machine.cpu_ns(sidecar) - sidecar_cpu if sidecar else 0
    bare_after, _, last = paced(engine, seconds / 2, offered)
    engine.answered.clear()
    server_cpu = taken - bare_taken - bare_after
    return Part(rate, lasted, expected, receiver.counted(), server_cpu, sidecar_cpu, probes + more + last)


def paced(engine: Engine, seconds: float, offered: int) -> tuple[int, float, list[int]]:
    """Steps at the pace that offers so many spans a second; process CPU without that of the pauses, the seconds it took, and
    the probe of `neighbours` before each step.

    Who falls behind does not catch up: what was not offered in time is not offered.
    """
    pause = engine.size / offered
    began, everything, this_thread = time.perf_counter(), time.process_time_ns(), time.thread_time_ns()
    stepping, probes = 0, []
    for _ in at_pace(int(seconds / pause), pause):
        probes.append(neighbours.probe())
        before = time.thread_time_ns()
        engine.step()
        stepping += time.thread_time_ns() - before
    others = (time.process_time_ns() - everything) - (time.thread_time_ns() - this_thread)
    return stepping + others, time.perf_counter() - began, probes


def nothing() -> None:
    """In the place of a flush."""
