"""Which steps are marked, so that marks cost at most 0.3 % of the time, whatever machine this is.

Two marks cost the host some 20 µs, several times that where its caches are cold, and the device 2 µs each (H100): much for steps of
1 ms. So only some are marked where steps are short, drawn by chance, since engines have rhythms of their own; and two in a row: what
a device had nothing to do in between is known of those alone.
"""

from __future__ import annotations

MAX_OVERHEAD_SHARE = 0.003
"""Of the time between two steps, that marks may cost."""
EVENT_COST_NS = 2000
"""What an event costs the device between two kernels: seen on an H100, whose host does not wait for it."""


class StepSampler:
    """Which steps are marked. `every`: one of so many."""

    def __init__(self) -> None:
        self.interval = 1
        self.step_number = 0
        """Steps so far."""
        self._next_step = 1
        self._last_begun_at = self._last_step_number = 0
        self._period = self._cost = 0.0
        self._random_state = 1
        self._is_pair_start = False

    def should_sample(self) -> bool:
        """Whether the step that begins is to be marked."""
        self.step_number += 1
        return self.step_number >= self._next_step

    def reset_period(self) -> None:
        """For a while nothing is launched, which says nothing of the pace."""
        self._last_begun_at = 0

    def add_sample(self, at: int, cost_ns: int) -> None:
        """The step that began at `at` was marked, which took the host so long."""
        cost = cost_ns + 2 * EVENT_COST_NS
        # Who is interrupted in the middle, or waits for room in the device's queue, has not worked for so long.
        self._cost += (min(cost, 16 * self._cost) - self._cost) / 8 if self._cost else cost
        if 0 < self._last_begun_at < at:  # a step inside of another begins later and is marked before
            period = (at - self._last_begun_at) / max(self.step_number - self._last_step_number, 1)
            known = self._period or period
            # An engine that was idle is not slow.
            self._period = (
                known + (period - known) / 2
                if period < known
                else known + (min(period, 2 * known) - known) / 32
            )
            self.interval = (
                max(-int(-self._cost // (MAX_OVERHEAD_SHARE * self._period)), 1) if self._period else 1
            )
        self._last_begun_at, self._last_step_number = at, self.step_number
        self._random_state = (
            self._random_state * 1103515245 + 12345
        ) & 0x7FFFFFFF  # as C's `rand`: good enough, and quick
        self._is_pair_start = not self._is_pair_start
        self._next_step = self.step_number + 1
        if not self._is_pair_start:
            self._next_step += (self._random_state >> 8) % (4 * self.interval - 3)
