"""Event loop lag, measured by a timer on a loop with a simulated clock."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from otel_infer import _clock
from otel_infer.instrumentation.asgi.entry_point import AsgiEntryPoint
from otel_infer.instrumentation.http_server import event_loop_lag
from otel_infer.ringbuffer import layout
from otel_infer.ringbuffer.native import native
from otel_infer.ringbuffer.recorder import recorder
from tests.support.frames import list_own_frames
from tests.support.rings import Recording

MS = 1_000_000


class Request:
    """An object held by the context of a request."""


class Loop:
    """The part of an event loop that a timer uses; its time advances only in `run_next_timer`."""

    def __init__(self) -> None:
        self.now = 1_000 * MS
        self.timers: list[tuple[int, Callable[[], None]]] = []

    def call_later(self, delay: float, call: Callable[[], None], *, context: Any) -> None:
        assert not context
        self.timers.append((self.now + round(delay * 1e9), call))

    def run_next_timer(self, late_ms: int) -> None:
        """Runs the next timer `late_ms` after its deadline."""
        due, call = self.timers.pop(0)
        self.now = due + late_ms * MS
        call()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    pauses: list[tuple[str, int, int]] = []
    monkeypatch.setattr(recorder, "record_pause", lambda *pause: pauses.append(pause))
    monkeypatch.setattr(recorder, "requests", SimpleNamespace(in_flight=1, words={layout.W_OFFERED: 1}))
    return pauses


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    loop = Loop()
    monkeypatch.setattr(_clock, "now", lambda: loop.now)
    monkeypatch.setattr(asyncio, "_get_running_loop", lambda: loop)
    yield loop
    event_loop_lag._thread_timer.timer = None


def test_late_timer_is_a_pause_from_its_deadline(loop: Loop, pauses: list[Any]) -> None:
    event_loop_lag.watch_event_loop()
    loop.run_next_timer(late_ms=150)
    assert pauses == [("event_loop", 1_050 * MS, 1_200 * MS)]


def test_call_that_blocks_its_loop_is_a_pause_from_its_begin(loop: Loop, pauses: list[Any]) -> None:
    event_loop_lag.watch_event_loop()
    began_at, loop.now = loop.now + 10 * MS, loop.now + 140 * MS
    event_loop_lag.record_blocked_loop(began_at)
    loop.run_next_timer(late_ms=92)
    assert pauses == [("event_loop", 1_010 * MS, 1_140 * MS)]  # the timer does not record it again


def test_call_that_blocks_a_late_loop_is_a_pause_from_the_deadline_of_the_timer(
    loop: Loop, pauses: list[Any]
) -> None:
    event_loop_lag.watch_event_loop()
    began_at, loop.now = loop.now + 80 * MS, loop.now + 140 * MS
    event_loop_lag.record_blocked_loop(began_at)
    assert pauses == [("event_loop", 1_050 * MS, 1_140 * MS)]


def test_call_on_another_thread_than_a_loop_blocks_none(
    loop: Loop, pauses: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    event_loop_lag.watch_event_loop()
    monkeypatch.setattr(asyncio, "_get_running_loop", lambda: None)
    loop.now += 140 * MS
    event_loop_lag.record_blocked_loop(loop.now - 100 * MS)
    assert pauses == []


def test_punctual_loop_records_nothing_and_rearms_the_timer(loop: Loop, pauses: list[Any]) -> None:
    event_loop_lag.watch_event_loop()
    for _ in range(5):
        loop.run_next_timer(late_ms=3)
    assert pauses == []
    assert len(loop.timers) == 1


def test_requests_of_one_loop_share_a_timer(loop: Loop, pauses: list[Any]) -> None:
    for _ in range(5):
        event_loop_lag.watch_event_loop()
    assert len(loop.timers) == 1


def test_timer_stops_without_requests_in_flight(
    loop: Loop, pauses: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    event_loop_lag.watch_event_loop()
    monkeypatch.setattr(recorder, "requests", SimpleNamespace(in_flight=0, words={layout.W_OFFERED: 1}))
    loop.run_next_timer(late_ms=70)
    assert loop.timers == []
    assert len(pauses) == 1  # the request ended while the loop was blocked
    event_loop_lag.watch_event_loop()
    assert len(loop.timers) == 1


def test_timer_runs_while_requests_arrive(
    loop: Loop, pauses: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    event_loop_lag.watch_event_loop()
    for offered in (2, 3):
        words = {layout.W_OFFERED: offered}
        monkeypatch.setattr(recorder, "requests", SimpleNamespace(in_flight=0, words=words))
        loop.run_next_timer(late_ms=0)
    assert len(loop.timers) == 1


def test_stopped_timer_tells_the_entry_points_it_watched(
    loop: Loop, pauses: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry_point = AsgiEntryPoint()
    event_loop_lag.watch_event_loop(entry_point)
    assert entry_point.is_watched
    monkeypatch.setattr(recorder, "requests", None)
    loop.run_next_timer(late_ms=0)
    assert not entry_point.is_watched


def test_new_loop_gets_its_own_timer(loop: Loop, pauses: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    event_loop_lag.watch_event_loop()
    another = Loop()
    monkeypatch.setattr(asyncio, "_get_running_loop", lambda: another)
    event_loop_lag.watch_event_loop()
    assert len(another.timers) == 1


def test_a_new_loop_frees_the_word_of_the_one_it_replaces(
    loop: Loop, pauses: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [layout.W_LOOPS, layout.W_LOOPS + 2]
    monkeypatch.setattr(event_loop_lag, "_free_words", free)
    monkeypatch.setattr(event_loop_lag._thread_timer, "timer", None, raising=False)
    for another in [Loop() for _ in range(5)]:
        monkeypatch.setattr(asyncio, "_get_running_loop", lambda another=another: another)
        event_loop_lag.watch_event_loop()
    assert len(free) == 1


def test_no_timer_without_a_running_asyncio_loop(pauses: list[Any]) -> None:
    event_loop_lag.watch_event_loop()
    assert event_loop_lag._thread_timer.timer is None


def test_blocked_event_loop_is_recorded_with_its_interval(pauses: list[tuple[str, int, int]]) -> None:
    async def served() -> tuple[int, int]:
        event_loop_lag.watch_event_loop()
        await asyncio.sleep(0)
        began = _clock.now()
        time.sleep(0.2)
        ended = _clock.now()
        while not pauses:
            await asyncio.sleep(0.01)
        return began, ended

    began, ended = asyncio.run(served())
    (cause, since, until) = pauses[0]
    assert cause == "event_loop"
    assert began < since < ended <= until
    assert until - since >= 100 * MS


def test_timer_does_not_retain_the_request_context(pauses: list[Any]) -> None:
    request: contextvars.ContextVar[Request] = contextvars.ContextVar("request")

    async def handle_request() -> weakref.ref[Request]:
        request.set(Request())
        event_loop_lag.watch_event_loop()
        return weakref.ref(request.get())

    async def served() -> bool:
        seen = await asyncio.ensure_future(handle_request())
        await asyncio.sleep(0)
        gc.collect()
        return event_loop_lag._thread_timer.timer is not None and seen() is None

    assert asyncio.run(served())


def test_loops_of_two_threads_have_separate_timers(pauses: list[Any]) -> None:
    timers: list[Any] = []
    both = threading.Barrier(2, timeout=10)

    async def served() -> None:
        event_loop_lag.watch_event_loop()
        timers.append(event_loop_lag._thread_timer.timer)
        await asyncio.sleep(0.12)

    def run_loop() -> None:
        both.wait()
        asyncio.run(served())

    threads = [threading.Thread(target=run_loop) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len({id(timer) for timer in timers}) == 2


# ── the compiled check ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def compiled_timer(
    recording: Recording, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> event_loop_lag._LagTimer:
    """Returns a timer whose first check was made by Python code, as the real clock shows it."""
    monkeypatch.setattr(_clock, "now", time.monotonic_ns)
    assert recorder.ensure_rings() and recorder.requests is not None
    recorder.requests.words[layout.W_OFFERED] = 1
    event_loop_lag.watch_event_loop()
    timer = event_loop_lag._thread_timer.timer
    assert timer is not None
    recorder.requests.words[layout.W_OFFERED] = 2
    timer.check_lag()
    loop.timers.clear()
    return timer


@pytest.mark.skipif(native is None, reason="the compiled module is not built")
def test_usual_check_enters_no_python_code(compiled_timer: event_loop_lag._LagTimer, loop: Loop) -> None:
    assert recorder.requests is not None
    recorder.requests.words[layout.W_OFFERED] = 3
    due_at = compiled_timer.due_at
    assert list_own_frames(compiled_timer) == []
    assert compiled_timer.due_at > due_at and compiled_timer.offered == 3
    assert [call for _, call in loop.timers] == [compiled_timer]


@pytest.mark.skipif(native is None, reason="the compiled module is not built")
@pytest.mark.parametrize("why", ["late", "no requests", "other ring"])
def test_unusual_check_is_made_by_python_code(
    compiled_timer: event_loop_lag._LagTimer, recording: Recording, why: str
) -> None:
    assert recorder.requests is not None
    if why != "no requests":
        recorder.requests.words[layout.W_OFFERED] = 3
    if why == "late":
        compiled_timer.due_at -= 100 * MS
    if why == "other ring":
        recorder.requests.retire()
    assert "_LagTimer.check_lag" in list_own_frames(compiled_timer)
    assert (event_loop_lag._thread_timer.timer is None) == (why == "no requests")
