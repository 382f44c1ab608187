"""Compares steps of a decoder on a GPU with and without marks, in turns of a few steps."""

from __future__ import annotations

import functools
import time

import numpy as np
import torch

from benchmarks import verdict
from benchmarks.gpu_model import Decoder, Step
from benchmarks.verdict import Gate, Line, make_exact, make_line
from otel_infer import _clock
from otel_infer.gpu.clock_sync import ClockMap
from otel_infer.gpu.device import TorchDevice
from otel_infer.gpu.timeline import DeviceInterval, Timeline

LAYERS = 10
"""A step takes about 1 ms on an H100 as a graph."""
TURN = {"graph": 40, "eager": 8}
SECONDS = {"graph": 15.0, "eager": 30.0}
"""Duration of each kind. Launches kernel by kernel depend on the host's neighbours in every step."""
BARE, AGAIN, MARKED = range(3)


@functools.cache
def _make_decoder(batch: int) -> Decoder:
    return Decoder(LAYERS, batch)


class Loop:
    """An engine's loop: it launches a step, and waits for its tokens (`ahead`: for those of the previous step)."""

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
        self.timed = 0
        self._marked_until = 0

    def run_turn(self, steps: int, marked: bool) -> float:
        """Runs a turn and returns µs per step."""
        torch.cuda.synchronize()
        began = _clock.now()
        if marked:
            self._skip_time(began - self._marked_until)
        for number in range(steps):
            if marked:
                self._run_marked(number)
            else:
                self._step()
                self._wait_for_tokens(number)
        torch.cuda.synchronize()
        taken = (_clock.now() - began) / steps / 1000
        self._timeline.collect_spans()
        if marked:
            self._clocks.add_anchor()
            self._marked_until = _clock.now()
        return taken

    def _skip_time(self, idle_ns: int) -> None:
        """Continues the sampler where its last turn ended: the time since then pays for no marks."""
        sampler = self._timeline.sampler
        sampler._paid_until += idle_ns
        sampler._pair_begun_at += idle_ns
        sampler._update_due()

    def _run_marked(self, number: int) -> None:
        now, timeline = _clock.now, self._timeline
        at = now()
        span = timeline.begin_span() if timeline.sampler.should_sample(at) else None
        begun = now()
        self._step()
        launched = now()
        if span is not None:
            timeline.end_span(span, self._count_timed)
        ended = now()
        self._wait_for_tokens(number)
        cost = begun - at + ended - launched
        self.costs.append(cost)
        if span is not None:
            self.marked.append((begun - at, ended - launched))

    def _count_timed(self, interval: DeviceInterval) -> None:
        self.timed += 1

    def _wait_for_tokens(self, number: int) -> None:
        if not self._ahead:
            self._decoder.wait_for_token()
            return
        self._events[number % 2].record()
        if number:
            self._events[(number - 1) % 2].synchronize()


def make_lines(batch: int, kind: str, ahead: bool, gates: tuple[float, float]) -> list[Line]:
    """Returns the rows of one kind of step."""
    turns, loop = measure_turns(batch, kind, ahead)
    bare = [(first + second) / 2 for first, second in zip(turns[BARE], turns[AGAIN])]
    slower = verdict.estimate_median([marked / usual - 1 for marked, usual in zip(turns[MARKED], bare)])
    difference = verdict.estimate_median(
        [second / first - 1 for first, second in zip(turns[BARE], turns[AGAIN])]
    )
    claim = f"{kind}, batch {batch}, {'one step ahead' if ahead else 'waiting for each'}"
    note = f"a bare step takes {np.median(bare):.0f} µs; {len(bare)} turns; {len(loop.marked)} of {len(loop.costs)} marked, {loop.timed} timed"
    costs = [cost / 1000 for cost in loop.costs]
    begin, end = (verdict.estimate_median([pair[side] / 1000 for pair in loop.marked]) for side in (0, 1))
    return [
        make_line(
            f"{claim}: step longer by",
            "%",
            slower.scale_by(100),
            Gate(gates[0]),
            verdict.make_control(difference),
            note,
        ),
        make_line(
            f"{claim}: the host's cost a step, p50", "µs", verdict.estimate_median(costs), Gate(gates[1])
        ),
        make_line(f"{claim}: the host's cost a step, mean", "µs", make_exact(float(np.mean(costs)))),
        make_line(f"{claim}: of a marked step, before it is launched", "µs", begin),
        make_line(f"{claim}: of a marked step, while the device is at it", "µs", end),
    ]


def measure_turns(batch: int, kind: str, ahead: bool) -> tuple[dict[int, list[float]], Loop]:
    """Returns µs per step of each turn by kind; the three kinds take turns in random order."""
    decoder = _make_decoder(batch)
    loop = Loop(decoder, decoder.make_graph() if kind == "graph" else decoder.make_eager(), ahead)
    for marked in (False, True):
        loop.run_turn(TURN[kind], marked)
    loop.costs.clear()
    loop.marked.clear()
    loop.timed = 0
    turns: dict[int, list[float]] = {BARE: [], AGAIN: [], MARKED: []}
    rng = np.random.default_rng(batch)
    until = time.monotonic() + SECONDS[kind]
    while time.monotonic() < until:
        for variant in rng.permutation(3):
            turns[int(variant)].append(loop.run_turn(TURN[kind], variant == MARKED))
    return turns, loop
