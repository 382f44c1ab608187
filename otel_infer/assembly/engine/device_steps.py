"""The device time (or else the host time) of one engine's last steps, as columns. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

MIN_QUEUED_NS = 40_000
"""A device that starts its work sooner than this after the launch was idle before it."""
HOST_SHARE = 1 / 1.15
"""Share of a span from which the time of launching may be what limited it."""
HOST_STALL_SHARE = 0.1
"""Gaps between steps, as a share of the spans, above which the device waits for the host."""

GPU_BOUND, LAUNCH_OR_SYNC, HOST_STALLED, BACK_PRESSURED = (
    "gpu-bound",
    "launch-or-sync",
    "host-stalled",
    "back-pressured",
)
BY_EVENT, BY_HOST = "event", "host"
STEP, STARTED_AT, SPAN, LAUNCHED, QUEUED, GAP, BOUND, TIMED_BY_EVENT = range(8)
"""Lines of the table: the parameters of `set_device_time`, in its order, and whether an event gave them."""


class DeviceTime(NamedTuple):
    """The summed times of some steps, ns. `steps`: how many of them were timed.

    Only events give `launched`, `queued` and `gaps`. `launched` and `gaps` are -1 where unknown. Where they
    are known for some of the steps, they are scaled up to all timed steps. `bound`: largest error of an
    instant.
    """

    method: str
    steps: int
    span: int
    launched: int = 0
    queued: int = 0
    gaps: int = 0
    bound: int = 0

    @property
    def limit(self) -> str:
        """Returns the bottleneck of these steps; empty where it is unknown.

        The device itself is `gpu-bound`. The host is `host-stalled` between steps, and `back-pressured` where
        it waited while launching because the device was behind. It is `launch-or-sync` where launching took as
        long as the device: it launches kernel by kernel, or it waits for a result within the span
        (`.item()`, `nonzero()`, a copy from pageable memory). Both give the same four durations.
        """
        if self.method != BY_EVENT or not self.span or self.launched < 0:
            return ""
        in_time = self.queued < MIN_QUEUED_NS * self.steps
        if self.launched >= HOST_SHARE * self.span:
            return LAUNCH_OR_SYNC if in_time else BACK_PRESSURED
        if in_time and self.gaps < 0:
            return ""
        return HOST_STALLED if in_time and self.gaps > HOST_STALL_SHARE * self.span else GPU_BOUND


class DeviceSteps:
    """The times of the last `capacity` steps, set in any order.

    A step's device time takes precedence over its host time.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._table: Any = np.zeros((8, capacity), np.int64)

    def set_host_time(self, step: int, length: int) -> None:
        """Records how long a step took by the host's clock, ns."""
        i = step % self._capacity
        if self._table[STEP, i] != step:
            self._table[:, i] = step, 0, length, 0, 0, 0, 0, 0

    def set_device_time(
        self, step: int, started_at: int, span: int, launched: int, queued: int, gap: int, bound: int
    ) -> None:
        """Records when the device started a step, and its lengths in ns; -1 = `launched` or `gap` unknown."""
        self._table[:, step % self._capacity] = step, started_at, span, launched, queued, gap, bound, 1

    def sum_step_times(self, steps: Any) -> tuple[DeviceTime | None, Any]:
        """Returns the summed times of these steps, and a column with the length of each, ns (0 = not timed).

        If any step was timed by events, only those steps count. The sum is None where no step was timed.
        """
        columns = self._table[:, steps % self._capacity]
        columns *= columns[STEP] == steps  # the slot of a step may hold an older one
        if columns[TIMED_BY_EVENT].any():
            columns *= columns[TIMED_BY_EVENT]
            span, queued, timed = columns[[SPAN, QUEUED, TIMED_BY_EVENT]].sum(axis=1).tolist()
            launched, gaps = (_scale_known_sum(columns, line) for line in (LAUNCHED, GAP))
            time = DeviceTime(BY_EVENT, timed, span, launched, queued, gaps, int(columns[BOUND].max()))
            return time, columns[SPAN]
        timed = int(np.count_nonzero(columns[STEP]))
        return (DeviceTime(BY_HOST, timed, int(columns[SPAN].sum())) if timed else None), columns[SPAN]

    def idle_times(self, steps: Any, since: Any, until: Any, is_followed: Any) -> Any:
        """Returns how long the device was idle in each interval, ns; -1 where its step was not timed.

        The device is idle before it starts the step, unless it was behind (the step was queued). It is idle
        after the step, unless the next step had been launched by then (`is_followed`).
        """
        columns = self._table[:, steps % self._capacity]
        began, ended = columns[STARTED_AT], columns[STARTED_AT] + columns[SPAN]
        before = np.maximum(np.minimum(began, until) - since, 0) * (columns[QUEUED] < MIN_QUEUED_NS)
        after = np.maximum(until - np.maximum(ended, since), 0) * ~is_followed
        is_timed = (columns[STEP] == steps) & (columns[TIMED_BY_EVENT] == 1)
        return np.where(is_timed, np.minimum(before + after, until - since), -1)


def _scale_known_sum(columns: Any, line: int) -> int:
    """Returns the sum of a line over the timed steps; -1 where no step has a known value.

    The sum of the known values is scaled by the spans, from the steps with a value to all timed steps.
    """
    is_known = (columns[TIMED_BY_EVENT] == 1) & (columns[line] >= 0)
    spans = int(columns[SPAN][is_known].sum())
    if not is_known.any():
        return -1
    known = int(columns[line][is_known].sum())
    return known * int(columns[SPAN].sum()) // spans if spans else known
