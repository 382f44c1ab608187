"""Device time for whoever launches: `begin`, launch, `end`.

    first begin of a thread ─▶ the tender, a thread of ours, makes events and an anchor ─▶ from then on, spans of the device

The tender is awake five times a second, or ten times while spans wait that no engine harvests, for some µs: what a device says is
known before the request that it is about is concluded. It anchors the clocks every 4 s. Without a device, before the first anchor, during a capture and where events run out, the host's clock is used, and
said to be.
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
from otel_infer.gpu.timeline import DeviceInterval, DeviceSpan, Timeline

log = logging.getLogger(__name__)

IDLE_INTERVAL_S, BUSY_INTERVAL_S = 0.2, 0.1
"""How long the tender sleeps; and while spans wait."""
UNTIMED = 0
DEVICE_CHECK_NS = 1_000_000_000
"""How often a thread looks whether the application uses a device by now."""


class TimedWork(Protocol):
    """What is timed, and who is told."""

    def on_device(self, timed: DeviceInterval) -> None:
        """It ran on a device, from mark to mark."""

    def on_host(self, begun_at: int, launched_at: int) -> None:
        """Nobody knows but the host: when it began to launch it, and when that was over."""


class _ThreadSlot:
    """A thread's place for its timeline on this device, which the tender fills."""

    __slots__ = ("__weakref__", "device", "timeline")

    def __init__(self, device: Device) -> None:
        self.device = device
        self.timeline: Timeline | None = None

    def matches_device(self, on: Any) -> bool:
        """Whether this is its device, as torch has it."""
        return on.type == self.device.kind and on.index in (None, self.device.index)


class _ThreadState(threading.local):
    """`looked_at`: when it last looked for a device."""

    slot: _ThreadSlot | None = None
    checked_at = 0


class DeviceTiming:
    """Of one process. `find`: the device of the calling thread, if any by now."""

    def __init__(self, find: Callable[[], Device | None] = current_device) -> None:
        self.is_on = True
        self.on_first_use: Callable[[Device], Callable[[], None]] | None = None
        """Told of each device that is used first; what it returns is called once a second, by the tender."""
        self._find_device = find
        self._lock, self._thread = threading.Lock(), _ThreadState()
        self._worker: _TimingThread | None = None
        os.register_at_fork(after_in_child=self._reset_after_fork)

    @property
    def is_device_timed(self) -> bool:
        """Whether what the calling thread launches is timed by a device, if it is on that one."""
        slot = self._thread.slot
        return slot is not None and slot.timeline is not None

    def begin(
        self, stream: object = None, always: bool = False, is_step: bool = True, on: Any = None
    ) -> DeviceSpan | int:
        """The calling thread is about to launch, on this stream (None: its current one) of this device (a `torch.device`; None:
        its current one). Of another than the one it uses first, the host's time alone is known.

        An instant if the host times it; `UNTIMED` if nobody does, since it would cost too much (not with `always`). What is no
        step, but a part of one on another stream, is timed always, and nothing follows from it for the pace of the steps.
        """
        slot = self._thread.slot
        if slot is not None and slot.timeline is not None:
            if on is not None and not slot.matches_device(on):
                return _clock.now()
            if is_step and not slot.timeline.sampler.should_sample() and not always:
                return UNTIMED
            span = slot.timeline.begin_span(stream, is_step)
            if span is not None:
                return span
        elif slot is None and self.is_on:
            self._register_thread()
        return _clock.now()

    def end(self, begun: DeviceSpan | int, work: TimedWork, has_waited: bool = False) -> None:
        """It has launched what it began with. `has_waited`: and waited for the device since, so that nobody knows how long it took
        to launch."""
        if isinstance(begun, int):
            if begun != UNTIMED:
                work.on_host(begun, _clock.now())
            return
        if not self.is_on or not begun.timeline.end_span(begun, work.on_device, work.on_host, has_waited):
            work.on_host(begun.begun_at, _clock.now())

    def cancel(self, begun: DeviceSpan | int) -> None:
        """It did not come to launching."""
        if isinstance(begun, DeviceSpan):
            begun.timeline.cancel_span(begun)

    def collect_spans(self) -> None:
        """Tells of what is done by now, of all threads."""
        if self._worker is not None:
            self._worker.collect_spans()

    def stop(self) -> None:
        """From here on by the host's clock; events stay where they are, since to free one may wait for the device."""
        self.is_on = False
        tender, self._worker = self._worker, None
        if tender is not None:
            tender.stop()
            _never_freed.extend((tender, self._thread))
        self._thread = _ThreadState()

    def _register_thread(self) -> None:
        now = _clock.now()
        if now - self._thread.checked_at < DEVICE_CHECK_NS:
            return
        self._thread.checked_at = now
        device = self._find_device()
        if device is not None:
            slot = self._thread.slot = _ThreadSlot(device)
            with self._lock:
                tender = self._worker
                if tender is None:
                    tender = self._worker = _TimingThread(self.on_first_use)
                    tender.start()
            tender.add_slot(device, slot)

    def _reset_after_fork(self) -> None:
        """In a forked child, where CUDA cannot be used any more, not even to free an event."""
        _never_freed.extend((self._worker, self._thread.slot))
        self._lock, self._thread, self._worker = threading.Lock(), _ThreadState(), None


