"""Garbage collections: long ones are recorded as pauses, short ones are ignored, signals reach user code."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from otel_infer import semconv
from otel_infer.instrumentation import garbage_collector as gc_instrumentation
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import request_span, start
from tests.support.rings import Recording

OBJECTS = 100_000
"""Reference cycles; scanning them takes several milliseconds."""


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    others = list(gc.callbacks)  # hypothesis adds a callback when it is used
    gc.callbacks.clear()
    gc_instrumentation.instrumentor.install()
    yield
    gc_instrumentation.instrumentor.remove()
    left = list(gc.callbacks)
    gc.callbacks[:] = others
    assert left == []
    recorder.deferred_recorders.clear()


@pytest.fixture
def heap() -> Iterator[list[Any]]:
    heap: list[Any] = []
    for _ in range(OBJECTS):
        circle: list[Any] = []
        circle.append(circle)
        heap.append(circle)
    yield heap
    heap.clear()


def request() -> request_span.RequestSpan:
    opened = start.open_request(
        "chat toy", owner="toy", operation="chat", provider="toy", model="toy", generative=False
    )
    assert opened is not None
    return opened


def test_long_collection_is_a_pause_of_the_request(recording: Recording, heap: list[Any]) -> None:
    live = request()
    gc.collect()
    live.close()
    (record,) = recording.records()
    longest = max(record.pauses, key=lambda pause: pause.ended_at - pause.started_at)
    assert longest.cause == "gc"
    assert gc_instrumentation.MIN_PAUSE_NS < longest.ended_at - longest.started_at < record.duration_ns
    assert record.arrived_at < longest.started_at


def test_short_collections_are_not_recorded(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc_instrumentation, "MIN_PAUSE_NS", 1 << 60)
    live = request()
    gc.collect()
    live.close()
    assert [record.pauses for record in recording.records()] == [()]


def test_next_collection_records_the_previous_pause(monkeypatch: pytest.MonkeyPatch, heap: list[Any]) -> None:
    pauses: list[tuple[str, int, int]] = []
    monkeypatch.setattr(recorder, "record_pause", lambda *pause: pauses.append(pause))
    gc.collect()
    assert pauses == []
    gc.collect(0)
    (cause, started_at, ended_at) = pauses[0]
    assert cause == "gc"
    assert ended_at - started_at > gc_instrumentation.MIN_PAUSE_NS


def test_concurrent_flushes_record_a_pause_once(monkeypatch: pytest.MonkeyPatch, heap: list[Any]) -> None:
    pauses: list[tuple[str, int, int]] = []
    monkeypatch.setattr(recorder, "record_pause", lambda *pause: pauses.append(pause))
    gc.disable()
    try:
        gc.collect()
        threads = [threading.Thread(target=recorder.deferred_recorders["gc"]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        recorder.deferred_recorders["gc"]()
    finally:
        gc.enable()
    assert len(pauses) == 1


def test_collection_without_a_recorder_starts_no_recording(heap: list[Any]) -> None:
    assert recorder.requests is None
    gc.collect()
    gc.collect()
    assert recorder.requests is None


def test_signal_during_a_collection_reaches_user_code(
    heap: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(5):
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 0.001)
                gc.collect()
                time.sleep(1)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert lost == []


def test_failing_recorder_does_not_break_the_collection(
    monkeypatch: pytest.MonkeyPatch, heap: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("broken")

    lost: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    monkeypatch.setattr(recorder, "record_pause", broken)
    gc.collect()
    gc.collect()
    recorder.deferred_recorders["gc"]()
    assert lost == []
    assert len(caplog.records) == 1
    assert gc_instrumentation.instrumentor.status.hooks_active == 0


def test_second_install_is_ignored() -> None:
    others = len(gc.callbacks)
    gc_instrumentation.instrumentor.install()
    assert len(gc.callbacks) == others
    assert (
        gc_instrumentation.instrumentor.status.hooks_active
        == gc_instrumentation.instrumentor.status.hooks_total
        == 1
    )


def test_removal_keeps_callbacks_of_other_libraries() -> None:
    def other_callback(phase: str, info: dict[str, int]) -> None:
        pass

    gc.callbacks.append(other_callback)
    try:
        gc_instrumentation.instrumentor.remove()
        assert gc.callbacks[-1] is other_callback
        gc_instrumentation.instrumentor.install()
        gc.callbacks.clear()
        assert gc_instrumentation.instrumentor.status.hooks_active == 0
        gc_instrumentation.instrumentor.remove()
        assert gc.callbacks == []
    finally:
        if other_callback in gc.callbacks:
            gc.callbacks.remove(other_callback)


def test_forked_child_records_its_own_pauses(recording: Recording, heap: list[Any]) -> None:
    live = request()
    gc.collect()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert recorder.requests is None
            child_request = request()
            gc.collect()
            child_request.close()
            written = recorder.requests
            status = 0 if written is not None and b"gc" in bytes(written.memory) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    live.close(events.OK)
    assert recording.records()[0].pauses


def test_removed_hook_leaves_no_deferred_recorder() -> None:
    assert semconv.CAUSE_GC in recorder.deferred_recorders
    gc_instrumentation.instrumentor.remove()
    assert semconv.CAUSE_GC not in recorder.deferred_recorders
