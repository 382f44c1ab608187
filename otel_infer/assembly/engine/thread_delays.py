"""Why steps of one engine took longer than such steps take, from what the kernel counted of its thread. Pure.

A look (`facts.ThreadSeen`) says sums of 50 to 100 ms and not where in between they were. So the steps of that time say how
much they took beyond their estimate (`stepcosts`), and the look says how much of that there was a reason for:

    starved       it could have run and had no CPU
    page faults   the kernel mapped memory to it page by page: times what a fault costs this thread (its system time by
                  its faults, at most 4 µs; up to twice that where the steps say so)
    blocked       it neither ran nor wanted to, and ran no longer than its steps take: a lock, the GIL, a disk, the device

Each step that took longer gets the same share of its excess. The error: what happened within a look is divided among the
steps in it by their excess; where the thread ran longer for reasons of its own nothing is said.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from otel_infer.assembly.engine.step_cost import StepCostModel
from otel_infer.ringbuffer.events import ThreadSeen

CAPACITY = 4096
"""Looks that are remembered; half of them go at once."""
MAX_PENDING = 1024
"""Looks that wait for the steps in them to be done: no step lasts longer than those."""
MAX_FAULT_NS = 4000
"""No fault costs more than that: beyond it the kernel did something else."""
FAULT_COST_SAMPLES, MAX_FAULT_COST_FACTOR = 8, 2.0
"""Looks from which is seen how much more than the kernel's part a fault costs: the pages are cold. At most twice as much."""
MIN_DELAY_SHARE = 0.01
"""Share of a look below which nothing is said of page faults and of waiting for a CPU: every thread does a little."""
_ERROR_SIGMAS, _MIN_ERROR_SHARE = 3.0, 0.05
_NEVER = 1 << 63


class DelayShares(NamedTuple):
    """Shares of what a step took longer; `blocked` of what is left of it then. Numbers or columns."""

    starved: Any
    faulted: Any
    blocked: Any


_NO_DELAY = DelayShares(0.0, 0.0, 0.0)


def error_margin(typical: Any, spread: Any) -> Any:
    """How much (ns) beyond the estimate is within its error: three times its spread, at least a twentieth."""
    return np.maximum(_ERROR_SIGMAS * spread, _MIN_ERROR_SHARE * typical)


class KnownDelays:
    """What samples of one engine's thread explain of the steps in them, up to now. It does not change.

    `bounds`: ends of the samples; `shares` and `counted`: sums up to each bound, of the shares of excess over time, and of ns.
    """

    def __init__(self, bounds: Any, shares: Any, counted: Any) -> None:
        self._bounds, self._share_sums, self._delay_sums = bounds, shares, counted
        self._sample_count = len(bounds)
        # Single numbers are looked up through memoryviews, at half the price of numpy's.
        self._bound_view: Any = memoryview(bounds)
        self._delay_sum_views: list[Any] = [memoryview(line) for line in counted]

    def has_delays(self, begin: Any, end: Any) -> Any:
        """Whether anything in between is explained. Numbers or columns."""
        bounds = self._bounds[: self._sample_count]
        first = np.maximum(bounds.searchsorted(begin) - 1, 0)
        last = np.minimum(bounds.searchsorted(end), self._sample_count - 1)
        return (last > first) & (self._share_sums[:, last] > self._share_sums[:, first]).any(axis=0)

    def delay_shares(self, begin: Any, end: Any) -> DelayShares:
        """What share of its excess each step from `begin` to `end` (columns) had for which reason."""
        lengths = np.maximum(end - begin, 1)
        return DelayShares(*(self._sum_between(sums, begin, end) / lengths for sums in self._share_sums))

    def delay_in_interval(self, begin: int, end: int) -> tuple[int, int]:
        """`counted` of one interval, in half the time."""
        after_begin, after_end = (
            bisect_left(self._bound_view, at, 0, self._sample_count) for at in (begin, end)
        )
        first, last = max(after_begin - 1, 0), min(after_end, self._sample_count - 1)
        if last <= first or all(sums[last] == sums[first] for sums in self._delay_sum_views):  # mostly
            return 0, 0
        starved, faulted = (self._sum_until(end, after_end) - self._sum_until(begin, after_begin)).tolist()
        return int(starved), int(faulted)

    def _sum_until(self, at: int, after: int) -> Any:
        """What was counted up to an instant, which lies between look `after` and the one before."""
        if after in (0, self._sample_count):
            return self._delay_sums[:, max(after - 1, 0)]
        before, bounds = self._delay_sums[:, after - 1], self._bounds
        share = int(at - bounds[after - 1]) / int(bounds[after] - bounds[after - 1])
        return before + share * (self._delay_sums[:, after] - before)

    def delays_in_intervals(self, begin: Any, end: Any) -> tuple[Any, Any]:
        """ns without a CPU, ns of page faults in these intervals, as if they were evenly spread over each look."""
        starved, faulted = (self._sum_between(sums, begin, end) for sums in self._delay_sums)
        return starved, faulted

    def _sum_between(self, sums: Any, begin: Any, end: Any) -> Any:
        if not self._sample_count:
            return np.zeros(np.shape(begin))
        bounds, sums = self._bounds[: self._sample_count], sums[: self._sample_count]
        return np.interp(end, bounds, sums) - np.interp(begin, bounds, sums)


