"""Maps the device's clock to the host's, with an error bound on each mapped time.

An anchor is an event that is recorded on an otherwise idle stream and polled until done, as fast as possible.
The device reached it between the two host times (Cristian, 1989). Of several attempts the narrowest is used.
The rate between the clocks follows from consecutive anchors. torch's events return float32 milliseconds, so
an anchor must be recent: the error is ±0.25 µs after 4 s and ±4 µs after a minute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from otel_infer import _clock
from otel_infer.gpu.device import Device

ANCHOR_ATTEMPTS = 12
ANCHOR_PERIODS_NS = (250_000_000, 1_000_000_000, 4_000_000_000)
"""Time between anchors: the rate is known to about 20 ppm after the first period, to 1 ppm after the third.
"""
IDLE_PERIOD_NS = 30_000_000_000
"""Time between anchors while nothing is timed: with an old anchor, the next spans would be inaccurate."""
RETRY_NS, MAX_RETRY_FACTOR = 1_000_000_000, 60
"""Delay before another attempt at the first anchor: this long per failed attempt, up to this many times."""
UNMEASURED_DRIFT = 100e-6
"""Largest assumed difference of the clock rates before it is measured."""
MIN_DRIFT = 0.5e-6
"""Smallest assumed error of a measured rate, because rates change with time."""
_EVENT_COUNT = 6
"""Events used in rotation: an anchor that is still in use is recorded again only after several others."""
_ULP = 2.0**-24


class ClockAnchor(NamedTuple):
    """When the device reached `event`: `host_at` ± `bound_ns`. `rate`: host ns per device ns, ± `drift`."""

    event: Any
    host_at: int
    bound_ns: int
    rate: float = 1.0
    drift: float = UNMEASURED_DRIFT


class ClockMap:
    """The anchors of one device. One thread adds anchors; any thread reads them."""

    def __init__(self, device: Device, now: Callable[[], int] = _clock.now) -> None:
        self._device, self._stream, self._now = device, device.create_idle_stream(), now
        self._events = deque(device.create_event() for _ in range(_EVENT_COUNT))
        for event in self._events:  # the driver creates an event when it is first recorded
            event.record(self._stream)
        self._anchor_count = 0
        self._anchored_at = 0
        self.failed = 0
        self.anchor: ClockAnchor | None = None
        """The latest anchor; None before the first."""

    @property
    def is_warming_up(self) -> bool:
        """Returns whether anchors still follow at the shorter, initial periods."""
        return 0 < self._anchor_count < len(ANCHOR_PERIODS_NS)

    def is_due(self, now: int, in_use: bool) -> bool:
        """Returns whether the next anchor is due."""
        if not self._anchor_count:
            return now - self._anchored_at >= RETRY_NS * min(self.failed, MAX_RETRY_FACTOR)
        period = (
            ANCHOR_PERIODS_NS[min(self._anchor_count, len(ANCHOR_PERIODS_NS)) - 1]
            if in_use
            else IDLE_PERIOD_NS
        )
        return now - self._anchored_at >= period

    def add_anchor(self) -> bool:
        """Adds an anchor; returns False if the device did not answer soon enough.

        It must not be called during a graph capture.
        """
        best: tuple[int, int] | None = None
        spare, narrowest = self._events.popleft(), self._events.popleft()
        for _ in range(ANCHOR_ATTEMPTS):
            stamp = self._device.record_and_poll(spare, self._stream)
            if stamp is not None and (best is None or stamp[1] - stamp[0] < best[1] - best[0]):
                best = stamp
                spare, narrowest = narrowest, spare
        self._events.appendleft(spare)
        self._events.append(narrowest)
        self._anchored_at = self._now()
        if best is None:
            self.failed += 1
            return False
        low, high = best
        self.anchor = self._add_rate(ClockAnchor(narrowest, (low + high) // 2, (high - low + 1) // 2))
        self._anchor_count += 1
        return True

    def _add_rate(self, new: ClockAnchor) -> ClockAnchor:
        """Returns the anchor with the rate since the anchor before.

        The rate stays 1 for the first anchor and after a clock jumped (suspend, migration).
        """
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
        """Returns the host time `offset_ms` of device time after the anchor, and its error bound, ns."""
        offset = offset_ms * 1e6
        distance = abs(offset)
        bound = anchor.bound_ns + distance * (anchor.drift + _ULP) + self._device.tick_ns
        return anchor.host_at + round(offset * anchor.rate), round(bound)
