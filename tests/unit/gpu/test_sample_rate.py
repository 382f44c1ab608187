"""Marks of steps are paced by time: at most 0.3 % of it, whatever a thread ran before, shared by all threads."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from otel_infer.gpu import graph_capture
from otel_infer.gpu.clock_sync import ClockMap
from otel_infer.gpu.sample_rate import (
    ACTIVE_NS,
    MAX_COST_FACTOR,
    MAX_OVERHEAD_SHARE,
    MAX_SKIP_WAITS,
    StepSampler,
    share_cost,
)
from otel_infer.gpu.timeline import DeviceInterval, Timeline
from tests.support.fake_device import FakeDevice, FakeStream

US, MS = 1000, 1_000_000


@pytest.fixture(autouse=True)
def _no_capture() -> Iterator[None]:
    graph_capture.open_captures = 0
    yield
    graph_capture.open_captures = 0


class EngineThread:
    """A thread that launches steps on a fake device, and waits for each. `marking_ns`: host time of its marks."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, clocks = device, ClockMap(device, device.now)
        self.timeline = Timeline(device, clocks, now=device.now)
        self.timeline.warm_up(FakeStream())
        clocks.add_anchor()
        self.intervals: list[DeviceInterval] = []
        self.marking_ns = 0

    def run_step(self, length_ns: int, pause_ns: int = 0) -> bool:
        """Runs a step, and pauses after it. Returns whether it was marked."""
        device, timeline = self.device, self.timeline
        before = device.now()
        span = timeline.begin_span() if timeline.sampler.should_sample(device.now()) else None
        self.marking_ns += device.now() - before
        device.launch(length_ns)
        before = device.now()
        if span is not None:
            timeline.end_span(span, self.intervals.append)
        self.marking_ns += device.now() - before
        device.wait_for(device.main)
        device.pass_time(pause_ns)
        return span is not None


@pytest.mark.parametrize("length_ns", [200 * US, MS, 3 * MS, 30 * MS])
def test_mark_overhead_is_bounded_for_any_call_cost(length_ns: int) -> None:
    shares, marked = [], []
    for call_ns in (500, 2000, 20_000):
        thread = EngineThread(FakeDevice(call_ns=call_ns))
        began = thread.device.now()
        marked.append(sum(thread.run_step(length_ns) for _ in range(8000)))
        shares.append(thread.marking_ns / (thread.device.now() - began))
    assert max(shares) <= MAX_OVERHEAD_SHARE
    assert marked == sorted(marked, reverse=True)
    assert marked[-1] > 0
    if length_ns == 30 * MS:
        assert marked[0] == 8000  # where marks are cheap, every step is sampled


def test_long_steps_after_many_short_ones_are_marked() -> None:
    """A model of 30 µs ran 1,800 times before one of 20 ms."""
    thread = EngineThread(FakeDevice(call_ns=2000))
    assert 0 < sum(thread.run_step(30 * US) for _ in range(1800)) < 100
    marked = [thread.run_step(20 * MS) for _ in range(66)]
    assert sum(marked) >= 62  # the first ones may follow the last marks too closely
    assert all(marked[4:])


def test_short_steps_after_long_ones_are_marked_in_time() -> None:
    thread = EngineThread(FakeDevice(call_ns=2000))
    for _ in range(100):
        thread.run_step(500 * MS)
    began, marking_ns = thread.device.now(), thread.marking_ns
    assert sum(thread.run_step(30 * US) for _ in range(20_000)) > 20
    share = (thread.marking_ns - marking_ns) / (thread.device.now() - began)
    assert share <= MAX_OVERHEAD_SHARE


@pytest.mark.parametrize("length_ns", [MS, 4 * MS, 9 * MS, 20 * MS, 50 * MS])
def test_time_between_marks_is_bounded_after_any_history(length_ns: int) -> None:
    """The next pair begins within the longest time of skipping and two steps."""
    for history in ([], [30 * US] * 3000, [200 * MS] * 5, [30 * US, 20 * MS] * 300):
        thread = EngineThread(FakeDevice(call_ns=2000))
        for before in history:
            thread.run_step(before)
        last, longest = thread.device.now(), 0
        for _ in range(200):
            at = thread.device.now()
            if thread.run_step(length_ns):
                longest, last = max(longest, at - last), at
        assert longest <= MAX_SKIP_WAITS * thread.timeline.sampler.wait_ns + 2 * (length_ns + MS)


def test_two_models_in_turn_are_both_marked() -> None:
    thread, marked = EngineThread(FakeDevice(call_ns=2000)), Counter[int]()
    for _ in range(200):
        for length_ns in (*[30 * US] * 9, 20 * MS):
            marked[length_ns] += thread.run_step(length_ns)
    assert marked[20 * MS] / 200 > 0.5 * marked[30 * US] / 1800 > 0.01


