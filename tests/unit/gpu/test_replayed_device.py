"""Replays recordings of a real GPU: the current code against torch.profiler, and the fake device against the real one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu_verify import DURATION_US, END_US
from otel_infer.gpu.clock_sync import UNMEASURED_DRIFT, ClockMap
from otel_infer.gpu.timeline import DeviceInterval, Timeline
from tests.support.fake_device import FakeDevice, FakeStream
from tests.support.replayed_device import RECORDINGS, ReplayedDevice

ROUNDED_NS = 2000
"""A recording has ms since its first event as float32: ±0.5 µs from 8 s on. The errors of the mark, of its anchor and of the two
anchors of the rate add up."""

each = pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)


def replay_recording(path: Path) -> tuple[list[DeviceInterval], ReplayedDevice, Timeline]:
    device = ReplayedDevice(path)
    clocks = ClockMap(device, device.now)
    timeline = Timeline(device, clocks, now=device.now)
    timeline.warm_up("idle")
    intervals: list[DeviceInterval] = []
    for row in device.recording["rows"]:
        for anchor in device.anchors_until(row["begun_at"]):
            device.stamps(anchor)
            assert clocks.add_anchor()
        device.begin(row)
        timeline.sampler.should_sample(device.now())
        span = timeline.begin_span()
        assert span is not None
        device.time = row["launched_at"]
        assert timeline.end_span(span, intervals.append)
        device.time = row["seen_at"]
        timeline.collect_spans()
    return intervals, device, timeline


def test_at_least_one_recording_exists() -> None:
    assert RECORDINGS


@each
def test_spans_match_the_kernels_of_the_profiler(path: Path) -> None:
    intervals, device, timeline = replay_recording(path)
    rows = device.recording["rows"]
    assert len(intervals) == len(rows) >= 30
    ends = np.array([timed.ended_at - row["kernels_ended"] for timed, row in zip(intervals, rows)]) / 1000
    starts = np.array([timed.started_at - row["kernels_began"] for timed, row in zip(intervals, rows)]) / 1000
    bounds = np.array([timed.bound_ns for timed in intervals]) / 1000
    assert np.percentile(np.abs(ends - starts), 95) <= DURATION_US
    assert np.percentile(np.abs(ends), 95) <= END_US
    assert (np.maximum(np.abs(starts), np.abs(ends)) <= bounds).all()
    assert timeline.violations == 0


@each
def test_replay_matches_the_intervals_timed_on_device(path: Path) -> None:
    intervals, device, _ = replay_recording(path)
    for timed, row in zip(intervals, device.recording["rows"]):
        assert abs(timed.started_at - row["timed"]["started_at"]) <= ROUNDED_NS
        assert abs(timed.ended_at - row["timed"]["ended_at"]) <= ROUNDED_NS


@each
def test_fake_device_matches_the_real_one(path: Path) -> None:
    """Compares the tick, the clock drift, the distance of marks and the width of an anchor."""
    device = ReplayedDevice(path)
    recording = device.recording
    fake = FakeDevice(mark_ns=round(recording["own_ms"] * 1e6))
    clocks = ClockMap(fake, fake.now)
    timeline = Timeline(fake, clocks, now=fake.now)
    timeline.warm_up(FakeStream())
    assert timeline.mark_overhead_ms == pytest.approx(recording["own_ms"], abs=fake.tick_ns / 1e6)
    clocks.add_anchor()
    assert clocks.anchor is not None
    halves = [(high - low) / 2 for low, high, _ in recording["anchors"]]
    assert 0.3 < clocks.anchor.bound_ns / np.median(halves) < 3
    (first, *_, last) = recording["anchors"]
    host_ns, device_ns = (last[0] + last[1] - first[0] - first[1]) / 2, (last[2] - first[2]) * 1e6
    assert abs(host_ns / device_ns - 1) < UNMEASURED_DRIFT
    lengths = [(row["end_ms"] - row["start_ms"]) * 1e6 for row in recording["rows"]]
    # float32 has ±0.5 µs at some seconds, so only the distance of two marks shows the tick.
    assert round(recording["own_ms"] * 1e6) % fake.tick_ns <= 1
    assert min(lengths) > 100_000
