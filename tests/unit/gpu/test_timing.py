"""Launches are timed by the device once it is ready, and by the host before: events per thread, captures, forks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from otel_infer.assembly.requests.ended_requests import GRACE_NS
from otel_infer.gpu import graph_capture
from otel_infer.gpu.timeline import DeviceInterval, DeviceSpan
from otel_infer.gpu.timing import HOST_SAMPLE_NS, PENDING_SAMPLE_NS, UNTIMED, DeviceTiming
from tests.support.fake_device import OnHostClock

MS = 1_000_000


class Work:
    """Collects the intervals of the device and of the host."""

    def __init__(self) -> None:
        self.device: list[DeviceInterval] = []
        self.host: list[tuple[int, int]] = []

    def on_device(self, timed: DeviceInterval) -> None:
        self.device.append(timed)

    def on_host(self, begun_at: int, launched_at: int) -> None:
        self.host.append((begun_at, launched_at))


@pytest.fixture
def device() -> OnHostClock:
    return OnHostClock()


@pytest.fixture
def timing(device: OnHostClock) -> Iterator[DeviceTiming]:
    graph_capture.open_captures = 0
    timing = DeviceTiming(lambda: device)
    yield timing
    timing.stop()


def wait_until(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 5
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def start_device_timing(timing: DeviceTiming) -> None:
    timing.begin()
    assert wait_until(lambda: timing.thread.slot is not None and timing.thread.slot.timeline is not None)


def step(timing: DeviceTiming, device: OnHostClock, work: Work, always: bool = True) -> None:
    begun = timing.begin(always=always)
    device.launch(MS)
    timing.end(begun, work)


def test_host_times_until_events_exist_then_the_device(timing: DeviceTiming, device: OnHostClock) -> None:
    work = Work()
    step(timing, device, work)
    assert len(work.host) == 1
    start_device_timing(timing)
    step(timing, device, work)
    assert wait_until(lambda: len(work.device) == 1)  # only the worker collects
    assert len(work.host) == 1
    assert work.device[0].ended_at - work.device[0].started_at >= MS


def test_device_is_timed_where_another_measurement_of_it_fails(
    timing: DeviceTiming, device: OnHostClock, caplog: pytest.LogCaptureFixture
) -> None:
    """torch with CUDA and no driver: the observer of out-of-memory errors raises."""

    def fail(device: object) -> Callable[[], None]:
        raise RuntimeError("Found no NVIDIA driver")

    timing.on_first_use = fail
    start_device_timing(timing)
    work = Work()
    step(timing, device, work)
    assert wait_until(lambda: len(work.device) == 1)
    assert "failed and is not taken: RuntimeError" in caplog.text


def test_without_device_lookup_is_retried_once_per_second(device: OnHostClock) -> None:
    lookups: list[None] = []
    timing = DeviceTiming(lambda: lookups.append(None))
    work = Work()
    for _ in range(50):
        step(timing, device, work)
    assert len(lookups) == 1
    assert len(work.host) == 1  # the first: the next is timed after 500 ms
    timing.thread.check_due_at = 0
    step(timing, device, work)
    assert len(lookups) == 2


def test_short_steps_are_sampled_and_others_not_reported(timing: DeviceTiming, device: OnHostClock) -> None:
    start_device_timing(timing)
    work = Work()
    begun = [timing.begin() for _ in range(1)]
    for _ in range(200):
        step_begun = timing.begin()
        begun.append(step_begun)
        if isinstance(step_begun, DeviceSpan):
            timing.end(step_begun, work)
    assert UNTIMED in begun
    timing.end(UNTIMED, work)
    assert work.host == []


def test_engine_timer_needs_only_begin_end_and_cancel(timing: DeviceTiming, device: OnHostClock) -> None:
    """SGLang's `device_timer` (srt/utils/device_timer.py, 0.5.23): `with model_runner.device_timer.wrap(metadata={"category": …})`."""

    class DeviceTimer:
        def __init__(self, works: dict[str, Work]) -> None:
            self.works = works

        @contextmanager
        def wrap(self, metadata: dict[str, str]) -> Iterator[None]:
            begun = timing.begin(always=metadata["category"] != "decode")
            try:
                yield
            except BaseException:
                timing.cancel(begun)
                raise
            timing.end(begun, self.works[metadata["category"]])

    start_device_timing(timing)
    works = {"extend": Work(), "decode": Work()}
    timer = DeviceTimer(works)
    for category, length in (("extend", 4 * MS), ("decode", MS)):
        with timer.wrap(metadata={"category": category}):
            device.launch(length)
    with pytest.raises(ValueError, match="the engine's own"), timer.wrap(metadata={"category": "extend"}):
        raise ValueError("the engine's own")
    assert wait_until(lambda: all(len(work.device) == 1 for work in works.values()))
    lengths = [work.device[0].ended_at - work.device[0].started_at for work in works.values()]
    assert lengths == [pytest.approx(length, abs=MS / 10) for length in (4 * MS, MS)]


def test_host_times_during_graph_capture(timing: DeviceTiming, device: OnHostClock) -> None:
    start_device_timing(timing)
    work = Work()
    graph_capture.begin_capture()
    try:
        step(timing, device, work)
    finally:
        graph_capture.end_capture()
    assert len(work.host) == 1


def test_cancelled_span_returns_its_events_to_the_pool(timing: DeviceTiming, device: OnHostClock) -> None:
    start_device_timing(timing)
    slot = timing.thread.slot
    assert slot is not None
    assert slot.timeline is not None
    free = len(slot.timeline._pool)
    timing.cancel(timing.begin(always=True))
    assert len(slot.timeline._pool) == free


