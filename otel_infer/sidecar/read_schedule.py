"""Determines when the sidecar wakes up and when it reads the rings.

Most of the cost of a read is loading its code into the processor's caches, so few large reads cost less than many
small ones. Rings are read every two seconds, and more often the faster they fill. A wake-up in between only compares
a few words. The last one before a read observes the rings, so a read returns what was recorded up to then.
"""

from __future__ import annotations

from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.sidecar.pipeline import CYCLE_NS

READ_INTERVAL_NS = 2_000_000_000
LIVE_READ_INTERVAL_NS = 500_000_000
"""Where a terminal shows each request."""
IDLE_AFTER_NS = 5_000_000_000
"""By then everything that was recorded has been read, concluded and batched."""
IDLE_READ_INTERVAL_NS = 5_000_000_000
"""A server whose rings have nothing new; the read releases what was held, and the first event ends the interval."""
USUAL_FILL, MAX_FILL = 1 / 8, 1 / 4
"""Share of a ring that may be written between two reads at the known rate; a ring with more than `MAX_FILL` is read
at the next wake-up.
"""
WAKE_INTERVAL_NS = 200_000_000
"""Interval of wake-ups where engines run steps; counters of their threads are read at each of them."""
REQUESTS_WAKE_INTERVAL_NS = 250_000_000
"""Interval of wake-ups of a server without engines."""
IDLE_WAKE_INTERVAL_NS = 600_000_000
_TOLERANCE_NS = CYCLE_NS // 2
"""A wake-up slightly before the due time reads too."""


class ReadSchedule:
    """Schedule of one sidecar. All instants are monotonic ns. `interval`: longest time between two reads, ns."""

    def __init__(self, rings: MergedReader, interval: int = READ_INTERVAL_NS) -> None:
        self._rings, self._interval = rings, interval
        self.busy_at = self._read_at = self._due_at = 0
        self._is_urgent = False

    def is_due(self, now: int, is_urgent: bool) -> bool:
        """Returns whether to read at this wake-up. `is_urgent`: read at each one, and wake up often."""
        self._is_urgent = is_urgent
        if is_urgent or now + _TOLERANCE_NS >= self._due_at or self._rings.has_dead_writers(now):
            return True
        is_idle = now - self.busy_at >= IDLE_AFTER_NS
        if self._rings.are_filled_above(0 if is_idle else MAX_FILL):
            return True
        if not is_idle and now + self.wake_interval(now) + _TOLERANCE_NS >= self._due_at:
            self._rings.observe(now)
        return False

    def record_read(self, now: int) -> None:
        """Schedules the next read, after a poll of the rings."""
        fill = self._rings.fill_ratio
        if fill or self._is_urgent:
            self.busy_at = now
        interval = IDLE_READ_INTERVAL_NS
        if not self.is_idle(now):
            interval = self._interval
            if fill:
                interval = min(interval, int(USUAL_FILL / fill * (now - self._read_at)))
            if interval < REQUESTS_WAKE_INTERVAL_NS or self._rings.has_small_rings():
                interval = 0
        self._read_at, self._due_at = now, now + interval

    def wake_interval(self, now: int) -> int:
        """Returns the time from this wake-up to the next, ns."""
        if self._is_urgent or now >= self._due_at:
            return CYCLE_NS
        if now - self.busy_at >= IDLE_AFTER_NS:
            return IDLE_WAKE_INTERVAL_NS
        return WAKE_INTERVAL_NS if self._rings.has_engines else REQUESTS_WAKE_INTERVAL_NS

    def is_idle(self, now: int) -> bool:
        """Returns whether nothing was recorded for `IDLE_AFTER_NS`."""
        return now - self.busy_at >= IDLE_AFTER_NS
