"""Selects the steps that are marked with events, so that marks cost at most 0.3 % of the time on any machine.

Two marks cost the host about 20 µs, several times that with cold caches, and the device 2 µs each (H100):
much for steps of 1 ms. So a step is marked only when enough time has passed since the last marked pair. The
time decides, not the number of steps, because a thread may run a model of 30 µs and then one of 20 ms. Two
consecutive steps are marked, because the device's idle time is known only between those.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_OVERHEAD_SHARE = 0.003
"""Share of the time that the marks of all threads together may cost."""
EVENT_COST_NS = 2000
"""Cost of an event to the device between two kernels, measured on an H100; the host does not wait for it."""
MAX_COST_FACTOR = 8
"""Cost of a marked step with cold caches, as a multiple of the lowest one. A longer time is no cost of
marking, but an interrupt, other threads with the GIL, or a wait for room in the device's queue.
"""
ACTIVE_NS = 1_000_000_000
"""Time since its last step in which a thread has a part of the allowed cost."""
SKIP_RANGE = 2.5
"""Range of the random number of skipped steps, as a multiple of its allowed mean. With 2, a drawn step would
often be too early.
"""
MAX_SAVED_WAITS = 4
"""How far pairs may be late and be made up for, as a multiple of the mean time between them."""
MAX_SKIP_WAITS = 4
"""Time after which steps are no longer skipped, in the same unit. They were drawn when steps were shorter."""
KEPT_SHARE = 0.75
"""Weight of the steps before a pair in the mean length of steps, for the steps before the next pair."""


class StepSampler:
    """Selects the steps of one thread. `wait_ns`: shortest mean time between pairs of marked steps."""

    def __init__(self) -> None:
        self.wait_ns = 0
        self.step_number = 0
        """Steps so far."""
        self.last_step_at = 0
        self._threads = 1
        self._cost = self._lowest_cost = 0.0
        self._paid_until = 0
        """The instant until which the time pays for the marks so far. Each pair moves it by `wait_ns`."""
        self._pair_begun_at = self._first_step = self._second_step = 0
        """The last pair."""
        self._paid_at = self._skip_ends_at = 0
        """`_paid_until` and `_pair_begun_at` with their waits added, for a check in each step."""
        self._next_step = 0
        """The step that begins the next pair, if its marks are paid for by then."""
        self._steps = self._steps_ns = 0.0
        """The last steps and their time, for their mean length. Older ones weigh less."""
        self._max_skipped = 0.0
        self._is_first_of_pair = False
        self._random_state = 1

    def should_sample(self, now: int) -> bool:
        """Counts a step that begins, and returns whether it is to be marked."""
        number = self.step_number = self.step_number + 1
        self.last_step_at = now
        if number == self._second_step:
            return True
        is_early = number < self._next_step
        if is_early and now < self._skip_ends_at:
            return False
        if now < self._paid_at:
            self._next_step = number + 1 + self._draw_skipped_steps()
            return False
        self._begin_pair(now, KEPT_SHARE if not is_early else 0)
        return True

    def add_sample(self, cost_ns: int, collect_ns: int = 0) -> None:
        """Adds a marked step. `cost_ns`: cost of its marks to the host; `collect_ns`: of reading earlier ones."""
        self.add_lowest_cost(cost_ns)
        limit = MAX_COST_FACTOR * self._lowest_cost
        cost = min(cost_ns + 2 * EVENT_COST_NS, limit) + min(collect_ns, 2 * limit)
        self._cost += (cost - self._cost) / 8 if self._cost else cost
        self._update_wait()
        if self._is_first_of_pair:
            self._is_first_of_pair, self._second_step = False, self.step_number + 1

    def add_lowest_cost(self, cost_ns: int) -> None:
        """Adds the cost of two marks to the host in the best case."""
        cost = cost_ns + 2 * EVENT_COST_NS
        self._lowest_cost = min(self._lowest_cost or cost, cost)

    def share_with(self, threads: int) -> None:
        """Sets how many threads share the allowed cost, this one included."""
        self._threads = threads
        self._update_wait()

    def _begin_pair(self, now: int, kept_share: float) -> None:
        """Begins a pair, and draws the next. `kept_share`: weight of the steps before the last pair."""
        self._steps = self._steps * kept_share + self.step_number - self._first_step
        self._steps_ns = self._steps_ns * kept_share + now - self._pair_begun_at
        steps_per_wait = self._steps * self.wait_ns / max(self._steps_ns, 1)
        self._max_skipped = SKIP_RANGE * max(steps_per_wait - 2, 0)
        self._next_step = self.step_number + 2 + self._draw_skipped_steps()
        self._paid_until = max(self._paid_until + self.wait_ns, now - MAX_SAVED_WAITS * self.wait_ns)
        self._pair_begun_at, self._first_step, self._is_first_of_pair = now, self.step_number, True
        self._update_due()

    def _update_wait(self) -> None:
        self.wait_ns = round(2 * self._cost * self._threads / MAX_OVERHEAD_SHARE)
        self._update_due()

    def _update_due(self) -> None:
        self._paid_at = self._paid_until + self.wait_ns
        self._skip_ends_at = self._pair_begun_at + MAX_SKIP_WAITS * self.wait_ns

    def _draw_skipped_steps(self) -> int:
        """Returns a random number of steps to skip.

        Engines have periodic patterns, and the first step after a wait is most often that after a long one.
        """
        self._random_state = (
            self._random_state * 1103515245 + 12345
        ) & 0x7FFFFFFF  # the generator of C's `rand`: random enough, and fast
        return int((self._random_state >> 8) / (1 << 23) * (self._max_skipped + 1))


def share_cost(samplers: Sequence[StepSampler], now: int) -> None:
    """Divides the allowed cost among the threads that have had a step in the last second."""
    threads = sum(now - sampler.last_step_at < ACTIVE_NS for sampler in samplers)
    for sampler in samplers:
        sampler.share_with(max(threads, 1))
