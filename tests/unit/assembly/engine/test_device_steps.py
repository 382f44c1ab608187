"""Device times of steps: their sums, the bottleneck, and the attributes of a request."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

import otel_infer
from otel_infer import _clock
from otel_infer.assembly.engine.device_steps import (
    BY_EVENT,
    GPU_BOUND,
    LAUNCH_OR_SYNC,
    DeviceSteps,
    DeviceTime,
)
from otel_infer.assembly.engine.step_log import EngineStepLog
from otel_infer.assembly.engine.workers import WorkerState
from otel_infer.assembly.records.request import RequestRecord, Stage
from otel_infer.gpu.clock_sync import ClockMap
from otel_infer.gpu.timed_work import StageWork, StepWork
from otel_infer.gpu.timeline import DeviceInterval, Timeline
from otel_infer.ringbuffer import events
from otel_infer.tracing import start
from tests.support.fake_device import FakeDevice, FakeStream
from tests.support.rings import Recording
from tests.support.story import Story, ns

MS = 1_000_000
STEPS = np.arange(1, 11)
CAPACITY = 64


def filled(span: int, launched: int, queued: int, gap: int) -> DeviceSteps:
    device = DeviceSteps(CAPACITY)
    for step in STEPS:
        device.set_device_time(int(step), 0, span, launched, queued, gap, 9000)
    return device


def with_gaps(recording: Recording, gap: int) -> tuple[RequestRecord, Stage, Stage]:
    """A request of a prompt step and three more, each with this gap before it. Returns the record, its prefill and its decode."""
    with otel_infer.request() as request:
        for number in range(4):
            with otel_infer.step([request], prompt_tokens={request: 5} if not number else None):
                pass
            begun = _clock.now()
            work = StepWork("custom", os.getpid(), 0, number + 1, 0)
            work.on_device(DeviceInterval(begun, begun + 3 * MS, 100_000, 20_000, gap, 8000))
    (record,) = recording.records()
    prefill, decode = record.find_stage("prefill"), record.find_stage("decode")
    assert prefill is not None
    assert decode is not None
    return record, prefill, decode


@pytest.mark.parametrize(
    ("span", "launched", "queued", "gap", "limit"),
    [
        (20 * MS, MS, 15 * MS, 0, "gpu-bound"),
        (20 * MS, MS, 10_000, 200_000, "gpu-bound"),
        (20 * MS, 19 * MS, 10_000, 0, "launch-or-sync"),
        (20 * MS, MS, 10_000, 8 * MS, "host-stalled"),
        (20 * MS, 20 * MS, 300 * MS, 0, "back-pressured"),
    ],
)
def test_bottleneck_follows_from_four_durations(
    span: int, launched: int, queued: int, gap: int, limit: str
) -> None:
    device_time = filled(span, launched, queued, gap).sum_step_times(STEPS)[0]
    assert device_time == DeviceTime("event", 10, 10 * span, 10 * launched, 10 * queued, 10 * gap, 9000)
    assert device_time.limit == limit


def test_a_wait_within_a_step_looks_like_slow_launching() -> None:
    """Kernel by kernel, and one long kernel with `.item()` after it: neither is called launch-bound alone."""

    def run_step(kernels: int, length_ns: int, host_ns: int, waits: bool) -> DeviceTime:
        device, intervals = FakeDevice(), list[DeviceInterval]()
        clocks = ClockMap(device, device.now)
        timeline = Timeline(device, clocks, now=device.now)
        timeline.warm_up(FakeStream())
        clocks.add_anchor()
        span = timeline.begin_span()
        assert span is not None
        for _ in range(kernels):
            device.launch(length_ns)
            device.pass_time(host_ns)
        if waits:
            device.wait_for(device.main)  # `.item()`
            device.launch(MS)
        timeline.end_span(span, intervals.append)
        device.wait_for(device.main)
        timeline.collect_spans()
        (timed,) = intervals
        span_ns = timed.ended_at - timed.started_at
        return DeviceTime(BY_EVENT, 1, span_ns, timed.launched_ns, timed.queued_ns, 0, timed.bound_ns)

    assert run_step(200, 20_000, 100_000, waits=False).limit == LAUNCH_OR_SYNC
    assert run_step(1, 20 * MS, 0, waits=True).limit == LAUNCH_OR_SYNC
    assert run_step(1, 20 * MS, 0, waits=False).limit == GPU_BOUND


def test_known_gaps_are_extrapolated_to_other_steps() -> None:
    """Without any known gap, gap and bottleneck are unknown."""
    device = DeviceSteps(CAPACITY)
    for step in STEPS:
        device.set_device_time(int(step), 0, MS, MS // 10, 10_000, MS // 2 if step in (3, 8) else -1, 9000)
    device_time = device.sum_step_times(STEPS)[0]
    assert device_time is not None
    assert (device_time.gaps, device_time.limit) == (5 * MS, "host-stalled")
    unknown = device.sum_step_times(np.array([1, 2, 4]))[0]
    assert unknown is not None
    assert (unknown.gaps, unknown.limit) == (-1, "")


def test_bottleneck_is_unknown_without_launch_time() -> None:
    device_time = filled(20 * MS, -1, 10_000, 0).sum_step_times(STEPS)[0]
    assert device_time is not None
    assert (device_time.launched, device_time.limit) == (-1, "")


def test_host_times_give_no_bottleneck() -> None:
    device = DeviceSteps(CAPACITY)
    device.set_host_time(1, 5 * MS)
    device.set_host_time(2, 7 * MS)
    device_time, lengths = device.sum_step_times(STEPS)
    assert device_time == DeviceTime("host", 2, 12 * MS)
    assert device_time.limit == ""
    assert lengths.tolist() == [5 * MS, 7 * MS, *[0] * 8]


def test_device_time_replaces_host_time_in_any_order() -> None:
    device = DeviceSteps(CAPACITY)
    device.set_device_time(1, 0, 5 * MS, 0, 0, 0, 0)
    device.set_host_time(1, 9 * MS)
    device.set_host_time(2, 9 * MS)
    device.set_device_time(2, 0, 6 * MS, 0, 0, 0, 0)
    assert device.sum_step_times(np.array([1, 2, 3]))[1].tolist() == [5 * MS, 6 * MS, 0]


def test_evicted_step_is_not_confused_with_a_newer() -> None:
    device = DeviceSteps(CAPACITY)
    device.set_device_time(7, 0, 5 * MS, 0, 0, 0, 0)
    assert device.sum_step_times(np.array([7 + CAPACITY]))[0] is None
    device.set_device_time(7 + CAPACITY, 0, 6 * MS, 0, 0, 0, 0)
    assert device.sum_step_times(np.array([7]))[0] is None


def test_stages_and_steps_have_device_attributes(recording: Recording) -> None:
    record, prefill, decode = with_gaps(recording, 50_000)
    assert {
        name: decode.attributes[name] for name in decode.attributes if name.startswith("infer.device")
    } == {
        "infer.device.method": "event",
        "infer.device.steps": 3,
        "infer.device.steps.all": 3,
        "infer.device.duration": 0.009,
        "infer.device.share": 0.009,
        "infer.device.share.method": "tokens",
        "infer.device.launch": 0.0003,
        "infer.device.queue": 0.00006,
        "infer.device.gap": 0.00015,
        "infer.device.clock_error": 0.000008,
        "infer.device.bottleneck": "gpu-bound",
    }
    assert prefill.attributes["infer.device.duration"] == 0.003
    assert record.device_ns == [("prefill", 3 * MS), ("decode", 9 * MS)]
    assert record.steps is not None
    assert record.steps.device.tolist() == [0, 3 * MS, 3 * MS, 3 * MS]


def test_unknown_gap_gives_no_bottleneck_attribute(
    recording: Recording,
) -> None:
    """A prompt in one chunk has no gap and keeps its bottleneck."""
    _, prefill, decode = with_gaps(recording, -1)
    assert prefill.attributes["infer.device.bottleneck"] == "gpu-bound"
    assert not {"infer.device.bottleneck", "infer.device.gap"} & set(decode.attributes)


def test_stage_duration_is_extrapolated_from_timed_steps(
    recording: Recording,
) -> None:
    with otel_infer.request() as request:
        for number in range(4):
            with otel_infer.step([request], prompt_tokens={request: 5} if not number else None):
                pass
        StepWork("custom", os.getpid(), 0, 3, 0).on_device(DeviceInterval(1, 3 * MS, 0, 0, -1, 0))
    (record,) = recording.records()
    decode = record.find_stage("decode")
    assert decode is not None
    assert decode.attributes["infer.device.steps"] == 1
    assert decode.attributes["infer.device.steps.all"] == 3
    assert decode.attributes["infer.device.duration"] == pytest.approx(0.003)
    assert record.device_ns == [("decode", pytest.approx(9 * MS))]


def test_host_timed_steps_have_method_host(
    recording: Recording,
) -> None:
    with otel_infer.request() as request:
        for number in range(3):
            with otel_infer.step([request], prompt_tokens={request: 5} if not number else None):
                pass
            StepWork("custom", os.getpid(), 0, number + 1, 0).on_host(_clock.now() - 2 * MS, _clock.now())
    (record,) = recording.records()
    decode = record.find_stage("decode")
    assert decode is not None
    assert decode.attributes["infer.device.method"] == "host"
    assert decode.attributes["infer.device.steps"] == 2
    assert "infer.device.bottleneck" not in decode.attributes
    assert record.device_ns == []


def test_stage_is_timed_on_its_own(recording: Recording) -> None:
    with otel_infer.request():
        with otel_infer.stage("rerank", gpu=True):
            pass
        request = start.current_request()
        assert request is not None
        at = _clock.now()
        StageWork("rerank", request.handle).on_device(DeviceInterval(at - 4 * MS, at, 5, 6, -1, 7))
    (record,) = recording.records()
    stage = record.find_stage("rerank")
    assert stage is not None
    assert stage.attributes["infer.device.duration"] == 0.004
    assert record.device_ns == [("rerank", 4 * MS)]


def test_durations_beyond_four_seconds_are_capped(recording: Recording) -> None:
    timed = DeviceInterval(0, 1, 1 << 40, 1 << 40, 1 << 40, 1 << 40)
    with otel_infer.request() as request:
        for number in range(2):
            with otel_infer.step([request], prompt_tokens={request: 5} if not number else None):
                pass
        StepWork("custom", os.getpid(), 0, 2, 0).on_device(timed)
    (record,) = recording.records()
    decode = record.find_stage("decode")
    assert decode is not None
    assert 4.2 < float(decode.attributes["infer.device.queue"]) < 4.3  # type: ignore[arg-type]


def test_custom_step_is_timed_until_launched(recording: Recording) -> None:
    with otel_infer.request() as request:
        for number in range(3):
            with otel_infer.step(
                [request], prompt_tokens={request: 5} if not number else None, gpu=True
            ) as step:
                step.launched()
                time.sleep(0.3)
    (record,) = recording.records()
    decode = record.find_stage("decode")
    assert decode is not None
    assert decode.attributes["infer.device.method"] == "host"  # without a device
    assert decode.attributes["infer.device.steps"] == 1  # the host's clock times one step in 500 ms
    assert float(decode.attributes["infer.device.duration"]) < 0.02  # type: ignore[arg-type]


def test_block_size_is_kept_until_its_process_ends() -> None:
    devices = WorkerState()
    devices.add_process(1, 77)
    seen, engine = events.EngineSeen(1, 1, 77, "toy", 3), EngineStepLog("toy", 77, 1, lambda handle: None)
    devices.set_block_size(events.BlocksSized(1, "toy", 77, 3, 16))
    devices.add_engine(seen, engine)
    assert engine.block_tokens == 16
    devices.set_block_size(events.BlocksSized(2, "toy", 77, 3, 32))
    assert engine.block_tokens == 32
    devices.remove_process(1)
    another = EngineStepLog("toy", 77, 1, lambda handle: None)
    devices.add_engine(seen, another)
    assert another.block_tokens == 0


def timed(step: int, gap: int = events.UNKNOWN_NS, rank: int = 0) -> events.StepTimed:
    return events.StepTimed(step * 100 + 10, step * 100, "toy", 77, rank, step, 0, 0, 0, gap, 0)


def add_engine_steps(devices: WorkerState, prompts: dict[int, int], steps: int) -> None:
    """An engine with `steps` steps of one sequence; `prompts` maps steps to other requests' prompt tokens."""
    engine = EngineStepLog("toy", 77, 1, lambda handle: None)
    devices.add_engine(events.EngineSeen(1, 1, 77, "toy", 0), engine)
    for step in range(1, steps + 1):
        scheduled = events.StepScheduled(step, step, True, 1, [], [1], (), 0, 0, 1, 0)
        engine.table.begin_step(scheduled, prompts.get(step, 0))


