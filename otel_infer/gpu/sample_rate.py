"""Selects the steps that are marked with events, so that marks cost at most 0.3 % of the time on any machine.

Two marks cost the host about 20 µs, several times that with cold caches, and the device 2 µs each (H100):
much for steps of 1 ms. So only some steps are marked where steps are short. They are drawn at random, because
engines have periodic patterns. Two consecutive steps are marked, because the device's idle time is known only
between those.
"""

from __future__ import annotations

MAX_OVERHEAD_SHARE = 0.003
"""Share of the time between two steps that marks may cost."""
EVENT_COST_NS = 2000
"""Cost of an event to the device between two kernels, measured on an H100; the host does not wait for it."""


class StepSampler:
    """Selects steps. `interval`: one step of this many is selected on average."""

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
        """Counts a step that begins, and returns whether it is to be marked."""
        self.step_number += 1
        return self.step_number >= self._next_step

    def add_sample(self, at: int, cost_ns: int) -> None:
        """Updates the interval after a marked step that began at `at`; its marks cost the host `cost_ns`."""
        cost = cost_ns + 2 * EVENT_COST_NS
        # The cost is capped: an interrupt, or a wait for room in the device's queue, is no cost of marking.
        self._cost += (min(cost, 16 * self._cost) - self._cost) / 8 if self._cost else cost
        if 0 < self._last_begun_at < at:  # a nested step begins later and is marked before
            period = (at - self._last_begun_at) / max(self.step_number - self._last_step_number, 1)
            known = self._period or period
            # The period follows a longer one slowly, because an engine that was idle is not slow.
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
        ) & 0x7FFFFFFF  # the generator of C's `rand`: random enough, and fast
        self._is_pair_start = not self._is_pair_start
        self._next_step = self.step_number + 1
        if not self._is_pair_start:
            self._next_step += (self._random_state >> 8) % (4 * self.interval - 3)
