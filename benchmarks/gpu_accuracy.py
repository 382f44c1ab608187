"""Spans of the device against what torch.profiler says of the same kernels; and the recording that ordinary tests replay.

Work is queued in front of each stage, so that its kernels follow the first mark at once: else the time in which the host had
not launched them yet would count as an error, and is none.
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
"""Of the device's clock, some 50 ms: longer than the host takes to launch any stage under the profiler."""


class Row(NamedTuple):
    """A stage: host instants in ns, `start_ms` and `end_ms` of its marks since the first event of the recording, and when its
    kernels began and ended by the profiler, host ns."""

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
    """`anchors`: (before, after) on the host, and ms since the first event; `own_ms`: what marks take themselves."""

    rows: list[Row]
    anchors: list[tuple[int, int, float]]
    own_ms: float

    def recording(self) -> dict[str, Any]:
        """As JSON has it."""
        rows = [{**row._asdict(), "timed": row.timed._asdict()} for row in self.rows]
        return {"own_ms": self.own_ms, "anchors": self.anchors, "rows": rows}


def measure() -> Accuracy:
    """All kinds of stages in turn."""
    decoder = Decoder(layers=8, batch=8)
    stages = {"prefill": decoder.prefill(), "eager": decoder.eager(), "graph": decoder.graph()}
    for step in stages.values():
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    bench = _Bench()
    before = _kineto_offset()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for number in range(REPEATS):
            for kind, step in stages.items():
                bench.stage(f"{kind} {number}", step)
            bench.anchor()
        torch.cuda.synchronize()
    offset = (before + _kineto_offset()) // 2
    return bench.against(_kernels(profiled, set(bench.said)), offset)


class _Bench:
    def __init__(self) -> None:
        self._device = TorchDevice(torch, "cuda", torch.cuda.current_device())
        self._clocks = ClockMap(self._device)
        self._timeline = Timeline(self._device, self._clocks)
        self._timeline.warm_up(self._device.create_idle_stream())
        self._stream, self._base = self._device.current_stream(), self._device.create_event()
        self._base.record(self._stream)
        torch.cuda.synchronize()
        self.said: dict[str, tuple[Any, ...]] = {}
        self._anchors: list[tuple[int, int, float]] = []
        self.anchor()
        time.sleep(0.3)
        self.anchor()

    def anchor(self) -> None:
        self._clocks.add_anchor()
        anchor = self._clocks.anchor
        assert anchor is not None
        low, high = anchor.host_at - anchor.bound_ns, anchor.host_at + anchor.bound_ns
        self._anchors.append((low, high, self._base.elapsed_time(anchor.event)))

    def stage(self, name: str, step: Step) -> None:
        torch.cuda._sleep(AHEAD_CYCLES)
        told: list[DeviceInterval] = []
        with record_function(name):
            span = self._timeline.begin_span()
            assert span is not None
            step()
            assert self._timeline.end_span(span, told.append)
        begun_at, launched_at = span.begun_at, span.launched_at
        torch.cuda.synchronize()
        seen_at = _clock.now()
        marks = [self._base.elapsed_time(event) for event in (span.start, span.end)]
        assert self._timeline.collect_spans() == 1
        self.said[name] = (begun_at, launched_at, seen_at, *marks, told[0])

    def against(self, kernels: dict[str, tuple[int, int]], offset: int) -> Accuracy:
        rows = []
        for name, (*told, timed) in self.said.items():
            if name in kernels:
                began, ended = (at - offset for at in kernels[name])
                rows.append(Row(name.split()[0], *told, began, ended, timed))
        return Accuracy(rows, self._anchors, self._timeline.mark_overhead_ms)


def _kineto_offset() -> int:
    """Unix ns minus ns of our clock, at their closest of many tries; Kineto tells unix ns."""
    tries = []
    for _ in range(200):
        before = _clock.now()
        wall = _clock.wall_now()
        after = _clock.now()
        tries.append((after - before, wall - (before + after) // 2))
    return min(tries)[1]


def _kernels(profiled: Any, names: set[str]) -> dict[str, tuple[int, int]]:
    """When the kernels of each of these began and ended on the device, unix ns."""
    found = {}
    for event in profiled.profiler.kineto_results.events():
        if event.name() in names and "CUDA" in str(event.device_type()):
            found[event.name()] = (event.start_ns(), event.start_ns() + event.duration_ns())
    return found


def errors(rows: list[Row]) -> dict[str, Any]:
    """µs, one array each: of the duration, of the start and of the end; and by how much they are outside of their bound."""
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
