"""Delays of one engine's steps beyond the cost model, explained by kernel counters of its thread. Pure.

A sample (`ThreadSeen`) holds sums over 50 to 200 ms, without instants in between. The steps in that time have
an excess over their estimate (`step_cost`). The sample explains part of that excess by a cause:

    starved       the thread was runnable and had no CPU
    page faults   the kernel mapped memory page by page
    blocked       the thread was not runnable (lock, GIL, disk, device) and ran no longer than usual
    ran longer    the thread was on a CPU for longer than such steps usually take

A page fault costs the thread's system time divided by its faults, at most 4 µs. Where the steps show it, the
cost is up to twice that.

Every step with an excess gets the same shares of its excess. The error: a delay within a sample is divided
among its steps by their excess.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from otel_infer.assembly.engine.delay_shares import (
    DelayShares,
    SampledSteps,
    compute_excess,
    compute_shares,
    time_off_cpu,
)
from otel_infer.assembly.engine.step_cost import StepCostModel
from otel_infer.ringbuffer.events import ThreadRan, ThreadSeen

CAPACITY = 4096
"""Samples that are remembered; when full, the older half is dropped."""
MAX_PENDING = 1024
"""Samples that wait until the steps in them are done; they cover more time than any step takes."""
MAX_FAULT_NS = 4000
"""The largest cost of a page fault; system time beyond it has another cause."""
FAULT_COST_SAMPLES, MAX_FAULT_COST_FACTOR = 8, 2.0
"""A fault costs more than the kernel's part, because the new pages are not in the caches.

