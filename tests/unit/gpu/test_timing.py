"""Who launches is timed by a device as soon as there is one: which thread has which events, and what happens meanwhile."""

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

from otel_infer.assembly.assembler import GRACE_NS
from otel_infer.gpu import graph_capture
from otel_infer.gpu.timeline import DeviceInterval, DeviceSpan
from otel_infer.gpu.timing import UNTIMED, DeviceTiming
from tests.support.fake_device import OnHostClock

MS = 1_000_000


class Work:
    """Keeps what it is told."""

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


def until(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 5
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def timed_by_device(timing: DeviceTiming) -> None:
    timing.begin()
    assert until(lambda: timing._thread.slot is not None and timing._thread.slot.timeline is not None)


def step(timing: DeviceTiming, device: OnHostClock, work: Work, always: bool = True) -> None:
    begun = timing.begin(always=always)
    device.launch(MS)
    timing.end(begun, work)


def test_until_the_events_are_made_the_host_times_and_from_then_on_the_device(
    timing: DeviceTiming, device: OnHostClock
) -> None:
    work = Work()
    step(timing, device, work)
    assert len(work.host) == 1
    timed_by_device(timing)
    step(timing, device, work)
    assert until(lambda: len(work.device) == 1)  # nobody harvests but the tender
    assert len(work.host) == 1
    assert work.device[0].ended_at - work.device[0].started_at >= MS


def test_without_a_device_the_host_times_and_looks_again_once_a_second(device: OnHostClock) -> None:
    asked: list[None] = []
    timing = DeviceTiming(lambda: asked.append(None))
    work = Work()
    for _ in range(50):
        step(timing, device, work)
    assert len(asked) == 1
    assert len(work.host) == 50
    timing._thread.checked_at -= 2_000_000_000
    step(timing, device, work)
    assert len(asked) == 2


def test_short_steps_are_not_all_timed_and_nobody_is_told_of_the_others(
    timing: DeviceTiming, device: OnHostClock
) -> None:
    timed_by_device(timing)
    work = Work()
    begun = [timing.begin() for _ in range(1)]
    for _ in range(200):
        one = timing.begin()
        begun.append(one)
        if isinstance(one, DeviceSpan):
            timing.end(one, work)
    assert UNTIMED in begun
    timing.end(UNTIMED, work)
    assert work.host == []


def test_an_engine_that_brackets_its_segments_itself_needs_no_more_than_an_object_of_that_shape(
    timing: DeviceTiming, device: OnHostClock
) -> None:
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

    timed_by_device(timing)
    works = {"extend": Work(), "decode": Work()}
    timer = DeviceTimer(works)
    for category, length in (("extend", 4 * MS), ("decode", MS)):
        with timer.wrap(metadata={"category": category}):
            device.launch(length)
    with pytest.raises(ValueError, match="the engine's own"), timer.wrap(metadata={"category": "extend"}):
        raise ValueError("the engine's own")
    assert until(lambda: all(len(work.device) == 1 for work in works.values()))
    lengths = [work.device[0].ended_at - work.device[0].started_at for work in works.values()]
    assert lengths == [pytest.approx(length, abs=MS / 10) for length in (4 * MS, MS)]


def test_while_a_graph_is_captured_the_host_times(timing: DeviceTiming, device: OnHostClock) -> None:
    timed_by_device(timing)
    work = Work()
    graph_capture.begin_capture()
    try:
        step(timing, device, work)
    finally:
        graph_capture.end_capture()
    assert len(work.host) == 1


def test_what_did_not_come_to_launching_is_nobodys_and_its_events_are_used_again(
    timing: DeviceTiming, device: OnHostClock
) -> None:
    timed_by_device(timing)
    slot = timing._thread.slot
    assert slot is not None
    assert slot.timeline is not None
    free = len(slot.timeline._pool)
    timing.cancel(timing.begin(always=True))
    assert len(slot.timeline._pool) == free


def test_a_thread_that_ends_leaves_its_events_to_the_next_one(
    timing: DeviceTiming, device: OnHostClock
) -> None:
    made: list[int] = []

    def engine() -> None:
        timed_by_device(timing)
        made.append(device.calls["event"])

    for _ in range(3):
        thread = threading.Thread(target=engine)
        thread.start()
        thread.join(10)
        tender = timing._worker
        assert tender is not None
        tender._wake_event.set()
        assert until(lambda free=tender._free_timelines: len(free) == 1)
    assert len(set(made)) == 1


def test_switched_off_it_never_asks_for_a_device(device: OnHostClock) -> None:
    asked: list[None] = []
    timing = DeviceTiming(lambda: asked.append(None))
    timing.is_on = False
    work = Work()
    step(timing, device, work)
    assert asked == []
    assert len(work.host) == 1


def test_once_stopped_its_thread_ends_and_the_host_times(timing: DeviceTiming, device: OnHostClock) -> None:
    timed_by_device(timing)
    tender = timing._worker
    assert tender is not None
    timing.stop()
    tender.join(5)
    assert not tender.is_alive()
    work = Work()
    step(timing, device, work)
    assert len(work.host) == 1


def test_in_a_forked_child_nothing_of_the_parents_device_is_used_or_freed(
    timing: DeviceTiming, device: OnHostClock
) -> None:
    from otel_infer.gpu import timing as module

    timed_by_device(timing)
    slot, tender = timing._thread.slot, timing._worker
    timing._reset_after_fork()  # as `os.fork` calls it
    assert timing._thread.slot is None
    assert {id(slot), id(tender)} <= set(map(id, module._never_freed))
    assert tender is not None
    tender.stop()


def test_what_runs_on_another_device_than_the_threads_is_timed_by_the_host(
    timing: DeviceTiming, device: OnHostClock
) -> None:
    timed_by_device(timing)
    work = Work()
    for kind, index in (("cpu", None), ("fake", 1), ("fake", 0), ("fake", None)):
        begun = timing.begin(always=True, on=SimpleNamespace(type=kind, index=index))
        timing.end(begun, work)
    assert len(work.host) == 2
    assert until(lambda: len(work.device) == 2)


def test_without_an_anchor_the_host_times_until_there_is_one(
    timing: DeviceTiming, device: OnHostClock
) -> None:
    answers = device.record_and_poll
    device.record_and_poll = lambda event, stream: None  # type: ignore[method-assign]
    work = Work()
    timing.begin()
    time.sleep(0.3)
    step(timing, device, work)
    assert len(work.host) == 1
    device.record_and_poll = answers  # type: ignore[method-assign]
    timed_by_device(timing)
    step(timing, device, work)
    assert until(lambda: len(work.device) == 1)


def test_what_one_thread_began_another_may_end(timing: DeviceTiming, device: OnHostClock) -> None:
    timed_by_device(timing)
    work, begun = Work(), timing.begin(always=True)
    device.launch(MS)
    thread = threading.Thread(target=timing.end, args=(begun, work))
    thread.start()
    thread.join()
    assert until(lambda: len(work.device) == 1)
    assert work.host == []


def test_what_a_device_says_is_told_before_a_request_would_be_concluded(
    timing: DeviceTiming, device: OnHostClock
) -> None:
    timed_by_device(timing)
    time.sleep(0.5)  # the tender rests
    for _ in range(3):
        work = Work()
        step(timing, device, work)
        ended = time.monotonic()
        assert until(lambda work=work: len(work.device) == 1)
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
def test_a_device_is_asked_only_by_who_is_told_when_a_graph_is_captured(
    environment: dict[str, str], is_on: bool
) -> None:
    code = """
import otel_infer
from opentelemetry.sdk.trace import TracerProvider
otel_infer.instrument(tracer_provider=TracerProvider())
from otel_infer.gpu.timing import timing
print(timing.is_on)
"""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**kept, **environment}, check=True, capture_output=True, text=True
    )
    assert done.stdout.split()[-1] == str(is_on)
