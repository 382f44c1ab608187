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
from otel_infer.gpu.device import Device, current
from otel_infer.gpu.timeline import Span, Timed, Timeline

log = logging.getLogger(__name__)

REST_S, BUSY_S = 0.2, 0.1
"""How long the tender sleeps; and while spans wait."""
UNTIMED = 0
LOOK_NS = 1_000_000_000
"""How often a thread looks whether the application uses a device by now."""


class Work(Protocol):
    """What is timed, and who is told."""

    def on_device(self, timed: Timed) -> None:
        """It ran on a device, from mark to mark."""

    def on_host(self, begun_at: int, launched_at: int) -> None:
        """Nobody knows but the host: when it began to launch it, and when that was over."""


class _Slot:
    """A thread's place for its timeline on this device, which the tender fills."""

    __slots__ = ("__weakref__", "device", "timeline")

    def __init__(self, device: Device) -> None:
        self.device = device
        self.timeline: Timeline | None = None

    def is_on(self, on: Any) -> bool:
        """Whether this is its device, as torch has it."""
        return on.type == self.device.kind and on.index in (None, self.device.index)


class _Thread(threading.local):
    """`looked_at`: when it last looked for a device."""

    slot: _Slot | None = None
    looked_at = 0


class Timing:
    """Of one process. `find`: the device of the calling thread, if any by now."""

    def __init__(self, find: Callable[[], Device | None] = current) -> None:
        self.is_on = True
        self.on_device: Callable[[Device], Callable[[], None]] | None = None
        """Told of each device that is used first; what it returns is called once a second, by the tender."""
        self._find = find
        self._lock, self._thread = threading.Lock(), _Thread()
        self._tender: _Tender | None = None
        os.register_at_fork(after_in_child=self._forget)

    @property
    def is_by_device(self) -> bool:
        """Whether what the calling thread launches is timed by a device, if it is on that one."""
        slot = self._thread.slot
        return slot is not None and slot.timeline is not None

    def begin(
        self, stream: object = None, always: bool = False, is_step: bool = True, on: Any = None
    ) -> Span | int:
        """The calling thread is about to launch, on this stream (None: its current one) of this device (a `torch.device`; None:
        its current one). Of another than the one it uses first, the host's time alone is known.

        An instant if the host times it; `UNTIMED` if nobody does, since it would cost too much (not with `always`). What is no
        step, but a part of one on another stream, is timed always, and nothing follows from it for the pace of the steps.
        """
        slot = self._thread.slot
        if slot is not None and slot.timeline is not None:
            if on is not None and not slot.is_on(on):
                return _clock.now()
            if is_step and not slot.timeline.pacing.is_next() and not always:
                return UNTIMED
            span = slot.timeline.begin(stream, is_step)
            if span is not None:
                return span
        elif slot is None and self.is_on:
            self._look()
        return _clock.now()

    def end(self, begun: Span | int, work: Work, has_waited: bool = False) -> None:
        """It has launched what it began with. `has_waited`: and waited for the device since, so that nobody knows how long it took
        to launch."""
        if isinstance(begun, int):
            if begun != UNTIMED:
                work.on_host(begun, _clock.now())
            return
        if not self.is_on or not begun.home.end(begun, work.on_device, work.on_host, has_waited):
            work.on_host(begun.begun_at, _clock.now())

    def drop(self, begun: Span | int) -> None:
        """It did not come to launching."""
        if isinstance(begun, Span):
            begun.home.drop(begun)

    def harvest(self) -> None:
        """Tells of what is done by now, of all threads."""
        if self._tender is not None:
            self._tender.harvest()

    def stop(self) -> None:
        """From here on by the host's clock; events stay where they are, since to free one may wait for the device."""
        self.is_on = False
        tender, self._tender = self._tender, None
        if tender is not None:
            tender.stop()
            _kept.extend((tender, self._thread))
        self._thread = _Thread()

    def _look(self) -> None:
        now = _clock.now()
        if now - self._thread.looked_at < LOOK_NS:
            return
        self._thread.looked_at = now
        device = self._find()
        if device is not None:
            slot = self._thread.slot = _Slot(device)
            with self._lock:
                tender = self._tender
                if tender is None:
                    tender = self._tender = _Tender(self.on_device)
                    tender.start()
            tender.serve(device, slot)

    def _forget(self) -> None:
        """In a forked child, where CUDA cannot be used any more, not even to free an event."""
        _kept.extend((self._tender, self._thread.slot))
        self._lock, self._thread, self._tender = threading.Lock(), _Thread(), None