The factor is estimated from this many samples, and is at most 2.
"""
MAX_LAG_NS = 10_000_000_000
"""A thread that was not sampled for longer is no longer sampled."""
MIN_DELAY_SHARE = 0.01
"""Share of a sample below which faults and CPU waits are ignored, because every thread has a few."""
_NEVER, _LAST_INSTANT = 1 << 63, (1 << 63) - 1


class KnownDelays:
    """The delays that samples of one engine's thread explain; immutable unless a `ThreadDelays`.

    `bounds`: ends of the samples. `shares`, `delays`: running sums at each bound, of the shares of excess
    (times the sample's length) and of the delays themselves, ns.
    """

    def __init__(self, bounds: Any, shares: Any, delays: Any) -> None:
        self._sample_count = len(bounds)
        self._set_tables(bounds, shares, delays)

    def _set_tables(self, bounds: Any, shares: Any, delays: Any) -> None:
        self._bounds, self._share_sums, self._delay_sums = bounds, shares, delays
        # Single numbers are read through memoryviews, at half the cost of numpy's indexing.
        self._bound_view: Any = memoryview(bounds)
        self._delay_sum_views: list[Any] = [memoryview(line) for line in delays]

    def has_delays(self, begin: Any, end: Any) -> Any:
        """Returns whether any delay is known in the interval, for numbers or columns."""
        bounds = self._bounds[: self._sample_count]
        first = np.maximum(bounds.searchsorted(begin) - 1, 0)
        last = np.minimum(bounds.searchsorted(end), self._sample_count - 1)
        return (last > first) & (self._share_sums[:, last] > self._share_sums[:, first]).any(axis=0)

    def delay_shares(self, begin: Any, end: Any) -> DelayShares:
        """Returns the shares of excess of each step from `begin` to `end` (columns)."""
        lengths = np.maximum(end - begin, 1)
        return DelayShares(*(self._sum_between(sums, begin, end) / lengths for sums in self._share_sums))

    def delay_in_interval(self, begin: int, end: int) -> tuple[int, int]:
        """Returns `delays_in_intervals` of one interval, in half the time."""
        after_begin, after_end = (
            bisect_left(self._bound_view, at, 0, self._sample_count) for at in (begin, end)
        )
        first, last = max(after_begin - 1, 0), min(after_end, self._sample_count - 1)
        if last <= first or all(sums[last] == sums[first] for sums in self._delay_sum_views):  # mostly
            return 0, 0
        starved, faulted = (self._sum_until(end, after_end) - self._sum_until(begin, after_begin)).tolist()
        return round(starved), round(faulted)

    def _sum_until(self, at: int, after: int) -> Any:
        """Returns the delays up to an instant between bound `after` and the bound before it."""
        if after in (0, self._sample_count):
            return self._delay_sums[:, max(after - 1, 0)]
        before, bounds = self._delay_sums[:, after - 1], self._bounds
        share = int(at - bounds[after - 1]) / int(bounds[after] - bounds[after - 1])
        return before + share * (self._delay_sums[:, after] - before)

    def delays_in_intervals(self, begin: Any, end: Any) -> tuple[Any, Any]:
        """Returns the ns without a CPU and the ns of page faults in each interval.

        Delays are assumed to be spread evenly over their sample.
        """
        starved, faulted = (self._sum_between(sums, begin, end) for sums in self._delay_sums)
        return starved, faulted

    def _sum_between(self, sums: Any, begin: Any, end: Any) -> Any:
        if not self._sample_count:
            return np.zeros(np.shape(begin))
        # Only the samples around the intervals, because `interp` copies all bounds.
        bounds = self._bounds[: self._sample_count]
        first, last = bounds.searchsorted(
            (np.min(begin, initial=_LAST_INSTANT), np.max(end, initial=0))
        ).tolist()
        around = slice(min(max(first - 1, 0), self._sample_count - 1), last + 1)
        bounds, sums = bounds[around], sums[: self._sample_count][around]
        return np.interp(end, bounds, sums) - np.interp(begin, bounds, sums)


class _UnsharedSample(NamedTuple):
    """A sample from before there was a cost model, and its place in the tables."""

    place: int
    sample: ThreadSeen
    fault_ns: float


class ThreadDelays(KnownDelays):
    """Samples of one engine's thread, and the delays that they explain.

    `due`: the end of the oldest pending sample, once a later sample exists. Before that, a later sample may
    still add waiting time to it.
    """

    def __init__(self) -> None:
        self._pending: deque[ThreadSeen] = deque(maxlen=MAX_PENDING)
        super().__init__(np.zeros(CAPACITY, np.int64), np.zeros((4, CAPACITY)), np.zeros((2, CAPACITY)))
        self._sample_count = 0
        self._frozen: KnownDelays | None = None
        self.due = _NEVER
        self._system_ns, self._faults, self._is_over = 0, 0, False
        self._fault_cost_ratios: deque[float] = deque(maxlen=FAULT_COST_SAMPLES)
        self._recent: deque[ThreadSeen] = deque(maxlen=MAX_PENDING)
        self._unshared: list[_UnsharedSample] = []
        self._fault_cost_factor = 1.0

    @property
    def has_pending(self) -> bool:
        """Returns whether samples wait to be compared with steps."""
        return bool(self._pending)

    def concerns(self, ended_at: int, has_model: bool) -> bool:
        """Returns whether samples may have to be resolved for a request that ended at this instant."""
        is_pending = bool(self._pending) and self._pending[0].since < ended_at
        return is_pending or (has_model and bool(self._unshared))

    @property
    def pending_since(self) -> int:
        """Returns when the oldest pending sample began; 0 without one."""
        if self._unshared:
            return self._unshared[0].sample.since
        return self._pending[0].since if self._pending else 0

    def freeze(self) -> KnownDelays | None:
        """Returns the delays up to now, shared until the next change; None without samples of this thread."""
        if self._frozen is None and self._sample_count:
            n = self._sample_count
            # Views, because samples are only appended.
            self._frozen = KnownDelays(self._bounds[:n], self._share_sums[:, :n], self._delay_sums[:, :n])
        return self._frozen

    def add_sample(self, sample: ThreadSeen) -> None:
        """Adds a sample; it has an effect once the steps in it are done."""
        if not self._sample_count:
            self._append_bound(sample.since, 0.0, 0.0)
        sample = _begin_after(sample, self._last_bound())
        if sample.since >= sample.at:
            return
        self._is_over = False
        self._system_ns += sample.system_ns
        self._faults += sample.faults
        self._pending.append(sample)
        self._recent.append(sample)
        self._carry_wait_back()
        self._update_due()

    def add_totals(self, totals: ThreadRan) -> None:
        """Adds what the counters of a generation hold beyond the samples in it: its last part, or all of it."""
        during = [sample for sample in self._recent if sample.at > totals.since]
        self._recent.clear()
        since = max([sample.at for sample in during], default=max(totals.since, self._last_bound()))
        if since >= totals.at:
            return
        overlaps = [sample.at - max(sample.since, totals.since) for sample in during]
        ran, waited, system = (
            max(total * 1000 - sum(min(getattr(sample, name), overlap) for sample, overlap in zip(during, overlaps)), 0)
            for total, name in (
                (totals.ran_us, "ran_ns"), (totals.waited_us, "waited_ns"), (totals.system_us, "system_ns"),
            )
        )  # fmt: skip
        faults = max(totals.faults - sum(sample.faults for sample in during), 0)
        length = totals.at - since
        self.add_sample(ThreadSeen(totals.at, since, min(ran, length), min(waited, length), system, faults))
        self._recent.clear()
        self._is_over = True

    def lags_behind(self, at: int) -> bool:
        """Returns whether samples of this thread are to come, and the last one ended before this instant."""
        last = self._last_bound()
        return not self._is_over and 0 < last < at <= last + MAX_LAG_NS

    def _last_bound(self) -> int:
        """Returns the end of the last sample; 0 without one."""
        if self._pending:
            return self._pending[-1].at
        return int(self._bounds[self._sample_count - 1]) if self._sample_count else 0

    def _update_due(self) -> None:
        self.due = self._pending[0].at if len(self._pending) > 1 else _NEVER

    def _carry_wait_back(self) -> None:
        """Moves waiting time that exceeds the last sample's time off the CPU into the samples before it.

        The kernel counts a wait when it ends.
        """
        for i in range(len(self._pending) - 1, 0, -1):
            sample, before = self._pending[i], self._pending[i - 1]
            excess = sample.waited_ns - time_off_cpu(sample)
            if excess <= 0 or sample.since != before.at:
                break
            self._pending[i] = sample._replace(waited_ns=sample.waited_ns - excess)
            self._pending[i - 1] = before._replace(waited_ns=before.waited_ns + excess)

    def resolve_samples(
        self, steps: Any, cost_model: StepCostModel | None, final: bool = False, ended_at: int = 0
    ) -> None:
        """Compares due samples with the steps up to their ends; `final`: all pending samples.

        `steps`: columns of a `StepTable`. `ended_at`: the end of a request that is concluded. It will not see that a later
        sample changes one that began before its end, so that one is due.
        """
        _, started, ended, _, size, prompts = steps
        columns = SampledSteps(np.maximum(started[1:], ended[:-1]), ended[1:], size[1:], prompts[1:] == 0)
        last = int(ended.max())  # later steps are in flight
        if cost_model is not None and self._unshared:
            self._share_earlier(columns, cost_model)
        while self._pending and (final or self._due_for(ended_at) <= last):
            sample = self._pending.popleft()
            self._update_due()
            if sample.since > self._bounds[self._sample_count - 1]:
                self._append_bound(sample.since, 0.0, 0.0)
            fault_ns = self.fault_ns * sample.faults
            if sample.waited_ns + fault_ns < MIN_DELAY_SHARE * (sample.at - sample.since):
                sample, fault_ns = sample._replace(waited_ns=0), 0.0
            excess = compute_excess(sample, columns, cost_model) if cost_model is not None else None
            if excess is not None and excess.without_prompts and fault_ns:
                self._fault_cost_ratios.append(
                    (excess.total - min(sample.waited_ns, excess.total)) / fault_ns * self._fault_cost_factor
                )
                self._fault_cost_factor = min(
                    max(median(self._fault_cost_ratios), 1.0), MAX_FAULT_COST_FACTOR
                )
            shares = compute_shares(sample, fault_ns, excess)
            self._append_bound(
                sample.at,
                np.array(shares) * (sample.at - sample.since),
                np.array([sample.waited_ns, fault_ns]),
            )
            if cost_model is None:
                self._unshared.append(_UnsharedSample(self._sample_count - 1, sample, fault_ns))

    def _share_earlier(self, steps: SampledSteps, cost_model: StepCostModel) -> None:
        """Shares the samples from before there was a cost model, in a new table, because frozen delays are views."""
        shares = np.diff(self._share_sums, axis=1, prepend=0.0)
        for place, sample, fault_ns in self._unshared:
            found = compute_shares(sample, fault_ns, compute_excess(sample, steps, cost_model))
            shares[:, place] = np.array(found) * (sample.at - sample.since)
        shares[:, self._sample_count :] = 0.0
        self._set_tables(self._bounds, shares.cumsum(axis=1), self._delay_sums)
        self._unshared.clear()
        self._frozen = None

    def _due_for(self, ended_at: int) -> int:
        """Returns when the oldest pending sample is due, for a request that ended at this instant, if any.

        Then most of the sample is in steps that are done; its end may be in the step in flight.
        """
        oldest = self._pending[0]
        return oldest.at - (oldest.at - oldest.since) // 4 if oldest.since < ended_at else self.due

    @property
    def fault_ns(self) -> float:
        """Returns the cost of a page fault to this thread, ns; 0 before the first fault."""
        return (
            min(self._system_ns / self._faults, MAX_FAULT_NS) * self._fault_cost_factor
            if self._faults
            else 0.0
        )

    def _append_bound(self, at: int, shares: Any, delays: Any) -> None:
        self._frozen = None
        if self._sample_count == CAPACITY:
            self._drop_older_half()
        i = self._sample_count
        self._bounds[i] = at
        if i:
            shares, delays = shares + self._share_sums[:, i - 1], delays + self._delay_sums[:, i - 1]
        self._share_sums[:, i], self._delay_sums[:, i] = shares, delays
        self._sample_count = i + 1

    def _drop_older_half(self) -> None:
        """Continues in new tables, because frozen delays are views of these."""
        self._unshared.clear()
        self._sample_count //= 2
        tables = self._bounds, self._share_sums, self._delay_sums
        self._set_tables(
            *(
                np.concatenate((t[..., CAPACITY // 2 :], np.zeros_like(t[..., : CAPACITY // 2])), -1)
                for t in tables
            )
        )


def _begin_after(sample: ThreadSeen, bound: int) -> ThreadSeen:
    """Returns the part of a sample after the last one, which may be the counters of a generation that has ended in it."""
    if sample.since >= bound:
        return sample
    length = max(sample.at - bound, 0)
    return sample._replace(
        since=bound, ran_ns=min(sample.ran_ns, length), waited_ns=min(sample.waited_ns, length)
    )