def run_in_turn(threads: Sequence[EngineThread], lengths: Sequence[int], ns: int) -> list[int]:
    """Runs the steps of several threads on one device for `ns`. Returns how many of each were marked."""
    device, samplers = threads[0].device, [thread.timeline.sampler for thread in threads]
    marked, until, checked_at = [0] * len(threads), device.now() + ns, 0
    for number in itertools.cycle(range(len(threads))):
        if device.now() >= until:
            return marked
        if device.now() - checked_at > 100 * MS:  # as the timing thread does
            share_cost(samplers, device.now())
            checked_at = device.now()
        marked[number] += threads[number].run_step(lengths[number])
    return marked


def test_each_of_six_threads_gets_device_times() -> None:
    """All threads together cost 0.3 %, and each gets its part of the marks."""
    device = FakeDevice(call_ns=5000)
    threads = [EngineThread(device) for _ in range(6)]
    run_in_turn(threads, [4 * MS] * 6, 500 * MS)
    before, began = sum(thread.marking_ns for thread in threads), device.now()
    marked = run_in_turn(threads, [4 * MS] * 6, 10_000 * MS)
    assert min(marked) > 60
    assert max(marked) < 1.2 * min(marked)
    spent = sum(thread.marking_ns for thread in threads) - before
    assert spent <= MAX_OVERHEAD_SHARE * (device.now() - began)


def test_a_thread_of_short_steps_takes_no_marks_of_others() -> None:
    device = FakeDevice(call_ns=2000)
    threads = [EngineThread(device) for _ in range(3)]
    marked = run_in_turn(threads, [30 * US, 30 * US, 20 * MS], 10_000 * MS)
    assert marked[2] > 100


def test_idle_threads_have_no_part_of_the_cost() -> None:
    device = FakeDevice(call_ns=2000)
    threads = [EngineThread(device) for _ in range(40)]
    samplers = [thread.timeline.sampler for thread in threads]
    for thread in threads:
        thread.run_step(MS)
    share_cost(samplers, device.now())
    shared = samplers[0].wait_ns
    device.pass_time(ACTIVE_NS)
    threads[0].run_step(MS)
    share_cost(samplers, device.now())
    assert samplers[0].wait_ns == pytest.approx(shared / 40)


def test_waiting_for_other_threads_is_no_cost_of_marks() -> None:
    """Marks give the GIL away: under six threads the host gets it back only after several ms."""
    sampler = StepSampler()
    sampler.add_lowest_cost(16_000)
    for _ in range(50):
        sampler.add_sample(20 * MS)
    assert sampler.wait_ns <= 1 + 2 * MAX_COST_FACTOR * 20_000 / MAX_OVERHEAD_SHARE
    for _ in range(50):
        sampler.add_sample(16_000)
    assert sampler.wait_ns == pytest.approx(2 * 20_000 / MAX_OVERHEAD_SHARE, rel=0.02)


@pytest.mark.parametrize("lengths", [(MS,) * 4, (10 * MS, MS, MS, MS)])
def test_sampling_does_not_alias_with_a_periodic_engine(lengths: tuple[int, ...]) -> None:
    """Each step of the period is marked about as often as the others, a long one too."""
    thread, positions = EngineThread(FakeDevice(call_ns=5000)), Counter[int]()
    for number in range(20_000):
        positions[number % 4] += thread.run_step(lengths[number % 4])
    assert len(thread.intervals) < 15_000
    assert max(positions.values()) < 1.3 * min(positions.values())


def test_steps_are_sampled_in_pairs_to_measure_gaps() -> None:
    thread = EngineThread(FakeDevice(call_ns=2000))
    for _ in range(3000):
        thread.run_step(MS, pause_ns=MS // 2)  # the host does other work for half a step
    thread.timeline.collect_spans()
    assert 50 < len(thread.intervals) < 1000
    known = [timed.gap_ns for timed in thread.intervals if timed.gap_ns >= 0]
    assert len(known) >= 0.45 * len(thread.intervals)
    assert all(MS // 2 <= gap < MS for gap in known)


def test_nested_steps_do_not_change_the_sample_rate() -> None:
    """The inner step begins after the outer step, and is marked before it."""
    sampler, marked = StepSampler(), 0
    for number in range(1, 30_000):
        begins = number * MS, number * MS + US
        sampled = [sampler.should_sample(at) for at in begins]
        for _ in range(sum(sampled)):
            sampler.add_sample(20_000)
        marked += sum(sampled)
    assert 1000 < marked <= MAX_OVERHEAD_SHARE * 30_000 * MS / 24_000 + 2