def test_timed_step_represents_the_untimed_before_it() -> None:
    devices = WorkerState()
    add_engine_steps(devices, {}, 11)
    for step, gap in ((1, None), (2, 4), (6, None), (7, 4), (8, 4), (11, None)):
        devices.add_execution(timed(step, events.UNKNOWN_NS if gap is None else gap), is_new=True)
    counted = [(run.steps, run.gaps if run.gap_ns >= 0 else None) for run in devices.drain_executions()]
    assert counted == [(1, None), (1, 1), (4, None), (1, 5), (1, 1), (3, None)]


def test_prompt_steps_and_decode_steps_are_counted_separately() -> None:
    devices = WorkerState()
    add_engine_steps(devices, {3: 100, 4: 100, 5: 100}, 8)
    for step in (1, 5, 8):
        devices.add_execution(timed(step), is_new=True)
    assert [run.steps for run in devices.drain_executions()] == [
        1,
        3,
        4,
    ]  # 3, 4, 5 had prompts; 2, 6, 7, 8 had none


def test_new_engine_in_a_process_restarts_the_count() -> None:
    devices = WorkerState()
    for step in (1, 500, 1, 2):
        devices.add_execution(timed(step), is_new=True)
    assert [run.steps for run in devices.drain_executions()] == [1, 499, 1, 1]


