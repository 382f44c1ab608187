"""Spans of a device, by a fake one: never waited for, placed within their bound, and what happens when something is not so."""

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
from otel_infer.gpu.sample_rate import MAX_OVERHEAD_SHARE, StepSampler
from otel_infer.gpu.timeline import MAX_ERRORS, DeviceInterval, Timeline
from tests.support.fake_device import FakeDevice, FakeEvent, FakeStream

MS = 1_000_000
MOST_CALLS = {"capturing": 1, "record": 2, "query": 2, "elapsed": 2}
"""Of the driver, for each span."""


class Bench:
    """A device, an anchored clock and a timeline."""

    def __init__(self, device: FakeDevice, capacity: int = 64) -> None:
        self.device, self.clocks = device, ClockMap(device, device.now)
        self.timeline = Timeline(device, self.clocks, capacity, device.now)
        self.timeline.warm_up(FakeStream())
        self.clocks.add_anchor()
        self.told: list[DeviceInterval] = []

    def step(self, length_ns: int, host_ns: int = 0, waits: bool = True) -> tuple[int, int] | None:
        """A step of an engine: true begin and end of its work, or None if it could not be timed."""
        self.timeline.sampler.should_sample()
        span = self.timeline.begin_span()
        ran = self.device.launch(length_ns)
        self.device.pass_time(host_ns)
        if span is None or not self.timeline.end_span(span, self.told.append):
            ran_unseen = None
        else:
            ran_unseen = ran
        if waits:
            self.device.wait_for(self.device.main)
            self.timeline.collect_spans()  # the tender's work
        return ran_unseen


@pytest.fixture(autouse=True)
def _nobody_captures() -> Iterator[None]:
    graph_capture.open_captures = 0
    yield
    graph_capture.open_captures = 0


def test_a_step_costs_a_known_number_of_driver_calls_and_none_of_them_waits() -> None:
    bench = Bench(FakeDevice())
    bench.step(5 * MS)
    bench.device.calls = Counter()
    for _ in range(1000):
        bench.step(5 * MS)
    assert len(bench.told) == 1001
    calls = bench.device.calls
    assert {name: calls[name] / 1000 <= most for name, most in MOST_CALLS.items()} == dict.fromkeys(
        MOST_CALLS, True
    )
    assert set(calls) <= set(MOST_CALLS)  # nothing else is called: no event is made, nothing is synchronized


def test_a_span_has_its_length_and_says_how_long_it_was_queued_and_how_long_the_device_had_nothing() -> None:
    device = FakeDevice(call_ns=1000, launch_ns=4000)
    bench = Bench(device)
    bench.step(5 * MS)
    ended = device.main.free_at
    device.pass_time(3 * MS)  # the host schedules the next one
    began, until = bench.step(2 * MS, host_ns=500_000) or (0, 0)
    timed = bench.told[-1]
    assert (
        abs(timed.ended_at - timed.started_at - 2 * MS) < 10_000
    )  # mark to mark: the launches beside it are inside
    assert abs(timed.ended_at - until) < timed.bound_ns + 10_000
    assert abs(timed.gap_ns - (began - ended)) < 10_000
    assert timed.queued_ns < 10_000
    assert abs(timed.launched_ns - 502_000) < 3000


def test_an_engine_that_runs_ahead_is_timed_in_order_and_its_steps_are_queued() -> None:
    bench = Bench(FakeDevice())
    bench.step(MS)
    for _ in range(20):
        bench.step(5 * MS, waits=False)
    assert bench.timeline.collect_spans() == 0
    bench.device.wait_for(bench.device.main)
    assert bench.timeline.collect_spans() == 20
    queued = [timed.queued_ns for timed in bench.told[1:]]
    assert queued == sorted(queued)
    assert abs(queued[-1] - 19 * 5 * MS) < MS
    assert all(timed.gap_ns < 10_000 for timed in bench.told[2:])


def test_what_is_no_step_is_timed_on_its_own_stream_and_changes_nothing_of_the_steps() -> None:
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
        return bench.told, copied, bench.timeline.sampler.interval

    steps, copied, every = timed(copies=True)
    alone, _, every_alone = timed(copies=False)
    assert len(copied) == len(steps) == len(alone) == 50
    assert every == every_alone
    assert all(abs(one.ended_at - one.started_at - 2 * MS) < 10_000 for one in copied)
    assert all(one.gap_ns == -1 for one in copied)
    assert all(one.gap_ns >= 0 for one in steps[1:])


def test_what_is_no_step_and_runs_between_two_of_them_is_no_gap() -> None:
    bench = Bench(FakeDevice(mark_ns=0))
    for _ in range(5):
        bench.step(MS)
        span = bench.timeline.begin_span(bench.device.main, is_step=False)
        bench.device.launch(5 * MS)
        assert span is not None and bench.timeline.end_span(span, lambda timed: None)
    bench.device.wait_for(bench.device.main)
    bench.timeline.collect_spans()
    assert [timed.gap_ns for timed in bench.told] == [-1] * 5


