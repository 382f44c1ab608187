"""Records pauses of the event loop. A call that blocks the loop delays all requests in flight.

    a request arrives ─ a timer on its loop, every 50 ms ─▶ it runs over 20 ms late: a pause, from due to ran

A timer is used because every loop has one. Timing asyncio's callbacks one by one would cost time for each
chunk of each stream, and uvloop's callbacks cannot be timed. The timer costs one wake-up per 50 ms, none
while no request arrives and none is in flight. The block may have begun up to 50 ms before the timer was due.
So a pause may be that much longer than recorded. The cause is unknown: a loop that waited for a core or for
the GIL is as late as a blocked loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import TYPE_CHECKING, Any, Protocol

from otel_infer import _clock
from otel_infer.ringbuffer import events, layout
from otel_infer.ringbuffer.native import native
from otel_infer.ringbuffer.recorder import recorder

CHECK_INTERVAL_NS = 50_000_000
CHECK_INTERVAL_S = CHECK_INTERVAL_NS / 1e9
MIN_LAG_NS = 20_000_000
"""Shorter lags are not recorded, because they are not noticed as a frozen server."""


class EntryPoint(Protocol):
    """The place where the requests of a loop arrive. `is_watched`: its loop has a timer."""

    is_watched: bool


class PythonTimerState:
    """The fields that compiled code reads and writes as well.

    `ring`: the compiled ring of this process; None where it is not built. `options`: of the loop's `call_later`.
    """

    ring: Any
    loop: asyncio.AbstractEventLoop
    options: dict[str, Any]
    due_at: int
    offered: int
    interval_ns: int
    max_late_ns: int
    word: int

    def __call__(self) -> None:
        self.check_lag()

    def check_lag(self) -> None:
        raise NotImplementedError


if TYPE_CHECKING or native is None:
    TimerState = PythonTimerState
else:
    TimerState = native.LagTimer


class _LagTimer(TimerState):
    """A repeating timer on one loop. It stops when no request of this process arrived, and none is in flight.

    Where it is compiled, only a check that records something or stops the timer calls `check_lag`.
    `entry_points`: where the requests of this loop arrive.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.entry_points: set[EntryPoint] = set()
        self.offered = recorder.requests.words[layout.W_OFFERED] if recorder.requests is not None else 0
        # An empty context, because the current one would keep the request alive.
        self.options = {"context": contextvars.Context()}
        self.interval_ns, self.max_late_ns = CHECK_INTERVAL_NS, MIN_LAG_NS
        self.word = _free_words.pop() if _free_words else 0
        self._schedule(_clock.now())

    def check_lag(self) -> None:
        """Records a pause if the loop was late, and continues or stops the timer."""
        now, requests = _clock.now(), recorder.requests
        if now - self.due_at > MIN_LAG_NS:
            recorder.record_pause(events.PAUSE_EVENT_LOOP, self.due_at, now)
        offered = requests.words[layout.W_OFFERED] if requests is not None else self.offered
        if offered == self.offered and (requests is None or not requests.in_flight):
            self._stop()
            return
        self.offered, self.ring = offered, getattr(requests, "compiled", None)
        self._schedule(now)

    def _schedule(self, now: int) -> None:
        self.due_at = now + CHECK_INTERVAL_NS
        if self.word and recorder.requests is not None:
            recorder.requests.words[self.word + 1] = threading.get_native_id()
            recorder.requests.words[self.word] = self.due_at
        self.loop.call_later(CHECK_INTERVAL_S, self, **self.options)

    def release_word(self) -> None:
        """Ends that the sidecar watches this loop."""
        if self.word:
            if recorder.requests is not None:
                recorder.requests.words[self.word] = 0
            _free_words.append(self.word)
            self.word = 0

    def _stop(self) -> None:
        _thread_timer.timer = None
        self.release_word()
        for entry_point in self.entry_points:
            entry_point.is_watched = False


_free_words = [layout.W_LOOPS + 2 * loop for loop in range(layout.WATCHED_LOOPS)]
"""Words of the header that no loop uses. A loop that finds none is not watched by the sidecar."""


class _ThreadTimer(threading.local):
    """The timer of the loop that runs in this thread; None if there is none."""

    timer: _LagTimer | None = None


_thread_timer = _ThreadTimer()


def watch_event_loop(entry_point: EntryPoint | None = None) -> None:
    """Starts the lag timer of the running loop, if none is active. `entry_point`: where the request arrived."""
    loop = asyncio._get_running_loop()  # None if the loop is not asyncio's
    timer = _thread_timer.timer
    if loop is not None and (timer is None or timer.loop is not loop):
        if timer is not None:  # its loop was closed with requests in flight
            timer.release_word()
        timer = _thread_timer.timer = _LagTimer(loop)
    if timer is not None and entry_point is not None:
        timer.entry_points.add(entry_point)
        entry_point.is_watched = True


def record_blocked_loop(began_at: int) -> None:
    """Records that a call on the loop of this thread has blocked it since `began_at` (monotonic ns), until now.

    The timer would record only what is left after it was due.
    """
    timer, now = _thread_timer.timer, _clock.now()
    if timer is not None and now - began_at > MIN_LAG_NS and asyncio._get_running_loop() is timer.loop:
        recorder.record_pause(events.PAUSE_EVENT_LOOP, min(began_at, timer.due_at), now)
        timer.due_at = now
