"""Which steps are marked, so that marks cost at most 0.3 % of the time, whatever machine this is.

Two marks cost the host some 20 µs, several times that where its caches are cold, and the device 2 µs each (H100): much for steps of
1 ms. So only some are marked where steps are short, drawn by chance, since engines have rhythms of their own; and two in a row: what
a device had nothing to do in between is known of those alone.
"""

from __future__ import annotations

SHARE = 0.003
"""Of the time between two steps, that marks may cost."""
MARK_NS = 2000
"""What an event costs the device between two kernels: seen on an H100, whose host does not wait for it."""


class Pacing:
    """Which steps are marked. `every`: one of so many."""

    def __init__(self) -> None:
        self.every = 1
        self.number = 0
        """Steps so far."""
        self._next = 1
        self._begun_at = self._begun_number = 0
        self._period = self._cost = 0.0
        self._drawn = 1
        self._is_first = False

    def is_next(self) -> bool:
        """Whether the step that begins is to be marked."""
        self.number += 1
        return self.number >= self._next

    def idle(self) -> None:
        """For a while nothing is launched, which says nothing of the pace."""
        self._begun_at = 0

    def marked(self, at: int, cost_ns: int) -> None:
        """The step that began at `at` was marked, which took the host so long."""
        cost = cost_ns + 2 * MARK_NS
        # Who is interrupted in the middle, or waits for room in the device's queue, has not worked for so long.
        self._cost += (min(cost, 16 * self._cost) - self._cost) / 8 if self._cost else cost
        if 0 < self._begun_at < at:  # a step inside of another begins later and is marked before
            period = (at - self._begun_at) / max(self.number - self._begun_number, 1)
            known = self._period or period
            # An engine that was idle is not slow.
            self._period = (
                known + (period - known) / 2
                if period < known
                else known + (min(period, 2 * known) - known) / 32
            )
            self.every = max(-int(-self._cost // (SHARE * self._period)), 1) if self._period else 1
        self._begun_at, self._begun_number = at, self.number
        self._drawn = (self._drawn * 1103515245 + 12345) & 0x7FFFFFFF  # as C's `rand`: good enough, and quick
        self._is_first = not self._is_first
        self._next = self.number + 1
        if not self._is_first:
            self._next += (self._drawn >> 8) % (4 * self.every - 3)