def test_what_is_launched_further_ahead_than_there_are_events_is_not_timed_and_counted_and_the_rest_is() -> (
    None
):
    bench = Bench(FakeDevice(), capacity=8)
    timed = [bench.step(5 * MS, waits=False) for _ in range(20)]
    assert [ran is not None for ran in timed] == [True] * 8 + [False] * 12
    assert bench.timeline.dropped == 12
    bench.device.wait_for(bench.device.main)
    assert bench.timeline.collect_spans() == 8
    assert bench.step(5 * MS) is not None


def test_while_somebody_captures_the_device_is_left_alone() -> None:
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


def test_a_capture_that_nobody_told_of_is_seen_before_anything_is_recorded_into_it() -> None:
    bench = Bench(FakeDevice())
    bench.device.in_capture = True
    bench.device.calls.clear()
    assert bench.timeline.begin_span() is None
    assert bench.device.calls == {"capturing": 1}


def test_a_span_in_which_somebody_captured_is_timed_if_the_capture_is_over() -> None:
    bench = Bench(FakeDevice())
    span = bench.timeline.begin_span()
    assert span is not None
    graph_capture.begin_capture()
    graph_capture.end_capture()
    assert bench.timeline.end_span(span, bench.told.append)
    bench.device.wait_for(bench.device.main)
    assert bench.timeline.collect_spans() == 1


def test_a_span_that_ends_inside_a_capture_is_not_timed_and_its_events_are_used_again() -> None:
    bench = Bench(FakeDevice(), capacity=1)
    span = bench.timeline.begin_span()
    assert span is not None
    graph_capture.begin_capture()
    assert not bench.timeline.end_span(span, bench.told.append)
    graph_capture.end_capture()
    assert bench.step(MS) is not None


def test_a_device_that_fails_is_not_asked_any_more_and_nobody_notices() -> None:
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


def test_a_span_that_cannot_be_read_is_given_up_and_the_others_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(FakeDevice(), capacity=4)
    begun, by_host = [], []
    for _ in range(3):
        span = bench.timeline.begin_span()
        assert span is not None
        bench.device.launch(MS)
        bench.timeline.end_span(span, bench.told.append, lambda *instants: by_host.append(instants))
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
    assert len(bench.told) == 2
    assert by_host == begun[:1]
    assert bench.timeline.errors == 1


def test_events_are_neither_made_nor_lost_in_ten_thousand_steps() -> None:
    bench = Bench(FakeDevice(), capacity=4)
    made = bench.device.calls["event"]
    for number in range(10_000):
        bench.step(MS, waits=number % 3 == 0)
    bench.device.wait_for(bench.device.main)
    bench.timeline.collect_spans()
    assert bench.device.calls["event"] == made
    assert bench.timeline.pending == 0
    assert len(bench.timeline._pool) == 4
    assert len(bench.told) + bench.timeline.dropped == 10_000


@settings(max_examples=200, deadline=None)
@given(
    drift=st.floats(-90, 90),
    tick=st.sampled_from([32, 500, 1000]),
    launch=st.integers(500, 20_000),
    steps=st.lists(
        st.tuples(st.integers(10_000, 200 * MS), st.integers(0, 2000 * MS)), min_size=1, max_size=40
    ),
)
def test_every_span_is_where_it_was_within_its_bound(
    drift: float, tick: int, launch: int, steps: list[tuple[int, int]]
) -> None:
    device = FakeDevice(drift_ppm=drift, tick_ns=tick, launch_ns=launch)
    bench = Bench(device)
    truth = []
    for length, pause in steps:
        bench.timeline.sampler.should_sample()
        span = bench.timeline.begin_span()
        assert span is not None
        started = span.start.at
        device.launch(length)
        assert bench.timeline.end_span(span, bench.told.append)
        truth.append((started, span.end.at))
        device.wait_for(device.main)
        bench.timeline.collect_spans()
        device.pass_time(pause)
        if bench.clocks.is_due(device.now(), in_use=True):
            bench.clocks.add_anchor()
    assert bench.timeline.violations == 0
    for (started, ended), timed in zip(truth, bench.told, strict=True):
        assert abs(timed.started_at - started) <= timed.bound_ns
        assert abs(timed.ended_at - ended) <= timed.bound_ns
        assert timed.bound_ns < 60_000 + 100e-6 * 4e9


@pytest.mark.parametrize("length_ns", [200_000, MS, 3 * MS, 30 * MS])
def test_marks_cost_a_known_share_of_the_time_whatever_a_call_costs_here(length_ns: int) -> None:
    shares, marked = [], []
    for call_ns in (500, 2000, 20_000):
        bench = Bench(FakeDevice(call_ns=call_ns))
        device, pacing = bench.device, bench.timeline.sampler
        taken, began = 0, device.now()
        for _ in range(8000):
            before = device.now()
            span = bench.timeline.begin_span() if pacing.should_sample() else None
            taken += device.now() - before
            device.launch(length_ns)
            before = device.now()
            if span is not None:
                bench.timeline.end_span(span, bench.told.append)
            taken += device.now() - before
            device.wait_for(device.main)
        shares.append(taken / (device.now() - began))
        marked.append(bench.timeline.begun)
    assert max(shares) <= 1.2 * MAX_OVERHEAD_SHARE
    assert marked == sorted(marked, reverse=True)
    assert marked[-1] > 0
    if length_ns == 30 * MS:
        assert marked[0] == 8000  # where they cost little, no step is left out


