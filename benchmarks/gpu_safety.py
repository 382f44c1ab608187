"""Checks that GPU timing neither synchronizes with the device nor breaks captures of CUDA graphs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.verdict import Gate, Line, make_exact, make_line
from otel_infer import _clock
from otel_infer.gpu import graph_capture
from otel_infer.gpu.clock_sync import ClockMap
from otel_infer.gpu.device import TorchDevice
from otel_infer.gpu.timeline import Timeline


def check_safety() -> list[Line]:
    """Checks for synchronization, with torch's sync debugging, and for broken captures of graphs."""
    return [*_check_no_sync(), *_check_captures()]


def _check_no_sync() -> list[Line]:
    device = TorchDevice(torch, "cuda", 0)
    mapped = ClockMap(device)
    timeline = Timeline(device, mapped)
    mapped.add_anchor()
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    torch.cuda.set_sync_debug_mode("error")
    began, failed = _clock.now(), 0
    try:
        for _ in range(50):
            span = timeline.begin_span()
            assert span is not None
            timeline.end_span(span, lambda timed: None)
            timeline.collect_spans()
    except RuntimeError:
        failed = 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    taken, is_busy = (_clock.now() - began) / 1e6, not device.current_stream().query()
    torch.cuda.synchronize()
    claim = "50 spans while the device is busy for 200 ms"
    return [
        make_line(f"{claim}: errors under sync debugging", "", make_exact(float(failed)), Gate(0)),
        make_line(f"{claim}: the host takes", "ms", make_exact(taken), Gate(50)),
        make_line(f"{claim}: the device was no longer busy", "", make_exact(float(not is_busy)), Gate(0)),
    ]


def _check_captures() -> list[Line]:
    lines = []
    for name, announced in (("announced", True), ("that nobody told of", False)):
        for mode in ("global", "thread_local"):
            broken, harvests = _count_broken_captures(mode, announced)
            claim = f"captures {name}, {mode}: broken, of 5"
            lines.append(
                make_line(
                    claim, "", make_exact(float(broken)), Gate(0), note=f"{harvests} harvests meanwhile"
                )
            )
    return lines


def _count_broken_captures(mode: str, announced: bool) -> tuple[int, int]:
    """Returns the broken captures, while another thread, prepared as otel_infer's is, collects spans and adds
    anchors at full speed."""
    broken, data = 0, torch.zeros(1024, device="cuda")
    with _harvest_meanwhile() as count:
        for _ in range(5):
            graph = torch.cuda.CUDAGraph()
            data.zero_()
            torch.cuda.synchronize()
            try:
                if announced:
                    graph_capture.begin_capture()
                with torch.cuda.graph(graph, capture_error_mode=mode):
                    for _ in range(50):
                        data.add_(1)
                        time.sleep(0.001)
                graph.replay()
                torch.cuda.synchronize()
                broken += float(data[0]) != 50.0
            except RuntimeError:
                broken += 1
            finally:
                if announced:
                    graph_capture.end_capture()
        return broken, count[0]


@contextmanager
def _harvest_meanwhile() -> Iterator[list[int]]:
    device, over, count = TorchDevice(torch, "cuda", 0), threading.Event(), [0]
    mapped = ClockMap(device)
    mapped.add_anchor()
    timeline = Timeline(device, mapped)
    timeline.warm_up(device.create_idle_stream())
    torch.cuda.synchronize()

    def harvest() -> None:
        device.prepare_thread()
        busy = device.create_idle_stream()
        while not over.wait(0.0005):
            if graph_capture.open_captures:
                continue
            count[0] += 1
            span = timeline.begin_span(busy)
            if span is not None:
                timeline.end_span(span, lambda timed: None)
            timeline.collect_spans()
            if count[0] % 20 == 0:
                mapped.add_anchor()

    thread = threading.Thread(target=harvest, daemon=True)
    thread.start()
    try:
        yield count
    finally:
        over.set()
        thread.join(5)