_kept: list[object] = []
"""Never freed."""


class _Tender(threading.Thread):
    """Makes events and anchors, and harvests what nobody else does."""

    def __init__(self, on_device: Callable[[Device], Callable[[], None]] | None) -> None:
        super().__init__(name="otel_infer device", daemon=True)
        self._on_device = on_device
        self._looks: list[Callable[[], None]] = []
        self._asked: list[tuple[Device, weakref.ref[_Slot]]] = []
        self._clocks: dict[int, ClockMap] = {}
        self._used: list[tuple[Device, Timeline, weakref.ref[_Slot]]] = []
        self._free: list[tuple[Device, Timeline]] = []
        self._wake = threading.Event()
        self._over = False
        atexit.register(self.stop)

    def serve(self, device: Device, slot: _Slot) -> None:
        """This slot is to have a timeline."""
        self._asked.append((device, weakref.ref(slot)))
        self._wake.set()

    def stop(self) -> None:
        """Ends the thread, soon."""
        self._over = True
        self._wake.set()

    def harvest(self) -> None:
        for _, timeline, _ in list(self._used):
            timeline.harvest()

    def run(self) -> None:
        try:
            while not self._over:
                if not graph_capture.open_now:
                    self._turn()
                waits = graph_capture.open_now or any(timeline.pending for _, timeline, _ in self._used)
                is_young = any(clocks.is_young for clocks in self._clocks.values())
                self._wake.wait(BUSY_S if waits or is_young else REST_S)
                self._wake.clear()
        except Exception as broken:
            log.warning("device time is not measured any more: %s: %s", type(broken).__name__, broken)
            for _, timeline, slot in self._used:
                _clear(slot)
                timeline.give_up()

    def _turn(self) -> None:
        for _ in range(len(self._asked)):
            self._serve(*self._asked.pop(0))
        for look in list(self._looks):
            try:
                look()
            except Exception as broken:
                self._looks.remove(look)
                log.warning("device memory is not looked at any more: %s", type(broken).__name__)
        now = _clock.now()
        for device, timeline, slot in list(self._used):
            timeline.harvest()
            if slot() is None or timeline.is_broken:
                self._used.remove((device, timeline, slot))
                if timeline.is_broken:
                    _clear(slot)
                    timeline.give_up()
                    log.warning("a device is not timed any more: it failed %d times", timeline.errors)
                else:
                    self._free.append((device, timeline))
            elif self._clocks[device.index].is_due(now, timeline.has_news):
                self._clocks[device.index].renew()

    def _serve(self, device: Device, slot: weakref.ref[_Slot]) -> None:
        asked = slot()
        if asked is None:
            return
        device.adopt_thread()
        clocks = self._clocks.get(device.index)
        if clocks is None:
            clocks = self._clocks[device.index] = ClockMap(device)
            if self._on_device is not None:
                self._looks.append(self._on_device(device))
        if clocks.anchor is None and not (clocks.is_due(_clock.now(), True) and clocks.renew()):
            self._asked.append((device, slot))  # without an anchor nobody knows when anything was
            return
        for free in self._free:
            if free[0].index == device.index:
                self._free.remove(free)
                device, timeline = free
                break
        else:
            timeline = Timeline(device, clocks)
            timeline.warm_up(device.idle_stream())
        self._used.append((device, timeline, slot))
        asked.timeline = timeline


def _clear(slot: weakref.ref[_Slot]) -> None:
    of_thread = slot()
    if of_thread is not None:
        of_thread.timeline = None


timing = Timing()
"""The one of this process."""