class ThreadDelays(KnownDelays):
    """Looks at one engine's thread, and what they explain of the steps in them.

    `due`: the end of the oldest look that has not been set against steps and that nothing more is known of later.
    """

    def __init__(self) -> None:
        self._pending: deque[ThreadSeen] = deque(maxlen=MAX_PENDING)
        super().__init__(np.zeros(CAPACITY, np.int64), np.zeros((3, CAPACITY)), np.zeros((2, CAPACITY)))
        self._sample_count = 0
        self._frozen: KnownDelays | None = None
        self.due = _NEVER
        self._system_ns = self._faults = 0
        self._fault_cost_ratios: deque[float] = deque(maxlen=FAULT_COST_SAMPLES)
        self._fault_cost_factor = 1.0

    @property
    def has_pending(self) -> bool:
        """Whether looks wait to be set against steps."""
        return bool(self._pending)

    @property
    def has_samples(self) -> bool:
        """Whether the kernel says anything of this thread."""
        return bool(self._sample_count)

    def freeze(self) -> KnownDelays | None:
        """What is known now, shared by all who ask until more is known; None where the kernel says nothing of this thread."""
        if self._frozen is None and self._sample_count:
            n = self._sample_count
            tables = self._bounds[:n], self._share_sums[:, :n], self._delay_sums[:, :n]
            self._frozen = KnownDelays(*(table.copy() for table in tables))
        return self._frozen

    def add_sample(self, seen: ThreadSeen) -> None:
        """Takes a look; it counts once the steps in it are done."""
        if not self._sample_count:
            self._append_bound(seen.since, 0.0, 0.0)
        self._system_ns += seen.system_ns
        self._faults += seen.faults
        self._pending.append(seen)
        self._carry_wait_back()
        self._update_due()

    def _update_due(self) -> None:
        self.due = self._pending[0].at if len(self._pending) > 1 else _NEVER

    def _carry_wait_back(self) -> None:
        """The kernel counts a wait when it is over: what does not fit into the last look was in those before it."""
        for i in range(len(self._pending) - 1, 0, -1):
            seen, before = self._pending[i], self._pending[i - 1]
            over = seen.waited_ns - _off_cpu(seen)
            if over <= 0 or seen.since != before.at:
                break
            self._pending[i] = seen._replace(waited_ns=seen.waited_ns - over)
            self._pending[i - 1] = before._replace(waited_ns=before.waited_ns + over)

    def resolve_samples(self, steps: Any, costs: StepCostModel | None, final: bool = False) -> None:
        """Sets looks against the steps up to their ends (lines of `StepRows`, all prompts in the last); `final`: all of them."""
        _, started, ended, _, size, prompts = steps
        some = _SampledSteps(np.maximum(started[1:], ended[:-1]), ended[1:], size[1:], prompts[1:] == 0)
        last = int(ended.max())  # later ones are in flight
        while self._pending and (final or self.due <= last):
            seen = self._pending.popleft()
            self._update_due()
            if seen.since > self._bounds[self._sample_count - 1]:
                self._append_bound(seen.since, 0.0, 0.0)
            fault_ns = self.fault_ns * seen.faults
            if seen.waited_ns + fault_ns < MIN_DELAY_SHARE * (seen.at - seen.since):
                seen, fault_ns = seen._replace(waited_ns=0), 0.0
            excess = _compute_excess(seen, some, costs) if costs is not None else None
            if excess is not None and excess.without_prompts and fault_ns:
                self._fault_cost_ratios.append(
                    (excess.total - min(seen.waited_ns, excess.total)) / fault_ns * self._fault_cost_factor
                )
                self._fault_cost_factor = min(
                    max(median(self._fault_cost_ratios), 1.0), MAX_FAULT_COST_FACTOR
                )
            shares = _compute_shares(seen, fault_ns, excess)
            self._append_bound(
                seen.at, np.array(shares) * (seen.at - seen.since), np.array([seen.waited_ns, fault_ns])
            )

    @property
    def fault_ns(self) -> float:
        """What a fault costs this thread."""
        return (
            min(self._system_ns / self._faults, MAX_FAULT_NS) * self._fault_cost_factor
            if self._faults
            else 0.0
        )

    def _append_bound(self, at: int, shares: Any, counted: Any) -> None:
        self._frozen = None
        if self._sample_count == CAPACITY:
            self._sample_count //= 2
            for table in (self._bounds, self._share_sums, self._delay_sums):
                table[..., : self._sample_count] = table[..., self._sample_count :].copy()
        i = self._sample_count
        self._bounds[i] = at
        if i:
            shares, counted = shares + self._share_sums[:, i - 1], counted + self._delay_sums[:, i - 1]
        self._share_sums[:, i], self._delay_sums[:, i] = shares, counted
        self._sample_count = i + 1


