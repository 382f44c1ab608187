"""What one thread launches on a device, from mark to mark: two events each, of a fixed pool, read when the device is done.

    begin ─ the engine launches ─ end          harvest: in the order of launching, some together, never waiting

Between the marks is everything that ran on that stream, and the time in which nothing did, since the host had not launched it
yet: a span of the device, not its load. Driver calls per span: 1 question whether it is captured, 2 records, 2 elapsed times,
and at most 2 queries, of which one may say "not yet". Nothing is made or freed on the way. Which steps are marked: `pacing`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from otel_infer import _clock
from otel_infer.gpu import graph_capture
from otel_infer.gpu.clock_sync import ClockAnchor, ClockMap
from otel_infer.gpu.device import Device
from otel_infer.gpu.sample_rate import StepSampler

CAPACITY = 64
"""Spans in flight at most: what is launched further ahead is timed by the host."""
WARM_UP_NS = 5_000_000
COLLECT_BATCH = 8
"""Spans that are read in one go, unless the tender does it before: what is cold for the first is not for the others."""
MAX_ERRORS = 3
"""A device that fails so often is not asked again: after an error of CUDA's, every call fails."""


class DeviceInterval(NamedTuple):
    """A span of the device on the host's clock, ns. `bound_ns`: how far off the instants may be.

    `launched_ns`: what the host took to launch it; -1 = not known, since it had waited for the device by then. `queued_ns`: from
    being launched to being reached. `gap_ns`: since the end of the span before on this stream; -1 = not known.
    """

    started_at: int
    ended_at: int
    launched_ns: int
    queued_ns: int
    gap_ns: int
    bound_ns: int


DeviceCallback = Callable[[DeviceInterval], None]
HostCallback = Callable[[int, int], None]
"""Told when it began to be launched and when that was over, where the device does not say."""


class DeviceSpan:
    """Two events of a timeline, its `home`, and what is known on the host; used again and again."""

    __slots__ = (
        "begun_at",
        "capture_count",
        "end",
        "has_waited",
        "is_step",
        "launched_at",
        "on_device",
        "on_host",
        "start",
        "step_number",
        "stream",
        "timeline",
    )  # fmt: skip

    def __init__(self, home: Timeline, start: Any, end: Any) -> None:
        self.timeline, self.start, self.end = home, start, end
        self.stream: Any = None
        self.on_device: DeviceCallback | None = None
        self.on_host: HostCallback | None = None
        self.is_step, self.has_waited = True, False
        self.begun_at = self.launched_at = self.capture_count = self.step_number = 0


class _PreviousEnd(NamedTuple):
    """The end of a span that was marked."""

    step_number: int
    stream: Any
    anchor: ClockAnchor
    ended_at: int


