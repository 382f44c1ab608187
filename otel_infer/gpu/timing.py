"""Times work on the device: call `begin`, launch, call `end`.

    first begin of a thread ─▶ the timing thread makes events and an anchor ─▶ from then on, device spans

The timing thread wakes 5 times a second, or 10 times while spans are pending, each for a few µs. Device times
are thus known before their request is concluded. While launches are timed, it adds a clock anchor every 4 s.
The host's clock is used, and recorded as such, in four cases: without a device, before the first anchor,
during a capture, and when events run out.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from otel_infer import _clock
from otel_infer.gpu import graph_capture
from otel_infer.gpu.clock_sync import ClockMap
from otel_infer.gpu.device import Device, current_device
from otel_infer.gpu.sample_rate import share_cost
from otel_infer.gpu.timeline import DeviceInterval, DeviceSpan, Timeline

log = logging.getLogger(__name__)

IDLE_INTERVAL_S, BUSY_INTERVAL_S = 0.2, 0.1
"""Sleep of the timing thread, and its sleep while spans are pending."""
UNTIMED = 0
HOST_SAMPLE_NS, PENDING_SAMPLE_NS = 500_000_000, 100_000_000
"""Interval of the steps of one thread that the host's clock times: its figures are means, so a sample is enough. It is
shorter while a thread with a device waits for its timeline."""
DEVICE_CHECK_NS = 1_000_000_000
"""Time between two checks of a thread whether the application uses a device."""


class TimedWork(Protocol):
    """Work that is timed; one of its methods is called with the result."""

    def on_device(self, interval: DeviceInterval) -> None:
        """Records the device's time from mark to mark."""

    def on_host(self, begun_at: int, launched_at: int) -> None:
        """Records begin and end of launching, where the device's time is not available."""


class _ThreadSlot:
    """A thread's timeline on this device, which the timing thread sets; None until then."""

    __slots__ = ("__weakref__", "device", "timeline")

    def __init__(self, device: Device) -> None:
        self.device = device
        self.timeline: Timeline | None = None

    def matches_device(self, other: Any) -> bool:
        """Returns whether a `torch.device` is this slot's device."""
        return other.type == self.device.kind and other.index in (None, self.device.index)


class _ThreadState(threading.local):
    """The slot of a thread. `check_due_at`: when the thread checks for a device again; 0 if it has one.

    `host_due_at`: when the host's clock times the next step of the thread.
    """

    slot: _ThreadSlot | None = None
    check_due_at = host_due_at = 0


class DeviceTiming:
    """Device timing of one process. `find_device`: returns the calling thread's device, or None."""

    def __init__(self, find_device: Callable[[], Device | None] = current_device) -> None:
        self.is_on = True
        self.thread = _ThreadState()
        """The state of the calling thread. Before `check_due_at`, `begin` times nothing for a stage."""
        self.on_first_use: Callable[[Device], Callable[[], None]] | None = None
        """Called at the first use of a device; the timing thread calls the returned function in each cycle.
        """
        self._find_device = find_device
        self._lock = threading.Lock()
        self._worker: _TimingThread | None = None
        os.register_at_fork(after_in_child=self._reset_after_fork)

    @property
    def is_device_timed(self) -> bool:
        """Returns whether the calling thread has a timeline for launches on its device."""
        slot = self.thread.slot
        return slot is not None and slot.timeline is not None

    @property
    def host_interval_ns(self) -> int:
        """Returns how long after a step of the calling thread the host's clock times the next one."""
        return HOST_SAMPLE_NS if self.thread.slot is None else PENDING_SAMPLE_NS

    def begin(
        self, stream: object = None, always: bool = False, is_step: bool = True, on: Any = None
    ) -> DeviceSpan | int:
        """Begins to time the next launches of the calling thread, and returns what `end` or `cancel` needs.

        `stream`, `on` (a `torch.device`): where it launches; None = its current ones. Only the device that a
        thread uses first has device times. Returns an instant if the host times the launches. Returns
        `UNTIMED` if the step is not sampled, which on a device cannot be with `always`. `is_step` is False for
        parts of a step on another stream: they are always timed and do not affect the sample rate.
        """
        thread, now = self.thread, _clock.now()
        slot = thread.slot
        if slot is not None and slot.timeline is not None:
            if on is not None and not slot.matches_device(on):
                return now
            if is_step and not slot.timeline.sampler.should_sample(now) and not always:
                return UNTIMED
            span = slot.timeline.begin_span(stream, is_step)
            return now if span is None else span
        if slot is None and now >= thread.check_due_at:
            self._register_thread(now)
        if is_step and now < thread.host_due_at:
            return UNTIMED
        thread.host_due_at = now + self.host_interval_ns
        return now

    def end(self, begun: DeviceSpan | int, work: TimedWork, has_waited: bool = False) -> None:
        """Ends the launches that `begin` began.

        `has_waited`: the host also waited for the device, so the time of launching is unknown.
        """
        if isinstance(begun, int):
            if begun != UNTIMED:
                work.on_host(begun, _clock.now())
            return
        if not self.is_on or not begun.timeline.end_span(begun, work.on_device, work.on_host, has_waited):
            work.on_host(begun.begun_at, _clock.now())

    def cancel(self, begun: DeviceSpan | int) -> None:
        """Discards a begin whose launches did not happen."""
        if isinstance(begun, DeviceSpan):
            begun.timeline.cancel_span(begun)

    def collect_spans(self) -> None:
        """Reports the spans of all threads that are done."""
        if self._worker is not None:
            self._worker.collect_spans()

    def stop(self) -> None:
        """Stops device timing; the host's clock is used from now on.

        Events are not freed, because freeing one may wait for the device.
        """
        self.is_on = False
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop()
            _never_freed.extend((worker, self.thread))
        self.thread = _ThreadState()

    def _register_thread(self, now: int) -> None:
        self.thread.check_due_at = now + DEVICE_CHECK_NS
        device = self._find_device() if self.is_on else None
        if device is not None:
            self.thread.check_due_at = 0
            slot = self.thread.slot = _ThreadSlot(device)
            with self._lock:
                worker = self._worker
                if worker is None:
                    worker = self._worker = _TimingThread(self.on_first_use)
                    worker.start()
            worker.add_slot(device, slot)

    def _reset_after_fork(self) -> None:
        """Resets a forked child, where CUDA is unusable, even to free an event."""
        _never_freed.extend((self._worker, self.thread.slot))
        self._lock, self.thread, self._worker = threading.Lock(), _ThreadState(), None


