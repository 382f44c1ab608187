"""Times the launches of one thread on a device with two events per span, from a fixed pool.

    begin_span ─ the engine launches ─ end_span      collect_spans: in launch order, in batches, never waits

A span covers everything that ran on its stream between the two marks. It also covers time in which nothing
ran, because the host had not launched it yet: it is a span of the device, not its load. Driver calls per
span: 1 check for a capture, 2 records, 2 elapsed times, and at most 2 queries, one of which may find it
unfinished. Nothing is allocated or freed per span. `sample_rate` selects the steps to mark.
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
"""Most spans in flight; launches beyond them are timed by the host."""
WARM_UP_NS = 5_000_000
COLLECT_BATCH = 8
"""Pending spans at which the engine's thread collects them itself.

Spans are read together, because caches are cold only for the first. The timing thread may do so earlier.
"""
MAX_ERRORS = 3
"""Errors after which a device is no longer used: after one CUDA error, every call fails."""


class DeviceInterval(NamedTuple):
    """A span of the device on the host's clock, ns. `bound_ns`: error bound of the instants.

    `launched_ns`: how long the host took to launch it; -1 = unknown, because the host also waited for the
    device. `queued_ns`: from the begin of launching until the device started. `gap_ns`: since the end of the
    previous step on this stream; -1 = unknown.
    """

    started_at: int
    ended_at: int
    launched_ns: int
    queued_ns: int
    gap_ns: int
    bound_ns: int


DeviceCallback = Callable[[DeviceInterval], None]
HostCallback = Callable[[int, int], None]
"""Called with the begin and the end of launching, ns, where the device's time is not available."""


class DeviceSpan:
    """Two events of a timeline, and the host's figures for the current span; reused for later spans."""

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

    def __init__(self, timeline: Timeline, start: Any, end: Any) -> None:
        self.timeline, self.start, self.end = timeline, start, end
        self.stream: Any = None
        self.on_device: DeviceCallback | None = None
        self.on_host: HostCallback | None = None
        self.is_step, self.has_waited = True, False
        self.begun_at = self.launched_at = self.capture_count = self.step_number = 0


class _PreviousEnd(NamedTuple):
    """The end of the previous marked step."""

    step_number: int
    stream: Any
    anchor: ClockAnchor
    ended_at: int


class Timeline:
    """The spans of one thread on one device.

    `dropped`: spans without a free event, or on a broken device. `captured`: spans inside a graph capture.
    `violations`: starts moved by more than their error bound, because the device cannot start before the
    launch begins or end after the span was found done. `mark_overhead_ms`: the device's time between two
    marks with nothing between.
    """

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
        """Returns the number of spans that have not been collected."""
        return len(self._pending)

    def take_new_span_flag(self) -> bool:
        """Returns whether any span began since the last call, and clears the flag."""
        before, self._begun_seen = self._begun_seen, self.begun
        return self.begun != before

    @property
    def is_broken(self) -> bool:
        """Returns whether the device has failed too often."""
        return self.errors >= MAX_ERRORS

    def warm_up(self, stream: Any) -> None:
        """Lets the driver create all events, and measures `mark_overhead_ms`, on an idle stream.

        It takes ms, so it must not run on the engine's thread. The marks are queued behind other work: two
        marks with nothing between them are then apart by their own time.
        """
        is_queued = self._device.occupy_stream(stream)
        for span in self._pool:
            before = self._now()
            span.start.record(stream)
            span.end.record(stream)
            self.sampler.add_lowest_cost(self._now() - before)
        until = self._now() + WARM_UP_NS
        while is_queued and self._now() < until:
            if self._pool[-1].end.query():
                self.mark_overhead_ms = min(span.start.elapsed_time(span.end) for span in self._pool)
                break

    def begin_span(self, stream: Any = None, is_step: bool = True) -> DeviceSpan | None:
        """Marks the stream (None: the thread's current one) and returns the span.

        None where the device cannot time it, so the host must. Spans other than steps do not count for the
        sample rate or the gaps between steps.
        """
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
        on_device: DeviceCallback,
        on_host: HostCallback | None = None,
        has_waited: bool = False,
    ) -> bool:
        """Marks the stream again; later one of the two callbacks is called.

        Returns False if it cannot be marked; then neither is called. `has_waited`: the host waited for the
        device after the last launch of the span.
        """
        span.launched_at, span.on_device, span.on_host, span.has_waited = (
            self._now(),
            on_device,
            on_host,
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
        marked_at = self._now()
        if len(self._pending) >= COLLECT_BATCH:
            self.collect_spans()
        self._pending.append(span)
        if span.is_step:
            cost = self._begin_cost_ns + marked_at - span.launched_at
            self.sampler.add_sample(cost, self._now() - marked_at)
        return True

    def cancel_span(self, span: DeviceSpan) -> None:
        """Discards the span without a callback."""
        self._pool.append(span)

    def collect_spans(self) -> int:
        """Reports the spans that are done, in launch order; returns how many.

        Any thread may call it. It never waits: if another thread is collecting, it returns 0.
        """
        if not self._pending or not self._collect_lock.acquire(blocking=False):
            return 0
        reported = 0
        try:
            if graph_capture.try_begin_query():
                try:
                    while (
                        self._pending
                        and not graph_capture.open_captures
                        and self._collect_oldest(self._pending[0])
                    ):
                        reported += 1
                finally:
                    graph_capture.end_query()
        finally:
            self._collect_lock.release()
        return reported

    def abandon_pending(self) -> None:
        """Reports the host's times of all pending spans, because the device failed."""
        while self._pending:
            self._report_host_time(self._pending.popleft())

    def _collect_oldest(self, span: DeviceSpan) -> bool:
        """Reports the oldest pending span; returns False if it is not done or failed."""
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
        anchor, on_device = self._clocks.anchor, span.on_device
        if on_device is None:
            return
        if anchor is None:
            raise LookupError("no clock anchor")
        overhead = self.mark_overhead_ms
        length = max(round((span.start.elapsed_time(span.end) - overhead) * 1e6 * anchor.rate), 0)
        started_at, bound = self._clocks.to_host_time(
            anchor, anchor.event.elapsed_time(span.start) + overhead
        )
        started_at = self._clamp_start(started_at, length, bound, span.begun_at)
        before, gap = self._previous_end, -1
        ended_at = started_at + length
        if span.is_step:
            if before is not None and before[:3] == (span.step_number - 1, span.stream, anchor):
                gap = max(started_at - before.ended_at, 0)
            self._previous_end = _PreviousEnd(span.step_number, span.stream, anchor, ended_at)
        elif before is not None and before.stream == span.stream:
            self._previous_end = None  # the stream was not idle between this step and the next
        launched, queued = (
            -1 if span.has_waited else span.launched_at - span.begun_at,
            started_at - span.begun_at,
        )
        on_device(
            DeviceInterval(
                started_at, ended_at, launched, max(queued, 0), gap, bound + round(length * anchor.drift)
            )
        )

    def _clamp_start(self, started_at: int, length: int, bound: int, begun_at: int) -> int:
        """Returns the nearest possible start; counts a violation if it is moved beyond its error bound."""
        possible = max(min(started_at, self._now() - length), begun_at)
        if abs(possible - started_at) > bound:
            self.violations += 1
        return possible

    def _record_error(self, span: DeviceSpan) -> None:
        self.errors += 1
        self._pool.append(span)
