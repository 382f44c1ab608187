"""The event loop is late: seen by a timer, on a loop whose clock and turns are given."""

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
from otel_infer.instrumentation.asgi import event_loop_lag
from otel_infer.ringbuffer.recorder import recorder

MS = 1_000_000


class Request:
    """Something that the context of a request holds."""


class Loop:
    """As much of an event loop as a timer needs; time passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1_000 * MS
        self.timers: list[tuple[int, Callable[[], None]]] = []

    def call_later(self, delay: float, call: Callable[[], None], *, context: Any) -> None:
        assert not context
        self.timers.append((self.now + round(delay * 1e9), call))

    def turns(self, late_ms: int) -> None:
        """The next timer is run, so much after it is due."""
        due, call = self.timers.pop(0)
        self.now = due + late_ms * MS
        call()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    told: list[tuple[str, int, int]] = []
    monkeypatch.setattr(recorder, "record_pause", lambda *said: told.append(said))
    monkeypatch.setattr(recorder, "requests", SimpleNamespace(in_flight=1))
    return told


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    loop = Loop()
    monkeypatch.setattr(_clock, "now", lambda: loop.now)
    monkeypatch.setattr(asyncio, "_get_running_loop", lambda: loop)
    yield loop
    event_loop_lag._thread_timer.timer = None


def test_a_loop_that_goes_on_late_was_held_up_from_when_it_was_to(loop: Loop, told: list[Any]) -> None:
    event_loop_lag.watch_event_loop()
    loop.turns(late_ms=150)
    assert told == [("event_loop", 1_050 * MS, 1_200 * MS)]


def test_a_loop_that_is_in_time_says_nothing_and_is_looked_at_again(loop: Loop, told: list[Any]) -> None:
    event_loop_lag.watch_event_loop()
    for _ in range(5):
        loop.turns(late_ms=3)
    assert told == []
    assert len(loop.timers) == 1


def test_requests_of_one_loop_share_a_timer(loop: Loop, told: list[Any]) -> None:
    for _ in range(5):
        event_loop_lag.watch_event_loop()
    assert len(loop.timers) == 1


def test_without_a_request_in_flight_nothing_wakes_up_until_the_next(
    loop: Loop, told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    event_loop_lag.watch_event_loop()
    monkeypatch.setattr(recorder, "requests", SimpleNamespace(in_flight=0))
    loop.turns(late_ms=70)
    assert loop.timers == []
    assert len(told) == 1  # it ended while the loop was held up
    event_loop_lag.watch_event_loop()
    assert len(loop.timers) == 1


def test_a_loop_that_was_closed_is_not_waited_for(
    loop: Loop, told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    event_loop_lag.watch_event_loop()
    another = Loop()
    monkeypatch.setattr(asyncio, "_get_running_loop", lambda: another)
    event_loop_lag.watch_event_loop()
    assert len(another.timers) == 1


def test_where_no_asyncio_loop_runs_nothing_is_seen(told: list[Any]) -> None:
    event_loop_lag.watch_event_loop()
    assert event_loop_lag._thread_timer.timer is None


def test_a_real_loop_that_is_blocked_says_when(told: list[tuple[str, int, int]]) -> None:
    async def served() -> tuple[int, int]:
        event_loop_lag.watch_event_loop()
        await asyncio.sleep(0)
        began = _clock.now()
        time.sleep(0.2)
        ended = _clock.now()
        while not told:
            await asyncio.sleep(0.01)
        return began, ended

    began, ended = asyncio.run(served())
    (cause, since, until) = told[0]
    assert cause == "event_loop"
    assert began < since < ended <= until
    assert until - since >= 100 * MS


def test_the_timer_keeps_nothing_of_the_request_that_set_it(told: list[Any]) -> None:
    request: contextvars.ContextVar[Request] = contextvars.ContextVar("request")

    async def works() -> weakref.ref[Request]:
        request.set(Request())
        event_loop_lag.watch_event_loop()
        return weakref.ref(request.get())

    async def served() -> bool:
        seen = await asyncio.ensure_future(works())
        await asyncio.sleep(0)
        gc.collect()
        return event_loop_lag._thread_timer.timer is not None and seen() is None

    assert asyncio.run(served())


def test_loops_of_two_threads_have_a_timer_each(told: list[Any]) -> None:
    timers: list[Any] = []
    both = threading.Barrier(2, timeout=10)

    async def served() -> None:
        event_loop_lag.watch_event_loop()
        timers.append(event_loop_lag._thread_timer.timer)
        await asyncio.sleep(0.12)

    def runs() -> None:
        both.wait()
        asyncio.run(served())

    threads = [threading.Thread(target=runs) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len({id(timer) for timer in timers}) == 2
