"""How late the event loop is while requests are in flight: a call that blocks it holds up all of them.

    a request arrives ─ a timer on its loop, every 50 ms ─▶ it runs 20 ms late or more: a pause, from due to ran

A timer, because every loop has one: asyncio's callbacks could be timed one by one, at a price for each chunk of each stream,
and uvloop's could not. It costs one wake-up in 50 ms, none when no request is in flight. The loop was blocked for up to 50 ms
longer than is said: it is not known when in the time before the timer was due that began. Nor is it known why: a loop that did
not get a core, or the GIL, is as late as one that is blocked.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading

from otel_infer import _clock
from otel_infer.ringbuffer.recorder import recorder

CAUSE = "event_loop"
CHECK_INTERVAL_NS = 50_000_000
MIN_LAG_NS = 20_000_000
"""Of what is shorter, nobody says that the server has frozen."""


class _LagTimer:
    """On one loop; runs until no request of this process is in flight."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        # An empty one: that of the request would keep the request alive.
        self._context = contextvars.Context()
        self._schedule_check()

    def _schedule_check(self) -> None:
        self._due_at = _clock.now() + CHECK_INTERVAL_NS
        self.loop.call_later(CHECK_INTERVAL_NS / 1e9, self._check_lag, context=self._context)

    def _check_lag(self) -> None:
        at = _clock.now()
        if at - self._due_at > MIN_LAG_NS:
            recorder.record_pause(CAUSE, self._due_at, at)
        requests = recorder.requests
        if requests is not None and requests.in_flight:
            self._schedule_check()
        else:
            _thread_timer.timer = None


class _ThreadTimer(threading.local):
    """The timer of the loop that runs in this thread, if there is one."""

    timer: _LagTimer | None = None


_thread_timer = _ThreadTimer()


def watch_event_loop() -> None:
    """From now on, until no request is in flight, it is seen whether the loop that runs here is late."""
    loop = asyncio._get_running_loop()  # None where another library than asyncio has the loop
    timer = _thread_timer.timer
    if loop is not None and (timer is None or timer.loop is not loop):
        _thread_timer.timer = _LagTimer(loop)
