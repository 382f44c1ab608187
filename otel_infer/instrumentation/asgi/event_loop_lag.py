"""Records pauses of the event loop. A call that blocks the loop delays all requests in flight.

    a request arrives ─ a timer on its loop, every 50 ms ─▶ it runs over 20 ms late: a pause, from due to ran

A timer is used because every loop has one. Timing asyncio's callbacks one by one would cost time for each
chunk of each stream, and uvloop's callbacks cannot be timed. The timer costs one wake-up per 50 ms, none
while no request is in flight. The block may have begun up to 50 ms before the timer was due, so a pause may
be that much longer than recorded. The cause is unknown: a loop that waited for a core or for the GIL is as
late as a blocked one.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading

from otel_infer import _clock
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder

CHECK_INTERVAL_NS = 50_000_000
MIN_LAG_NS = 20_000_000
"""Shorter lags are not recorded, because they are not noticed as a frozen server."""


class _LagTimer:
    """A repeating timer on one loop. It stops when no request of this process is in flight."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        # An empty context, because the current one would keep the request alive.
        self._context = contextvars.Context()
        self._schedule_check()

    def _schedule_check(self) -> None:
        self._due_at = _clock.now() + CHECK_INTERVAL_NS
        self.loop.call_later(CHECK_INTERVAL_NS / 1e9, self._check_lag, context=self._context)

    def _check_lag(self) -> None:
        now = _clock.now()
        if now - self._due_at > MIN_LAG_NS:
            recorder.record_pause(events.PAUSE_EVENT_LOOP, self._due_at, now)
        requests = recorder.requests
        if requests is not None and requests.in_flight:
            self._schedule_check()
        else:
            _thread_timer.timer = None


class _ThreadTimer(threading.local):
    """The timer of the loop that runs in this thread; None if there is none."""

    timer: _LagTimer | None = None


_thread_timer = _ThreadTimer()


def watch_event_loop() -> None:
    """Starts the lag timer of the running loop, if none is active. It stops when no request is in flight."""
    loop = asyncio._get_running_loop()  # None if the loop is not asyncio's
    timer = _thread_timer.timer
    if loop is not None and (timer is None or timer.loop is not loop):
        _thread_timer.timer = _LagTimer(loop)