def test_engines_with_one_name_are_not_overcounted() -> None:
    devices = WorkerState()
    for step in (5000, 100, 5001, 101, 5002, 102):
        devices.add_execution(timed(step), is_new=True)
    assert [run.steps for run in devices.drain_executions()] == [1] * 6


def test_lost_events_are_not_untimed_steps() -> None:
    devices = WorkerState()
    for step in (1, 1_000_000):
        devices.add_execution(timed(step), is_new=True)
    assert [run.steps for run in devices.drain_executions()] == [1, 1]


def test_device_share_sums_all_steps_and_ranks() -> None:
    story = Story()
    a = story.arrives(0, "a")
    steps = [story.step(10 * n, 10 * n + 10, [a], prompt={a: 3} if n == 1 else None) for n in range(1, 6)]
    story.ends(80, a)
    story.timed(steps[0], 10, 18)
    story.timed(steps[2], 30, 34)
    assert story.record(a).device_share == 8 * MS + 4 * 4 * MS  # one of four decode steps was timed
    second_rank = events.StepTimed(ns(35), ns(30), "toy", 4242, 1, steps[2], 0, 0, 0, events.UNKNOWN_NS, 0)
    story.add_event(1, 0, second_rank)
    assert story.record(a).device_share == 2 * (8 * MS + 4 * 4 * MS)


def test_untimed_step_kind_costs_what_others_cost() -> None:
    story = Story()
    a, b = story.arrives(0, "a"), story.arrives(0, "b")
    first = story.step(0, 10, [a], prompt={a: 3})
    plain = story.step(10, 20, [a])
    story.step(20, 30, [a, b], prompt={b: 7})
    story.step(30, 40, [a, b])
    story.ends(60, a)
    story.timed(first, 0, 8)
    story.timed(plain, 10, 14)
    assert story.record(a).device_share == 8 * MS + 3 * 4 * MS