def test_events_of_an_ended_thread_are_reused(timing: DeviceTiming, device: OnHostClock) -> None:
    made: list[int] = []

    def engine() -> None:
        start_device_timing(timing)
        made.append(device.calls["event"])

    for _ in range(3):
        thread = threading.Thread(target=engine)
        thread.start()
        thread.join(10)
        worker = timing._worker
        assert worker is not None
        worker._wake_event.set()
        assert wait_until(lambda free=worker._free_timelines: len(free) == 1)
    assert len(set(made)) == 1


def test_disabled_timing_never_looks_up_a_device(device: OnHostClock) -> None:
    lookups: list[None] = []
    timing = DeviceTiming(lambda: lookups.append(None))
    timing.is_on = False
    work = Work()
    step(timing, device, work)
    assert lookups == []
    assert len(work.host) == 1


def test_stop_ends_the_worker_and_host_times(timing: DeviceTiming, device: OnHostClock) -> None:
    start_device_timing(timing)
    worker = timing._worker
    assert worker is not None
    timing.stop()
    worker.join(5)
    assert not worker.is_alive()
    work = Work()
    step(timing, device, work)
    assert len(work.host) == 1


def test_forked_child_neither_uses_nor_frees_parent_events(timing: DeviceTiming, device: OnHostClock) -> None:
    from otel_infer.gpu import timing as module

    start_device_timing(timing)
    slot, worker = timing.thread.slot, timing._worker
    timing._reset_after_fork()  # as `os.fork` calls it
    assert timing.thread.slot is None
    assert {id(slot), id(worker)} <= set(map(id, module._never_freed))
    assert worker is not None
    worker.stop()


def test_work_on_another_device_is_timed_by_host(timing: DeviceTiming, device: OnHostClock) -> None:
    start_device_timing(timing)
    work = Work()
    for kind, index in (("cpu", None), ("fake", 1), ("fake", 0), ("fake", None)):
        begun = timing.begin(always=True, on=SimpleNamespace(type=kind, index=index))
        timing.end(begun, work)
    assert len(work.host) == 2
    assert wait_until(lambda: len(work.device) == 2)


def test_host_times_until_the_first_anchor(timing: DeviceTiming, device: OnHostClock) -> None:
    record_and_poll = device.record_and_poll
    device.record_and_poll = lambda event, stream: None  # type: ignore[method-assign]
    work = Work()
    timing.begin()
    time.sleep(0.3)
    step(timing, device, work)
    step(timing, device, work)  # sooner than the host's clock times another one
    assert len(work.host) == 1
    device.record_and_poll = record_and_poll  # type: ignore[method-assign]
    start_device_timing(timing)
    step(timing, device, work)
    assert wait_until(lambda: len(work.device) == 1)


def test_host_times_few_steps_without_a_device_and_more_while_a_device_is_awaited() -> None:
    without = DeviceTiming(lambda: None)
    without.begin()
    assert without.host_interval_ns == HOST_SAMPLE_NS
    device = OnHostClock()
    device.record_and_poll = lambda event, stream: None  # type: ignore[method-assign]
    awaited = DeviceTiming(lambda: device)
    awaited.begin()
    try:
        assert awaited.host_interval_ns == PENDING_SAMPLE_NS < HOST_SAMPLE_NS
    finally:
        awaited.stop()


def test_span_may_end_on_another_thread(timing: DeviceTiming, device: OnHostClock) -> None:
    start_device_timing(timing)
    work, begun = Work(), timing.begin(always=True)
    device.launch(MS)
    thread = threading.Thread(target=timing.end, args=(begun, work))
    thread.start()
    thread.join()
    assert wait_until(lambda: len(work.device) == 1)
    assert work.host == []


def test_device_interval_arrives_within_the_grace_period(timing: DeviceTiming, device: OnHostClock) -> None:
    start_device_timing(timing)
    time.sleep(0.5)  # the worker is idle
    for _ in range(3):
        work = Work()
        step(timing, device, work)
        ended = time.monotonic()
        assert wait_until(lambda work=work: len(work.device) == 1)
        assert time.monotonic() - ended < GRACE_NS / 1e9


@pytest.mark.parametrize(
    ("environment", "is_on"),
    [
        ({}, True),
        ({"OTEL_INFER_DEVICE_TIMING": "off"}, False),
        ({"OTEL_INFER_INTEGRATIONS": "asgi,cuda_graphs"}, True),
        ({"OTEL_INFER_INTEGRATIONS": "asgi"}, False),
        ({"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "otel_infer_cuda_graphs"}, False),
    ],
)
def test_device_timing_requires_the_cuda_graphs_integration(environment: dict[str, str], is_on: bool) -> None:
    code = """
import otel_infer
from opentelemetry.sdk.trace import TracerProvider
otel_infer.instrument(tracer_provider=TracerProvider())
from otel_infer.gpu.timing import timing
print(timing.is_on)
"""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environ, **environment},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split()[-1] == str(is_on)


def test_each_of_six_threads_gets_device_times(timing: DeviceTiming, device: OnHostClock) -> None:
    """Their steps take 4 ms. The timing thread divides the allowed cost among them."""
    works = [Work() for _ in range(6)]
    started = threading.Barrier(6)
    shares: list[int] = []

    def run(work: Work) -> None:
        start_device_timing(timing)
        started.wait(10)
        for _ in range(100):
            begun = timing.begin()
            device.launch(4 * MS)
            timing.end(begun, work)
            time.sleep(0.004)
        slot = timing.thread.slot
        assert slot is not None
        assert slot.timeline is not None
        shares.append(slot.timeline.sampler._threads)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert wait_until(lambda: all(len(work.device) >= 5 for work in works))
    assert max(shares) == 6
