"""Steps of a decoder on a GPU with marks and without, in turns of a few."""

from __future__ import annotations

import functools
import time

import numpy as np
import torch

from benchmarks import verdict
from benchmarks.gpu_model import Decoder, Step
from benchmarks.verdict import Gate, Line, exactly, line
from otel_infer import _clock
from otel_infer.gpu.clock_sync import ClockMap
from otel_infer.gpu.device import TorchDevice
from otel_infer.gpu.timeline import DeviceInterval, Timeline

LAYERS = 10
"""A step of it takes about 1 ms on an H100 as a graph."""
TURN = {"graph": 40, "eager": 8}
SECONDS = {"graph": 15.0, "eager": 60.0}
"""For each: whoever launches kernel by kernel has the host's neighbours in every step."""
BARE, AGAIN, MARKED = range(3)


@functools.cache
def _decoder(batch: int) -> Decoder:
    return Decoder(LAYERS, batch)


class Loop:
    """An engine's loop: launches a step, and waits for its tokens (`ahead`: for those of the step before)."""

    def __init__(self, decoder: Decoder, step: Step, ahead: bool) -> None:
        self._decoder, self._step, self._ahead = decoder, step, ahead
        device = TorchDevice(torch, "cuda", torch.cuda.current_device())
        self._clocks = ClockMap(device)
        self._clocks.add_anchor()
        self._timeline = Timeline(device, self._clocks)
        self._timeline.warm_up(device.create_idle_stream())
        self._events = [torch.cuda.Event() for _ in range(2)]
        self.costs: list[int] = []
        self.marked: list[tuple[int, int]] = []
        self.told = 0

    def turn(self, steps: int, marked: bool) -> float:
        """µs a step."""
        torch.cuda.synchronize()
        self._timeline.sampler.reset_period()
        began = _clock.now()
        for number in range(steps):
            if marked:
                self._marked(number)
            else:
                self._step()
                self._wait(number)
        torch.cuda.synchronize()
        taken = (_clock.now() - began) / steps / 1000
        self._timeline.collect_spans()
        if marked:
            self._clocks.add_anchor()
        return taken

    def _marked(self, number: int) -> None:
        now, timeline = _clock.now, self._timeline
        at = now()
        span = timeline.begin_span() if timeline.sampler.should_sample() else None
        begun = now()
        self._step()
        launched = now()
        if span is not None:
            timeline.end_span(span, self._count)
        ended = now()
        self._wait(number)
        cost = begun - at + ended - launched
        self.costs.append(cost)
        if span is not None:
            self.marked.append((begun - at, ended - launched))

    def _count(self, timed: DeviceInterval) -> None:
        self.told += 1

    def _wait(self, number: int) -> None:
        if not self._ahead:
            self._decoder.token()
            return
        self._events[number % 2].record()
        if number:
            self._events[(number - 1) % 2].synchronize()


def measured(batch: int, kind: str, ahead: bool, gates: tuple[float, float]) -> list[Line]:
    """The lines of one kind of step."""
    found, loop = taken(batch, kind, ahead)
    bare = [(one + other) / 2 for one, other in zip(found[BARE], found[AGAIN])]
    slower = verdict.median([marked / one - 1 for marked, one in zip(found[MARKED], bare)])
    itself = verdict.median([one / other - 1 for one, other in zip(found[AGAIN], found[BARE])])
    said = f"{kind}, batch {batch}, {'one step ahead' if ahead else 'waiting for each'}"
    note = f"a bare step takes {np.median(bare):.0f} µs; {len(bare)} turns; {len(loop.marked)} of {len(loop.costs)} marked, {loop.told} told"
    costs = [cost / 1000 for cost in loop.costs]
    begin, end = (verdict.median([pair[at] / 1000 for pair in loop.marked]) for at in (0, 1))
    return [
        line(
            f"{said}: step longer by",
            "%",
            slower.scaled(100),
            Gate(gates[0]),
            verdict.against_itself(itself),
            note,
        ),
        line(f"{said}: the host's cost a step, p50", "µs", verdict.median(costs), Gate(gates[1])),
        line(f"{said}: the host's cost a step, mean", "µs", exactly(float(np.mean(costs)))),
        line(f"{said}: of a marked step, before it is launched", "µs", begin),
        line(f"{said}: of a marked step, while the device is at it", "µs", end),
    ]


def taken(batch: int, kind: str, ahead: bool) -> tuple[dict[int, list[float]], Loop]:
    """µs a step of each turn, by who had it; the three take turns in an order drawn anew each time."""
    decoder = _decoder(batch)
    loop = Loop(decoder, decoder.graph() if kind == "graph" else decoder.eager(), ahead)
    for marked in (False, True):
        loop.turn(TURN[kind], marked)
    loop.costs.clear()
    loop.marked.clear()
    loop.told = 0
    found: dict[int, list[float]] = {BARE: [], AGAIN: [], MARKED: []}
    chance = np.random.default_rng(batch)
    until = time.monotonic() + SECONDS[kind]
    while time.monotonic() < until:
        for which in chance.permutation(3):
            found[int(which)].append(loop.turn(TURN[kind], which == MARKED))
    return found, loop
