"""What one thread launches on a device, from mark to mark: two events each, of a fixed pool, read when the device is done.

    begin ─ the engine launches ─ end          harvest: in the order of launching, never waiting

Between the marks is everything that ran on that stream, and the time in which nothing did, since the host had not launched it
yet: a span of the device, not its load. Driver calls per span: 1 question whether it is captured, 2 records, 2 elapsed times,
and at most 2 queries, of which one may say "not yet". Nothing is made or freed on the way.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from otel_infer import clock
from otel_infer.gpu import captures
from otel_infer.gpu.clockmap import Anchor, ClockMap
from otel_infer.gpu.device import Device

CAPACITY = 64
"""Spans in flight at most: what is launched further ahead is timed by the host."""
MOST_ERRORS = 3
"""A device that fails so often is not asked again: after an error of CUDA's, every call fails."""


class Timed(NamedTuple):
    """A span of the device on the host's clock, ns. `bound_ns`: how far off the instants may be.

    `launched_ns`: what the host took to launch it. `queued_ns`: from being launched to being reached. `gap_ns`: since the end
    of the span before on this stream; -1 = not known.
    """

    started_at: int
    ended_at: int
    launched_ns: int
    queued_ns: int
    gap_ns: int
    bound_ns: int


Say = Callable[[Timed], None]


class Span:
    """Two events and what is known on the host; used again and again."""

    __slots__ = ("begun_at", "captures", "end", "launched_at", "say", "start", "stream")

    def __init__(self, start: Any, end: Any) -> None:
        self.start, self.end = start, end
        self.stream: Any = None
        self.say: Say | None = None
        self.begun_at = self.launched_at = self.captures = 0


class _Before(NamedTuple):
    """The end of the span before."""

    stream: Any
    anchor: Anchor
    ended_at: int


class Timeline:
    """The spans of one thread on one device. `dropped`: not timed for want of events; `violations`: put right, since the
    device cannot have begun before it was asked, nor ended after it was seen done."""

    def __init__(
        self,
        device: Device,
        clocks: ClockMap,
        capacity: int = CAPACITY,
        now: Callable[[], int] = clock.now,
    ) -> None:
        self._clocks, self._now = clocks, now
        self._capturing, self._stream = device.capturing, device.stream
        self._pool = deque(Span(device.event(), device.event()) for _ in range(capacity))
        self._pending: deque[Span] = deque()
        self._harvesting = threading.Lock()
        self._before: _Before | None = None
        self._seen = 0
        self.begun = self.dropped = self.captured = self.violations = self.errors = 0

    @property
    def pending(self) -> int:
        """Spans whose end has not been seen."""
        return len(self._pending)

    @property
    def has_news(self) -> bool:
        """Whether anything began since this was asked the last time."""
        seen, self._seen = self._seen, self.begun
        return self.begun != seen

    @property
    def is_broken(self) -> bool:
        """Whether the device has failed too often."""
        return self.errors >= MOST_ERRORS

    def warm_up(self, stream: Any) -> None:
        """Has the driver make all events, which costs ms: for another thread than the engine's."""
        for span in self._pool:
            span.start.record(stream)
            span.end.record(stream)

    def begin(self, stream: Any = None) -> Span | None:
        """Marks the stream (None: the thread's current one); None where that cannot be: time it on the host."""
        if captures.open_now or self._capturing():
            self.captured += 1
            return None
        if not self._pool or self.errors >= MOST_ERRORS:
            self.dropped += 1
            return None
        span = self._pool.popleft()
        span.stream = stream = self._stream() if stream is None else stream
        span.captures = captures.begun
        self.begun += 1
        span.begun_at = self._now()
        try:
            span.start.record(stream)
        except Exception:
            self._fail(span)
            return None
        return span

    def end(self, span: Span, say: Say) -> bool:
        """Marks the stream again; `say` will be told. False where that cannot be, and nobody is told."""
        span.launched_at, span.say = self._now(), say
        if span.captures != captures.begun and (captures.open_now or self._capturing()):
            self._pool.append(span)
            self.captured += 1
            return False
        try:
            span.end.record(span.stream)
        except Exception:
            self._fail(span)
            return False
        self._pending.append(span)
        return True

    def harvest(self) -> int:
        """Tells of the spans that are done, in order; how many. For any thread, one at a time; never waits."""
        if not self._pending or captures.open_now or not self._harvesting.acquire(blocking=False):
            return 0
        told = 0
        try:
            while self._pending and self._pending[0].end.query():
                span = self._pending.popleft()
                self._tell(span)
                self._pool.append(span)
                told += 1
        except Exception:
            self._fail(self._pending.popleft() if self._pending else None)
        finally:
            self._harvesting.release()
        return told

    def _tell(self, span: Span) -> None:
        anchor, say = self._clocks.anchor, span.say
        if anchor is None or say is None:
            return
        length = max(round(span.start.elapsed_time(span.end) * 1e6 * anchor.rate), 0)
        started_at, bound = self._clocks.host_at(anchor, anchor.event.elapsed_time(span.start))
        started_at = self._possible(started_at, length, bound, span.begun_at)
        before, gap = self._before, -1
        if before is not None and before.stream is span.stream and before.anchor is anchor:
            gap = max(started_at - before.ended_at, 0)
        ended_at = started_at + length
        self._before = _Before(span.stream, anchor, ended_at)
        launched, queued = span.launched_at - span.begun_at, started_at - span.begun_at
        say(Timed(started_at, ended_at, launched, max(queued, 0), gap, bound + round(length * anchor.drift)))

    def _possible(self, started_at: int, length: int, bound: int, begun_at: int) -> int:
        """Moved by no more than must be; a move beyond the bound is a violation."""
        possible = max(min(started_at, self._now() - length), begun_at)
        if abs(possible - started_at) > bound:
            self.violations += 1
        return possible

    def _fail(self, span: Span | None) -> None:
        self.errors += 1
        if span is not None:
            self._pool.append(span)
