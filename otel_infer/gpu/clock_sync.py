"""From the device's clock to the host's: each mapped time has a bound on its error.

An anchor is an event on an otherwise idle stream, recorded and seen done on the host as fast as can be: the device reached it
somewhere in between (Cristian, 1989). Of several tries the narrowest is kept; the rate between the clocks follows from
neighbouring anchors. torch's events tell float32 milliseconds, so that an anchor must not be old: ±0.25 µs after 4 s, ±4 µs
after a minute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from otel_infer import _clock
from otel_infer.gpu.device import Device

ANCHOR_ATTEMPTS = 12
ANCHOR_PERIODS_NS = (250_000_000, 1_000_000_000, 4_000_000_000)
"""From one anchor to the next: the rate is known to some 20 ppm after the first, to 1 ppm after the third."""
IDLE_PERIOD_NS = 30_000_000_000
"""While nothing is timed: an old anchor would place the next spans badly."""
RETRY_NS, MAX_RETRY_FACTOR = 1_000_000_000, 60
"""Where no anchor could be made yet: so long for each that failed, and at most so many times."""
UNMEASURED_DRIFT = 100e-6
"""How far crystals differ at most, before a rate was measured."""
MIN_DRIFT = 0.5e-6
"""How far a measured rate may have changed since."""
_EVENT_COUNT = 6
"""Events that take turns: an anchor that somebody still reads is not recorded anew before several others."""
_ULP = 2.0**-24


class ClockAnchor(NamedTuple):
    """`host_at` ± `half_ns`: when the device reached `event`, host ns. `rate`: host ns per device ns, ± `drift`."""

    event: Any
    host_at: int
    bound_ns: int
    rate: float = 1.0
    drift: float = UNMEASURED_DRIFT


class ClockMap:
    """The anchors of one device. Anchored by one thread, read by any."""

    def __init__(self, device: Device, now: Callable[[], int] = _clock.now) -> None:
        self._device, self._stream, self._now = device, device.create_idle_stream(), now
        self._events = deque(device.create_event() for _ in range(_EVENT_COUNT))
        for event in self._events:  # the driver makes an event when it is recorded for the first time
            event.record(self._stream)
        self._anchor_count = 0
        self._anchored_at = 0
        self.failed = 0
        self.anchor: ClockAnchor | None = None
        """The newest."""

    @property
    def is_warming_up(self) -> bool:
        """Whether anchors are made more often still."""
        return 0 < self._anchor_count < len(ANCHOR_PERIODS_NS)

    def is_due(self, now: int, in_use: bool) -> bool:
        """Whether it is time for the next anchor."""
        if not self._anchor_count:
            return now - self._anchored_at >= RETRY_NS * min(self.failed, MAX_RETRY_FACTOR)
        period = (
            ANCHOR_PERIODS_NS[min(self._anchor_count, len(ANCHOR_PERIODS_NS)) - 1]
            if in_use
            else IDLE_PERIOD_NS
        )
        return now - self._anchored_at >= period

    def add_anchor(self) -> bool:
        """Makes an anchor; False if the device did not answer soon enough. Not while anybody captures."""
        best: tuple[int, int] | None = None
        spare, kept = self._events.popleft(), self._events.popleft()
        for _ in range(ANCHOR_ATTEMPTS):
            stamp = self._device.record_and_poll(spare, self._stream)
            if stamp is not None and (best is None or stamp[1] - stamp[0] < best[1] - best[0]):
                best = stamp
                spare, kept = kept, spare
        self._events.appendleft(spare)
        self._events.append(kept)
        self._anchored_at = self._now()
        if best is None:
            self.failed += 1
            return False
        low, high = best
        self.anchor = self._add_rate(ClockAnchor(kept, (low + high) // 2, (high - low + 1) // 2))
        self._anchor_count += 1
        return True

    def _add_rate(self, new: ClockAnchor) -> ClockAnchor:
        """With the rate since the anchor before; if a clock jumped meanwhile (suspended, migrated), without one."""
        before = self.anchor
        if before is None:
            return new
        device_ns = before.event.elapsed_time(new.event) * 1e6
        if device_ns <= 0:
            return new
        rate = (new.host_at - before.host_at) / device_ns
        if abs(rate - 1) > 10 * UNMEASURED_DRIFT:
            return new
        return new._replace(rate=rate, drift=max((before.bound_ns + new.bound_ns) / device_ns, MIN_DRIFT))

    def to_host_time(self, anchor: ClockAnchor, offset_ms: float) -> tuple[int, int]:
        """Host time of what the device reached so long after the anchor, and how far it may be off, both ns."""
        offset = offset_ms * 1e6
        away = abs(offset)
        bound = anchor.bound_ns + away * (anchor.drift + _ULP) + self._device.tick_ns
        return anchor.host_at + round(offset * anchor.rate), round(bound)