_never_freed: list[object] = []
"""Never freed."""


class _TimingThread(threading.Thread):
    """Makes events and anchors, and harvests what nobody else does."""

    def __init__(self, on_device: Callable[[Device], Callable[[], None]] | None) -> None:
        super().__init__(name="otel_infer device", daemon=True)
        self._on_first_use = on_device
        self._periodic_calls: list[Callable[[], None]] = []
        self._pending_slots: list[tuple[Device, weakref.ref[_ThreadSlot]]] = []
        self._clocks: dict[int, ClockMap] = {}
        self._active_timelines: list[tuple[Device, Timeline, weakref.ref[_ThreadSlot]]] = []
        self._free_timelines: list[tuple[Device, Timeline]] = []
        self._wake_event = threading.Event()
        self._is_stopping = False
        atexit.register(self.stop)

    def add_slot(self, device: Device, slot: _ThreadSlot) -> None:
        """This slot is to have a timeline."""
        self._pending_slots.append((device, weakref.ref(slot)))
        self._wake_event.set()

    def stop(self) -> None:
        """Ends the thread, soon."""
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
                waits = graph_capture.open_captures or any(
                    timeline.pending for _, timeline, _ in self._active_timelines
                )
                is_young = any(clocks.is_warming_up for clocks in self._clocks.values())
                self._wake_event.wait(BUSY_INTERVAL_S if waits or is_young else IDLE_INTERVAL_S)
                self._wake_event.clear()
        except Exception as broken:
            log.warning("device time is not measured any more: %s: %s", type(broken).__name__, broken)
            for _, timeline, slot in self._active_timelines:
                _clear_timeline(slot)
                timeline.abandon_pending()

    def _run_cycle(self) -> None:
        for _ in range(len(self._pending_slots)):
            self._assign_timeline(*self._pending_slots.pop(0))
        for look in list(self._periodic_calls):
            try:
                look()
            except Exception as broken:
                self._periodic_calls.remove(look)
                log.warning("device memory is not looked at any more: %s", type(broken).__name__)
        now = _clock.now()
        for device, timeline, slot in list(self._active_timelines):
            timeline.collect_spans()
            if slot() is None or timeline.is_broken:
                self._active_timelines.remove((device, timeline, slot))
                if timeline.is_broken:
                    _clear_timeline(slot)
                    timeline.abandon_pending()
                    log.warning("a device is not timed any more: it failed %d times", timeline.errors)
                else:
                    self._free_timelines.append((device, timeline))
            elif self._clocks[device.index].is_due(now, timeline.has_new_spans):
                self._clocks[device.index].add_anchor()

    def _assign_timeline(self, device: Device, slot: weakref.ref[_ThreadSlot]) -> None:
        asked = slot()
        if asked is None:
            return
        device.prepare_thread()
        clocks = self._clocks.get(device.index)
        if clocks is None:
            clocks = self._clocks[device.index] = ClockMap(device)
            if self._on_first_use is not None:
                self._periodic_calls.append(self._on_first_use(device))
        if clocks.anchor is None and not (clocks.is_due(_clock.now(), True) and clocks.add_anchor()):
            self._pending_slots.append((device, slot))  # without an anchor nobody knows when anything was
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
        asked.timeline = timeline


def _clear_timeline(slot: weakref.ref[_ThreadSlot]) -> None:
    of_thread = slot()
    if of_thread is not None:
        of_thread.timeline = None


timing = DeviceTiming()
"""The one of this process."""