class Timeline:
    """The spans of one thread on one device. `dropped`: not timed for want of events; `violations`: put right, since the
    device cannot have begun before it was asked, nor ended after it was seen done. `own_ms`: what marks take themselves."""

    def __init__(
        self,
        device: Device,
        clocks: ClockMap,
        capacity: int = CAPACITY,
        now: Callable[[], int] = _clock.now,
    ) -> None:
        self._device, self._clocks, self._now = device, clocks, now
        self._is_capturing, self._current_stream = device.is_capturing, device.current_stream
        self._pool = deque(
            DeviceSpan(self, device.create_event(), device.create_event()) for _ in range(capacity)
        )
        self._pending: deque[DeviceSpan] = deque()
        self._collect_lock = threading.Lock()
        self._previous_end: _PreviousEnd | None = None
        self._begin_cost_ns, self.mark_overhead_ms = 0, 0.0
        self.sampler = StepSampler()
        self._begun_seen = 0
        self.begun = self.dropped = self.captured = self.violations = self.errors = 0

    @property
    def pending(self) -> int:
        """Spans whose end has not been seen."""
        return len(self._pending)

    @property
    def has_new_spans(self) -> bool:
        """Whether anything began since this was asked the last time."""
        seen, self._begun_seen = self._begun_seen, self.begun
        return self.begun != seen

    @property
    def is_broken(self) -> bool:
        """Whether the device has failed too often."""
        return self.errors >= MAX_ERRORS

    def warm_up(self, stream: Any) -> None:
        """Has the driver make all events, which costs ms: for another thread than the engine's, and an idle stream.

        Queued behind something, two marks with nothing between them are as far apart as marks take themselves.
        """
        is_queued = self._device.occupy_stream(stream)
        for span in self._pool:
            span.start.record(stream)
            span.end.record(stream)
        until = self._now() + WARM_UP_NS
        while is_queued and self._now() < until:
            if self._pool[-1].end.query():
                self.mark_overhead_ms = min(span.start.elapsed_time(span.end) for span in self._pool)
                break

    def begin_span(self, stream: Any = None, is_step: bool = True) -> DeviceSpan | None:
        """Marks the stream (None: the thread's current one); None where that cannot be: time it on the host. What is no step is
        left out of the steps' pace and of the gaps between them."""
        at = self._now()
        if graph_capture.open_captures or self._is_capturing():
            self.captured += 1
            return None
        if not self._pool or self.errors >= MAX_ERRORS:
            self.dropped += 1
            return None
        span = self._pool.popleft()
        span.stream = stream = self._current_stream() if stream is None else stream
        span.capture_count, span.step_number, span.is_step = (
            graph_capture.capture_count,
            self.sampler.step_number,
            is_step,
        )
        self.begun += 1
        span.begun_at = at
        try:
            span.start.record(stream)
        except Exception:
            self._record_error(span)
            return None
        self._begin_cost_ns = self._now() - at
        return span

    def end_span(
        self,
        span: DeviceSpan,
        say: DeviceCallback,
        instead: HostCallback | None = None,
        has_waited: bool = False,
    ) -> bool:
        """Marks the stream again; `say` will be told, or `instead`. False where that cannot be, and nobody is told. `has_waited`:
        the host has waited for the device since it launched the last of it."""
        span.launched_at, span.on_device, span.on_host, span.has_waited = (
            self._now(),
            say,
            instead,
            has_waited,
        )
        if span.capture_count != graph_capture.capture_count and (
            graph_capture.open_captures or self._is_capturing()
        ):
            self._pool.append(span)
            self.captured += 1
            return False
        try:
            span.end.record(span.stream)
        except Exception:
            self._record_error(span)
            return False
        if len(self._pending) >= COLLECT_BATCH:
            self.collect_spans()
        self._pending.append(span)
        if span.is_step:
            self.sampler.add_sample(span.begun_at, self._begin_cost_ns + self._now() - span.launched_at)
        return True

    def cancel_span(self, span: DeviceSpan) -> None:
        """Nobody is told of it."""
        self._pool.append(span)

    def collect_spans(self) -> int:
        """Tells of the spans that are done, in order; how many. For any thread, one at a time; never waits."""
        if not self._pending or not self._collect_lock.acquire(blocking=False):
            return 0
        told = 0
        try:
            if graph_capture.try_begin_query():
                try:
                    while (
                        self._pending
                        and not graph_capture.open_captures
                        and self._collect_oldest(self._pending[0])
                    ):
                        told += 1
                finally:
                    graph_capture.end_query()
        finally:
            self._collect_lock.release()
        return told

    def abandon_pending(self) -> None:
        """Of what is pending the device will say nothing more."""
        while self._pending:
            self._report_host_time(self._pending.popleft())

    def _collect_oldest(self, span: DeviceSpan) -> bool:
        """Tells of this one, the oldest; whether it was done."""
        try:
            if not span.end.query():
                return False
            self._pending.popleft()
            self._report_device_time(span)
        except Exception:
            if self._pending and self._pending[0] is span:
                self._pending.popleft()
            self.errors += 1
            self._report_host_time(span)
            return False
        self._pool.append(span)
        return True

    def _report_host_time(self, span: DeviceSpan) -> None:
        self._pool.append(span)
        if span.on_host is not None:
            span.on_host(span.begun_at, span.launched_at)

    def _report_device_time(self, span: DeviceSpan) -> None:
        anchor, say = self._clocks.anchor, span.on_device
        if say is None:
            return
        if anchor is None:
            raise LookupError("no anchor")
        own = self.mark_overhead_ms
        length = max(round((span.start.elapsed_time(span.end) - own) * 1e6 * anchor.rate), 0)
        started_at, bound = self._clocks.to_host_time(anchor, anchor.event.elapsed_time(span.start) + own)
        started_at = self._clamp_start(started_at, length, bound, span.begun_at)
        before, gap = self._previous_end, -1
        ended_at = started_at + length
        if span.is_step:
            if before is not None and before[:3] == (span.step_number - 1, span.stream, anchor):
                gap = max(started_at - before.ended_at, 0)
            self._previous_end = _PreviousEnd(span.step_number, span.stream, anchor, ended_at)
        elif before is not None and before.stream == span.stream:
            self._previous_end = None  # between this step and the next the stream had something to do
        launched, queued = (
            -1 if span.has_waited else span.launched_at - span.begun_at,
            started_at - span.begun_at,
        )
        say(
            DeviceInterval(
                started_at, ended_at, launched, max(queued, 0), gap, bound + round(length * anchor.drift)
            )
        )

    def _clamp_start(self, started_at: int, length: int, bound: int, begun_at: int) -> int:
        """Moved by no more than must be; a move beyond the bound is a violation."""
        possible = max(min(started_at, self._now() - length), begun_at)
        if abs(possible - started_at) > bound:
            self.violations += 1
        return possible

    def _record_error(self, span: DeviceSpan) -> None:
        self.errors += 1
        self._pool.append(span)