class _SampledSteps(NamedTuple):
    """Columns. `plain`: without a prompt."""

    begins: Any
    ends: Any
    size: Any
    without_prompts: Any


def _off_cpu(seen: ThreadSeen) -> int:
    return max(seen.at - seen.since - seen.ran_ns, 0)


class _Excess(NamedTuple):
    """What the steps in a look took beyond their estimate, and what of that were stalls of steps without prompts; ns.

    `usual`: what they took otherwise. `is_plain`: no prompts were among them, whose cost is not known as well.
    """

    total: float
    stalls: float
    usual: float
    without_prompts: bool


def _compute_excess(seen: ThreadSeen, steps: _SampledSteps, costs: StepCostModel) -> _Excess | None:
    inside = (steps.begins < seen.at) & (steps.ends > seen.since)
    if not inside.any():
        return None
    begins, ends, size, plain = (column[inside] for column in steps)
    lengths = np.maximum(ends - begins, 1)
    part = (np.minimum(ends, seen.at) - np.maximum(begins, seen.since)) / lengths
    typical = np.minimum(costs.base + costs.per_sequence * size, lengths)
    over = lengths - typical
    # That a prompt takes its time on the device is no lock: for this, only steps without one count.
    stalls = (over * part)[(over > error_margin(typical, costs.spread)) & plain]
    usual = np.where(plain, typical, lengths) * part
    return _Excess(float((over * part).sum()), float(stalls.sum()), float(usual.sum()), bool(plain.all()))


def _compute_shares(seen: ThreadSeen, fault_ns: float, excess: _Excess | None) -> DelayShares:
    """What share of the excess of the steps in this look had which reason."""
    if excess is None or excess.total <= 0:
        return _NO_DELAY
    starved = min(seen.waited_ns, excess.total)
    faulted = min(fault_ns, excess.total - starved)
    left = excess.stalls * (1 - (starved + faulted) / excess.total)
    longer = max(seen.ran_ns - excess.usual - faulted, 0.0)
    slept = max(_off_cpu(seen) - seen.waited_ns, 0)
    blocked = min(max(left - longer, 0.0), slept)
    return DelayShares(starved / excess.total, faulted / excess.total, blocked / left if left else 0.0)
