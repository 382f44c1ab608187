"""Device spans on a fake device: no synchronization, errors within the bound, and behaviour on failures."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_infer.gpu import graph_capture
from otel_infer.gpu.clock_sync import ClockMap
from otel_infer.gpu.timeline import MAX_ERRORS, DeviceInterval, Timeline
from tests.support.fake_device import FakeDevice, FakeEvent, FakeStream

MS = 1_000_000
MAX_CALLS = {"capturing": 1, "record": 2, "query": 2, "elapsed": 2}
"""Maximum number of driver calls per span."""


class Bench:
    """A device, an anchored clock and a timeline."""

    def __init__(self, device: FakeDevice, capacity: int = 64) -> None:
        self.device, self.clocks = device, ClockMap(device, device.now)
        self.timeline = Timeline(device, self.clocks, capacity, device.now)
        self.timeline.warm_up(FakeStream())
        self.clocks.add_anchor()
        self.intervals: list[DeviceInterval] = []

    def step(self, length_ns: int, host_ns: int = 0, waits: bool = True) -> tuple[int, int] | None:
        """Runs an engine step. Returns the true begin and end of its work; None if it was not timed."""
        self.timeline.sampler.should_sample(self.device.now())
        span = self.timeline.begin_span()
        work = self.device.launch(length_ns)
        self.device.pass_time(host_ns)
        if span is None or not self.timeline.end_span(span, self.intervals.append):
            timed_work = None
        else:
            timed_work = work
        if waits:
            self.device.wait_for(self.device.main)
            self.timeline.collect_spans()  # as the worker does
        return timed_work


@pytest.fixture(autouse=True)
def _no_capture() -> Iterator[None]:
    graph_capture.open_captures = 0
    yield
    graph_capture.open_captures = 0


def test_step_has_bounded_driver_calls_and_no_synchronization() -> None:
    bench = Bench(FakeDevice())
    bench.step(5 * MS)
    bench.device.calls = Counter()
    for _ in range(1000):
        bench.step(5 * MS)
    assert len(bench.intervals) == 1001
    calls = bench.device.calls
    assert {name: calls[name] / 1000 <= maximum for name, maximum in MAX_CALLS.items()} == dict.fromkeys(
        MAX_CALLS, True
    )
    assert set(calls) <= set(MAX_CALLS)  # no event creation and no synchronization


def test_span_has_duration_queue_time_and_preceding_gap() -> None:
    device = FakeDevice(call_ns=1000, launch_ns=4000)
    bench = Bench(device)
    bench.step(5 * MS)
    ended = device.main.free_at
    device.pass_time(3 * MS)  # the host schedules the next step
    began, until = bench.step(2 * MS, host_ns=500_000) or (0, 0)
    timed = bench.intervals[-1]
    assert abs(timed.ended_at - timed.started_at - 2 * MS) < 10_000  # from mark to mark, launches included
    assert abs(timed.ended_at - until) < timed.bound_ns + 10_000
    assert abs(timed.gap_ns - (began - ended)) < 10_000
    assert timed.queued_ns < 10_000
    assert abs(timed.launched_ns - 502_000) < 3000


def test_steps_launched_ahead_have_order_and_queue_time() -> None:
    bench = Bench(FakeDevice())
    bench.step(MS)
    for _ in range(20):
        bench.step(5 * MS, waits=False)
    assert bench.timeline.collect_spans() == 0
    bench.device.wait_for(bench.device.main)
    assert bench.timeline.collect_spans() == 20
    queued = [timed.queued_ns for timed in bench.intervals[1:]]
    assert queued == sorted(queued)
    assert abs(queued[-1] - 19 * 5 * MS) < MS
    assert all(timed.gap_ns < 10_000 for timed in bench.intervals[2:])


def test_work_on_another_stream_does_not_change_steps() -> None:
    def timed(copies: bool) -> tuple[list[DeviceInterval], list[DeviceInterval], int]:
        bench, copied, aside = Bench(FakeDevice(mark_ns=0)), list[DeviceInterval](), FakeStream()
        for _ in range(50):
            if copies:
                span = bench.timeline.begin_span(aside, is_step=False)
                bench.device.launch(2 * MS, aside)
                assert span is not None and bench.timeline.end_span(span, copied.append)
            bench.step(5 * MS)
        bench.device.wait_for(aside)
        bench.timeline.collect_spans()
        return bench.intervals, copied, bench.timeline.sampler.wait_ns

    steps, copied, wait = timed(copies=True)
    alone, _, wait_alone = timed(copies=False)
    assert len(copied) == len(steps) == len(alone) == 50
    assert wait == wait_alone
    assert all(abs(item.ended_at - item.started_at - 2 * MS) < 10_000 for item in copied)
    assert all(item.gap_ns == -1 for item in copied)
    assert all(item.gap_ns >= 0 for item in steps[1:])


def test_other_work_between_steps_is_not_a_gap() -> None:
    bench = Bench(FakeDevice(mark_ns=0))
    for _ in range(5):
        bench.step(MS)
        span = bench.timeline.begin_span(bench.device.main, is_step=False)
        bench.device.launch(5 * MS)
        assert span is not None and bench.timeline.end_span(span, lambda timed: None)
    bench.device.wait_for(bench.device.main)
    bench.timeline.collect_spans()
    assert [timed.gap_ns for timed in bench.intervals] == [-1] * 5


def test_steps_beyond_event_capacity_are_dropped_and_counted() -> None:
    bench = Bench(FakeDevice(), capacity=8)
    timed = [bench.step(5 * MS, waits=False) for _ in range(20)]
    assert [work is not None for work in timed] == [True] * 8 + [False] * 12
    assert bench.timeline.dropped == 12
    bench.device.wait_for(bench.device.main)
    assert bench.timeline.collect_spans() == 8
    assert bench.step(5 * MS) is not None


def test_device_is_not_called_during_graph_capture() -> None:
    bench = Bench(FakeDevice())
    bench.step(MS, waits=False)
    bench.device.calls.clear()
    graph_capture.begin_capture()
    bench.device.in_capture = True
    assert bench.step(MS) is None
    assert bench.timeline.collect_spans() == 0
    assert not bench.device.was_broken
    assert not bench.device.calls
    graph_capture.end_capture()
    bench.device.in_capture = False
    assert bench.timeline.collect_spans() == 1


def test_unannounced_capture_is_detected_before_recording_an_event() -> None:
    bench = Bench(FakeDevice())
    bench.device.in_capture = True
    bench.device.calls.clear()
    assert bench.timeline.begin_span() is None
    assert bench.device.calls == {"capturing": 1}


def test_span_around_a_finished_capture_is_timed() -> None:
    bench = Bench(FakeDevice())
    span = bench.timeline.begin_span()
    assert span is not None
    graph_capture.begin_capture()
    graph_capture.end_capture()
    assert bench.timeline.end_span(span, bench.intervals.append)
    bench.device.wait_for(bench.device.main)
    assert bench.timeline.collect_spans() == 1


def test_span_ending_during_capture_is_dropped() -> None:
    """Its events return to the pool."""
    bench = Bench(FakeDevice(), capacity=1)
    span = bench.timeline.begin_span()
    assert span is not None
    graph_capture.begin_capture()
    assert not bench.timeline.end_span(span, bench.intervals.append)
    graph_capture.end_capture()
    assert bench.step(MS) is not None


def test_failed_device_is_not_called_again() -> None:
    bench = Bench(FakeDevice())
    bench.step(MS)
    bench.device.is_lost = True
    timed = [bench.step(MS) for _ in range(10)]
    assert timed == [None] * 10
    assert bench.timeline.is_broken
    calls = bench.device.calls["record"]
    bench.step(MS)
    assert bench.device.calls["record"] == calls
    assert bench.timeline.errors == MAX_ERRORS


def test_unreadable_span_is_dropped_and_others_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(FakeDevice(), capacity=4)
    begun, by_host = [], []
    for _ in range(3):
        span = bench.timeline.begin_span()
        assert span is not None
        bench.device.launch(MS)
        bench.timeline.end_span(span, bench.intervals.append, lambda *instants: by_host.append(instants))
        begun.append((span.begun_at, span.launched_at))
    bench.device.wait_for(bench.device.main)
    broken = bench.timeline._pending[0].start
    elapsed = FakeEvent.elapsed_time

    def fails(self: FakeEvent, end: FakeEvent) -> float:
        if self is broken:
            raise RuntimeError("CUDA error")
        return elapsed(self, end)

    monkeypatch.setattr(FakeEvent, "elapsed_time", fails)
    assert bench.timeline.collect_spans() == 0
    assert bench.timeline.collect_spans() == 2
    assert len(bench.timeline._pool) == 4
    assert len(bench.intervals) == 2
    assert by_host == begun[:1]
    assert bench.timeline.errors == 1


def test_ten_thousand_steps_create_and_leak_no_events() -> None:
    bench = Bench(FakeDevice(), capacity=4)
    made = bench.device.calls["event"]
    for number in range(10_000):
        bench.step(MS, waits=number % 3 == 0)
    bench.device.wait_for(bench.device.main)
    bench.timeline.collect_spans()
    assert bench.device.calls["event"] == made
    assert bench.timeline.pending == 0
    assert len(bench.timeline._pool) == 4
    assert len(bench.intervals) + bench.timeline.dropped == 10_000


@settings(max_examples=200, deadline=None)
@given(
    drift=st.floats(-90, 90),
    tick=st.sampled_from([32, 500, 1000]),
    launch=st.integers(500, 20_000),
    steps=st.lists(
        st.tuples(st.integers(10_000, 200 * MS), st.integers(0, 2000 * MS)), min_size=1, max_size=40
    ),
)
def test_span_error_is_within_its_bound(
    drift: float, tick: int, launch: int, steps: list[tuple[int, int]]
) -> None:
    device = FakeDevice(drift_ppm=drift, tick_ns=tick, launch_ns=launch)
    bench = Bench(device)
    truth = []
    for length, pause in steps:
        bench.timeline.sampler.should_sample(device.now())
        span = bench.timeline.begin_span()
        assert span is not None
        started = span.start.at
        device.launch(length)
        assert bench.timeline.end_span(span, bench.intervals.append)
        truth.append((started, span.end.at))
        device.wait_for(device.main)
        bench.timeline.collect_spans()
        device.pass_time(pause)
        if bench.clocks.is_due(device.now(), in_use=True):
            bench.clocks.add_anchor()
    assert bench.timeline.violations == 0
    for (started, ended), timed in zip(truth, bench.intervals, strict=True):
        assert abs(timed.started_at - started) <= timed.bound_ns
        assert abs(timed.ended_at - ended) <= timed.bound_ns
        assert timed.bound_ns < 60_000 + 100e-6 * 4e9


def test_mark_overhead_is_not_in_the_span() -> None:
    bench = Bench(FakeDevice(mark_ns=1280))
    bench.device.launch(5 * MS)
    bench.step(2 * MS)  # queued, so it includes no host time
    timed = bench.intervals[-1]
    assert abs(timed.ended_at - timed.started_at - 2 * MS) <= 64


def test_bound_grows_with_the_age_of_the_anchor() -> None:
    device = FakeDevice(drift_ppm=40)
    bench = Bench(device)
    device.pass_time(3600 * 1000 * MS)
    began, _ = bench.step(MS) or (0, 0)
    assert abs(bench.intervals[0].started_at - began) <= bench.intervals[0].bound_ns
    assert bench.intervals[0].bound_ns > 100 * MS


def test_clock_jump_resets_rate_and_drift() -> None:
    device = FakeDevice()
    bench = Bench(device)
    device.pass_time(300 * MS)
    bench.clocks.add_anchor()
    assert bench.clocks.anchor is not None
    assert bench.clocks.anchor.drift < 100e-6
    device._offset += 10**10  # the device clock jumps, as after a migration
    device.pass_time(1000 * MS)
    bench.clocks.add_anchor()
    assert bench.clocks.anchor.rate == 1.0
    assert bench.clocks.anchor.drift == 100e-6


def test_abandoned_spans_are_timed_by_the_host() -> None:
    bench, by_host = Bench(FakeDevice()), []
    for _ in range(3):
        span = bench.timeline.begin_span()
        assert span is not None
        bench.timeline.end_span(span, bench.intervals.append, lambda *instants: by_host.append(instants))
    bench.timeline.abandon_pending()
    assert bench.timeline.pending == 0
    assert len(by_host) == 3
    assert bench.intervals == []


def test_launch_time_is_absent_after_a_device_wait() -> None:
    bench = Bench(FakeDevice())
    for has_waited in (False, True):
        span = bench.timeline.begin_span()
        assert span is not None
        bench.device.launch(5 * MS)
        if has_waited:
            bench.device.wait_for(bench.device.main)
        bench.timeline.end_span(span, bench.intervals.append, has_waited=has_waited)
        bench.device.wait_for(bench.device.main)
        bench.timeline.collect_spans()
    assert [timed.launched_ns >= 0 for timed in bench.intervals] == [True, False]


def test_capture_waits_for_collection_and_blocks_next() -> None:
    bench = Bench(FakeDevice(), capacity=4)
    for _ in range(3):
        bench.step(MS, waits=False)
    bench.device.wait_for(bench.device.main)
    began: list[int] = []
    capture = threading.Thread(
        target=lambda: (graph_capture.begin_capture(), began.append(len(bench.intervals)))
    )

    def on_device(timed: DeviceInterval) -> None:
        capture.start()  # during the collection
        while not graph_capture.open_captures:
            time.sleep(0.001)
        assert not began
        bench.intervals.append(timed)

    bench.timeline._pending[0].on_device = on_device
    assert bench.timeline.collect_spans() == 1
    capture.join(5)
    assert began == [1]
    assert bench.timeline.collect_spans() == 0
    graph_capture.end_capture()
    assert bench.timeline.collect_spans() == 2
