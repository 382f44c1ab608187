"""Compares device times with the kernels of torch.profiler, and writes the recording that ordinary tests replay.

Work is queued before each stage, so that its kernels follow the first mark at once. Otherwise the launch time of the
kernels would count as an error.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.gpu_model import Decoder, Step
from otel_infer import _clock
from otel_infer.gpu.clock_sync import ClockMap
from otel_infer.gpu.device import TorchDevice
from otel_infer.gpu.timeline import DeviceInterval, Timeline

REPEATS = 24
AHEAD_CYCLES = 100_000_000
"""Cycles of the device's clock, about 50 ms: longer than the launch of any stage under the profiler."""


class Row(NamedTuple):
    """A stage: host instants (ns), `start_ms` and `end_ms` of its marks since the first event of the recording, and
    the start and end of its kernels by the profiler (host ns)."""

    kind: str
    begun_at: int
    launched_at: int
    seen_at: int
    start_ms: float
    end_ms: float
    kernels_began: int
    kernels_ended: int
    timed: DeviceInterval


class Accuracy(NamedTuple):
    """`anchors`: (before, after) on the host, and ms since the first event. `own_ms`: time that a mark takes."""

    rows: list[Row]
    anchors: list[tuple[int, int, float]]
    own_ms: float

    def make_recording(self) -> dict[str, Any]:
        """Returns the JSON form."""
        rows = [{**row._asdict(), "timed": row.timed._asdict()} for row in self.rows]
        return {"own_ms": self.own_ms, "anchors": self.anchors, "rows": rows}


def measure() -> Accuracy:
    """Runs all kinds of stages in turn."""
    decoder = Decoder(layers=8, batch=8)
    steps = {"prefill": decoder.make_prefill(), "eager": decoder.make_eager(), "graph": decoder.make_graph()}
    for step in steps.values():
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    recorder = _Recorder()
    before = _measure_kineto_offset()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for number in range(REPEATS):
            for kind, step in steps.items():
                recorder.record_stage(f"{kind} {number}", step)
            recorder.add_anchor()
        torch.cuda.synchronize()
    offset = (before + _measure_kineto_offset()) // 2
    return recorder.compare_with(_read_kernels(profiled, set(recorder.stages)), offset)


class _Recorder:
    def __init__(self) -> None:
        self._device = TorchDevice(torch, "cuda", torch.cuda.current_device())
        self._clocks = ClockMap(self._device)
        self._timeline = Timeline(self._device, self._clocks)
        self._timeline.warm_up(self._device.create_idle_stream())
        self._stream, self._base = self._device.current_stream(), self._device.create_event()
        self._base.record(self._stream)
        torch.cuda.synchronize()
        self.stages: dict[str, tuple[Any, ...]] = {}
        self._anchors: list[tuple[int, int, float]] = []
        self.add_anchor()
        time.sleep(0.3)
        self.add_anchor()

    def add_anchor(self) -> None:
        self._clocks.add_anchor()
        anchor = self._clocks.anchor
        assert anchor is not None
        low, high = anchor.host_at - anchor.bound_ns, anchor.host_at + anchor.bound_ns
        self._anchors.append((low, high, self._base.elapsed_time(anchor.event)))

    def record_stage(self, name: str, step: Step) -> None:
        torch.cuda._sleep(AHEAD_CYCLES)
        intervals: list[DeviceInterval] = []
        with record_function(name):
            span = self._timeline.begin_span()
            assert span is not None
            step()
            assert self._timeline.end_span(span, intervals.append)
        begun_at, launched_at = span.begun_at, span.launched_at
        torch.cuda.synchronize()
        seen_at = _clock.now()
        marks = [self._base.elapsed_time(event) for event in (span.start, span.end)]
        assert self._timeline.collect_spans() == 1
        self.stages[name] = (begun_at, launched_at, seen_at, *marks, intervals[0])

    def compare_with(self, kernels: dict[str, tuple[int, int]], offset: int) -> Accuracy:
        rows = []
        for name, (*instants, timed) in self.stages.items():
            if name in kernels:
                began, ended = (at - offset for at in kernels[name])
                rows.append(
                    Row(name.split()[0], *instants, kernels_began=began, kernels_ended=ended, timed=timed)
                )
        return Accuracy(rows, self._anchors, self._timeline.mark_overhead_ms)


def _measure_kineto_offset() -> int:
    """Returns unix ns (of Kineto) minus ns of our clock, from the closest pair of many reads."""
    tries = []
    for _ in range(200):
        before = _clock.now()
        wall = _clock.wall_now()
        after = _clock.now()
        tries.append((after - before, wall - (before + after) // 2))
    return min(tries)[1]


def _read_kernels(profiled: Any, names: set[str]) -> dict[str, tuple[int, int]]:
    """Returns the start and end of each stage's kernels on the device, unix ns."""
    times = {}
    for event in profiled.profiler.kineto_results.events():
        if event.name() in names and "CUDA" in str(event.device_type()):
            times[event.name()] = (event.start_ns(), event.start_ns() + event.duration_ns())
    return times


def compute_errors(rows: list[Row]) -> dict[str, Any]:
    """Returns the errors of duration, start and end (µs), the bounds, and how far errors are outside of them."""
    duration = [
        row.timed.ended_at - row.timed.started_at - (row.kernels_ended - row.kernels_began) for row in rows
    ]
    start = [row.timed.started_at - row.kernels_began for row in rows]
    end = [row.timed.ended_at - row.kernels_ended for row in rows]
    bounds = [row.timed.bound_ns for row in rows]
    columns = {
        name: np.array(column) / 1000
        for name, column in (("duration", duration), ("start", start), ("end", end))
    }
    outside = np.maximum(np.abs(columns["start"]), np.abs(columns["end"])) - np.array(bounds) / 1000
    return {**columns, "outside": outside, "bound": np.array(bounds) / 1000}
