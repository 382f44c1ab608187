"""Long collections of garbage are pauses; short ones are nothing; signals stay the user's."""

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

from otel_infer.instrumentation import garbage_collector as ours
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import request_span, start
from tests.support.rings import Recording

OBJECTS = 100_000
"""In circles: to look at them takes some ms."""


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    others = list(gc.callbacks)  # hypothesis has one, once it was used
    gc.callbacks.clear()
    ours.instrumentor.install()
    yield
    ours.instrumentor.remove()
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


def test_a_long_collection_is_a_pause_of_the_request_that_was_there(
    recording: Recording, heap: list[Any]
) -> None:
    live = request()
    gc.collect()
    live.close()
    (record,) = recording.records()
    longest = max(record.pauses, key=lambda pause: pause.ended_at - pause.started_at)
    assert longest.cause == "gc"
    assert ours.MIN_PAUSE_NS < longest.ended_at - longest.started_at < record.duration_ns
    assert record.arrived_at < longest.started_at


def test_short_collections_are_not_mentioned(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "MIN_PAUSE_NS", 1 << 60)
    live = request()
    gc.collect()
    live.close()
    assert [record.pauses for record in recording.records()] == [()]


def test_a_collection_is_told_by_the_next_one_if_no_request_ends(
    monkeypatch: pytest.MonkeyPatch, heap: list[Any]
) -> None:
    told: list[tuple[str, int, int]] = []
    monkeypatch.setattr(recorder, "record_pause", lambda *said: told.append(said))
    gc.collect()
    assert told == []
    gc.collect(0)
    (cause, started_at, ended_at) = told[0]
    assert cause == "gc"
    assert ended_at - started_at > ours.MIN_PAUSE_NS


def test_a_collection_is_told_once_whoever_asks(monkeypatch: pytest.MonkeyPatch, heap: list[Any]) -> None:
    told: list[tuple[str, int, int]] = []
    monkeypatch.setattr(recorder, "record_pause", lambda *said: told.append(said))
    gc.disable()
    try:
        gc.collect()
        askers = [threading.Thread(target=recorder.deferred_recorders["gc"]) for _ in range(8)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
        recorder.deferred_recorders["gc"]()
    finally:
        gc.enable()
    assert len(told) == 1


def test_a_collection_starts_nothing_where_nobody_records(heap: list[Any]) -> None:
    assert recorder.requests is None
    gc.collect()
    gc.collect()
    assert recorder.requests is None


def test_what_a_signal_raises_during_a_collection_is_raised_in_the_users_code(
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


def test_a_recorder_that_breaks_is_not_the_collectors_trouble(
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
    assert ours.instrumentor.status.hooks_active == 0


def test_instrumented_twice_is_once() -> None:
    others = len(gc.callbacks)
    ours.instrumentor.install()
    assert len(gc.callbacks) == others
    assert ours.instrumentor.status.hooks_active == ours.instrumentor.status.hooks_total == 1


def test_nothing_is_taken_away_that_somebody_else_has_put_there() -> None:
    def theirs(phase: str, info: dict[str, int]) -> None:
        pass

    gc.callbacks.append(theirs)
    try:
        ours.instrumentor.remove()
        assert gc.callbacks[-1] is theirs
        ours.instrumentor.install()
        gc.callbacks.clear()
        assert ours.instrumentor.status.hooks_active == 0
        ours.instrumentor.remove()
        assert gc.callbacks == []
    finally:
        if theirs in gc.callbacks:
            gc.callbacks.remove(theirs)


def test_a_forked_child_states_its_own_pauses(recording: Recording, heap: list[Any]) -> None:
    live = request()
    gc.collect()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert recorder.requests is None
            mine = request()
            gc.collect()
            mine.close()
            written = recorder.requests
            status = 0 if written is not None and b"gc" in bytes(written.memory) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    live.close(events.OK)
    assert recording.records()[0].pauses