_never_freed: list[object] = []
"""Objects that own events, kept alive because freeing an event is unsafe or may wait."""


class _TimingThread(threading.Thread):
    """Creates events and anchors, and collects spans that no engine thread collects."""

    def __init__(self, on_first_use: Callable[[Device], Callable[[], None]] | None) -> None:
        super().__init__(name="otel_infer device", daemon=True)
        self._on_first_use = on_first_use
        self._periodic_calls: list[Callable[[], None]] = []
        self._pending_slots: list[tuple[Device, weakref.ref[_ThreadSlot]]] = []
        self._clocks: dict[int, ClockMap] = {}
        self._active_timelines: list[tuple[Device, Timeline, weakref.ref[_ThreadSlot]]] = []
        self._free_timelines: list[tuple[Device, Timeline]] = []
        self._wake_event = threading.Event()
        self._is_stopping = False
        atexit.register(self.stop)

    def add_slot(self, device: Device, slot: _ThreadSlot) -> None:
        """Requests a timeline for this slot."""
        self._pending_slots.append((device, weakref.ref(slot)))
        self._wake_event.set()

    def stop(self) -> None:
        """Stops the thread after its current cycle."""
        self._is_stopping = True
        self._wake_event.set()

    def collect_spans(self) -> None:
        for _, timeline, _ in list(self._active_timelines):
            timeline.collect_spans()

    def run(self) -> None:
        try:
            while not self._is_stopping:
                if not graph_capture.open_captures:
                    self._run_cycle()
                is_busy = graph_capture.open_captures or any(
                    timeline.pending for _, timeline, _ in self._active_timelines
                )
                is_warming_up = any(clocks.is_warming_up for clocks in self._clocks.values())
                self._wake_event.wait(BUSY_INTERVAL_S if is_busy or is_warming_up else IDLE_INTERVAL_S)
                self._wake_event.clear()
        except Exception as error:
            log.warning(
                "device time is no longer measured, host time is used: %s: %s", type(error).__name__, error
            )
            for _, timeline, slot in self._active_timelines:
                _clear_timeline(slot)
                timeline.abandon_pending()

    def _run_cycle(self) -> None:
        for _ in range(len(self._pending_slots)):
            self._assign_timeline(*self._pending_slots.pop(0))
        for call in list(self._periodic_calls):
            try:
                call()
            except Exception as error:
                self._periodic_calls.remove(call)
                log.warning(
                    "a periodic measurement of a device failed and is no longer taken: %s",
                    type(error).__name__,
                )
        now = _clock.now()
        share_cost([timeline.sampler for _, timeline, _ in self._active_timelines], now)
        for device, timeline, slot in list(self._active_timelines):
            timeline.collect_spans()
            if slot() is None or timeline.is_broken:
                self._active_timelines.remove((device, timeline, slot))
                if timeline.is_broken:
                    _clear_timeline(slot)
                    timeline.abandon_pending()
                    log.warning(
                        "a device is no longer timed after %d errors, host time is used", timeline.errors
                    )
                else:
                    self._free_timelines.append((device, timeline))
            elif self._clocks[device.index].is_due(now, timeline.take_new_span_flag()):
                self._clocks[device.index].add_anchor()

    def _add_periodic_call(self, device: Device) -> None:
        """Starts what is measured besides the timing; a failure does not end the timing."""
        if self._on_first_use is None:
            return
        try:
            self._periodic_calls.append(self._on_first_use(device))
        except Exception as error:
            log.warning(
                "a periodic measurement of a device failed and is not taken: %s", type(error).__name__
            )

    def _assign_timeline(self, device: Device, slot: weakref.ref[_ThreadSlot]) -> None:
        requester = slot()
        if requester is None:
            return
        device.prepare_thread()
        clocks = self._clocks.get(device.index)
        if clocks is None:
            clocks = self._clocks[device.index] = ClockMap(device)
            self._add_periodic_call(device)
        if clocks.anchor is None and not (clocks.is_due(_clock.now(), True) and clocks.add_anchor()):
            self._pending_slots.append((device, slot))  # without an anchor no device time can be mapped
            return
        for free in self._free_timelines:
            if free[0].index == device.index:
                self._free_timelines.remove(free)
                device, timeline = free
                break
        else:
            timeline = Timeline(device, clocks)
            timeline.warm_up(device.create_idle_stream())
        self._active_timelines.append((device, timeline, slot))
        requester.timeline = timeline


def _clear_timeline(slot: weakref.ref[_ThreadSlot]) -> None:
    thread_slot = slot()
    if thread_slot is not None:
        thread_slot.timeline = None


timing = DeviceTiming()
"""The device timing of this process."""