def test_an_engine_with_a_rhythm_is_not_always_marked_at_the_same_beat() -> None:
    pacing = StepSampler()
    beats: Counter[int] = Counter()
    for number in range(1, 20_001):
        if pacing.should_sample():
            beats[number % 4] += 1
            pacing.add_sample(number * MS, 20_000)
    assert pacing.interval > 1
    assert max(beats.values()) < 1.3 * min(beats.values())


def test_what_marks_take_themselves_is_not_in_the_span() -> None:
    bench = Bench(FakeDevice(mark_ns=1280))
    bench.device.launch(5 * MS)
    bench.step(2 * MS)  # queued: nothing of the host is in it
    timed = bench.told[-1]
    assert abs(timed.ended_at - timed.started_at - 2 * MS) <= 64


def test_an_old_anchor_says_how_little_it_knows() -> None:
    device = FakeDevice(drift_ppm=40)
    bench = Bench(device)
    device.pass_time(3600 * 1000 * MS)
    began, _ = bench.step(MS) or (0, 0)
    assert abs(bench.told[0].started_at - began) <= bench.told[0].bound_ns
    assert bench.told[0].bound_ns > 100 * MS


def test_a_clock_that_jumped_has_no_rate() -> None:
    device = FakeDevice()
    bench = Bench(device)
    device.pass_time(300 * MS)
    bench.clocks.add_anchor()
    assert bench.clocks.anchor is not None
    assert bench.clocks.anchor.drift < 100e-6
    device._offset += 10**10  # the device's clock, when the machine was moved
    device.pass_time(1000 * MS)
    bench.clocks.add_anchor()
    assert bench.clocks.anchor.rate == 1.0
    assert bench.clocks.anchor.drift == 100e-6


def test_what_is_pending_when_a_device_is_given_up_is_timed_by_the_host() -> None:
    bench, by_host = Bench(FakeDevice()), []
    for _ in range(3):
        span = bench.timeline.begin_span()
        assert span is not None
        bench.timeline.end_span(span, bench.told.append, lambda *instants: by_host.append(instants))
    bench.timeline.abandon_pending()
    assert bench.timeline.pending == 0
    assert len(by_host) == 3
    assert bench.told == []


def test_steps_are_marked_two_in_a_row_so_that_what_was_between_them_is_known() -> None:
    bench = Bench(FakeDevice(call_ns=2000))
    for _ in range(3000):
        span = bench.timeline.begin_span() if bench.timeline.sampler.should_sample() else None
        bench.device.launch(MS)
        if span is not None:
            bench.timeline.end_span(span, bench.told.append)
        bench.device.wait_for(bench.device.main)
        bench.device.pass_time(MS // 2)  # the host does something else for half as long
    bench.timeline.collect_spans()
    assert 50 < len(bench.told) < 1000
    known = [timed.gap_ns for timed in bench.told if timed.gap_ns >= 0]
    assert len(known) >= 0.45 * len(bench.told)
    assert all(MS // 2 <= gap < MS for gap in known)


def test_who_had_waited_for_the_device_does_not_say_how_long_it_took_to_launch() -> None:
    bench = Bench(FakeDevice())
    for has_waited in (False, True):
        span = bench.timeline.begin_span()
        assert span is not None
        bench.device.launch(5 * MS)
        if has_waited:
            bench.device.wait_for(bench.device.main)
        bench.timeline.end_span(span, bench.told.append, has_waited=has_waited)
        bench.device.wait_for(bench.device.main)
        bench.timeline.collect_spans()
    assert [timed.launched_ns >= 0 for timed in bench.told] == [True, False]


def test_a_capture_that_begins_waits_until_nobody_asks_a_device_and_then_nobody_does() -> None:
    bench = Bench(FakeDevice(), capacity=4)
    for _ in range(3):
        bench.step(MS, waits=False)
    bench.device.wait_for(bench.device.main)
    began: list[int] = []
    capture = threading.Thread(target=lambda: (graph_capture.begin_capture(), began.append(len(bench.told))))

    def say(timed: DeviceInterval) -> None:
        capture.start()  # in the middle of a harvest
        while not graph_capture.open_captures:
            time.sleep(0.001)
        assert not began
        bench.told.append(timed)

    bench.timeline._pending[0].on_device = say
    assert bench.timeline.collect_spans() == 1
    capture.join(5)
    assert began == [1]
    assert bench.timeline.collect_spans() == 0
    graph_capture.end_capture()
    assert bench.timeline.collect_spans() == 2


def test_a_step_in_a_step_says_nothing_of_the_pace() -> None:
    """It begins after the one around it, and is marked before that."""
    pacing = StepSampler()
    for number in range(1, 30_000):
        began = number * 1_000_000
        pacing.should_sample()
        pacing.should_sample()
        pacing.add_sample(began + 1000, 20_000)
        pacing.add_sample(began, 20_000)
    assert 1 <= pacing.interval < 100
