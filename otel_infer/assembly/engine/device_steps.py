"""What a device, or the host in its place, said of the last steps of one engine, as columns. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

MIN_QUEUED_NS = 40_000
"""A device that comes to its work sooner than this had nothing else to do."""
LAUNCH_BOUND_SHARE = 1 / 1.15
"""A span of which the host spent this share on launching is as long as that."""
HOST_STALL_SHARE = 0.1
"""As a share of the spans: more, and the device waits for the host between steps."""

GPU_BOUND, LAUNCH_BOUND, HOST_STALLED, BACK_PRESSURED = (
    "gpu-bound",
    "launch-bound",
    "host-stalled",
    "back-pressured",
)
BY_EVENT, BY_HOST = "event", "host"
STEP, STARTED_AT, SPAN, LAUNCHED, QUEUED, GAP, BOUND, TIMED_BY_EVENT = range(8)
"""The lines of a table: what `by_event` is told, in its order, and whether it was."""


class DeviceTime(NamedTuple):
    """What some steps come to, ns. `steps`: how many were timed. `launched`, `queued` and `gaps` are known by events alone, and
    -1 where not even by them; where of some steps, as that of all is in proportion. `bound`: how far off instants were at most.
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
        """What held the device back: nothing (gpu-bound), the host while launching (launch-bound), the host between steps
        (host-stalled), or, of the host, a device that is behind (back-pressured); empty where nobody knows."""
        if self.method != BY_EVENT or not self.span or self.launched < 0:
            return ""
        in_time = self.queued < MIN_QUEUED_NS * self.steps
        if self.launched >= LAUNCH_BOUND_SHARE * self.span:
            return LAUNCH_BOUND if in_time else BACK_PRESSURED
        if in_time and self.gaps < 0:
            return ""
        return HOST_STALLED if in_time and self.gaps > HOST_STALL_SHARE * self.span else GPU_BOUND


class DeviceSteps:
    """Of the last `capacity` steps. Filled in any order; what a device says of a step goes before what its host does."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._table: Any = np.zeros((8, capacity), np.int64)

    def set_host_time(self, step: int, length: int) -> None:
        """So long it took by the host's clock."""
        i = step % self._capacity
        if self._table[STEP, i] != step:
            self._table[:, i] = step, 0, length, 0, 0, 0, 0, 0

    def set_device_time(
        self, step: int, started_at: int, span: int, launched: int, queued: int, gap: int, bound: int
    ) -> None:
        """From then on the device was at it, so long."""
        self._table[:, step % self._capacity] = step, started_at, span, launched, queued, gap, bound, 1

    def sum_step_times(self, steps: Any) -> tuple[DeviceTime | None, Any]:
        """What these come to, by events if any of them was timed so, and how long each took by the same clock, ns (0 = not
        timed); None where nobody timed any."""
        found = self._table[:, steps % self._capacity]
        found *= found[STEP] == steps  # in the place of a step may be an older one
        if found[TIMED_BY_EVENT].any():
            found *= found[TIMED_BY_EVENT]
            span, queued, timed = found[[SPAN, QUEUED, TIMED_BY_EVENT]].sum(axis=1).tolist()
            launched, gaps = (_scale_known_sum(found, line) for line in (LAUNCHED, GAP))
            time = DeviceTime(BY_EVENT, timed, span, launched, queued, gaps, int(found[BOUND].max()))
            return time, found[SPAN]
        timed = int(np.count_nonzero(found[STEP]))
        return (DeviceTime(BY_HOST, timed, int(found[SPAN].sum())) if timed else None), found[SPAN]

    def idle_times(self, steps: Any, since: Any, until: Any, is_followed: Any) -> Any:
        """How long in each interval the device had nothing to do, ns; -1 where that is not known, as the step was not timed.

        That is until it came to the step, unless it was behind, and after it, unless the next one had been launched by then.
        """
        found = self._table[:, steps % self._capacity]
        began, ended = found[STARTED_AT], found[STARTED_AT] + found[SPAN]
        before = np.maximum(np.minimum(began, until) - since, 0) * (found[QUEUED] < MIN_QUEUED_NS)
        after = np.maximum(until - np.maximum(ended, since), 0) * ~is_followed
        is_timed = (found[STEP] == steps) & (found[TIMED_BY_EVENT] == 1)
        return np.where(is_timed, np.minimum(before + after, until - since), -1)


def _scale_known_sum(found: Any, line: int) -> int:
    """The sum of a line over the timed steps, of those for which it is known in proportion to their spans; -1 = of none."""
    is_known = (found[TIMED_BY_EVENT] == 1) & (found[line] >= 0)
    spans = int(found[SPAN][is_known].sum())
    if not is_known.any():
        return -1
    known = int(found[line][is_known].sum())
    return known * int(found[SPAN].sum()) // spans if spans else known
