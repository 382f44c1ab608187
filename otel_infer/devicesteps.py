"""What a device, or the host in its place, said of the last steps of one engine, as columns. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

CAPACITY = 65536
"""As many as steps are remembered."""
HURRY_NS = 40_000
"""A device that comes to its work sooner than this had nothing else to do."""
LAUNCHES = 1 / 1.15
"""A span of which the host spent this share on launching is as long as that."""
GAPS = 0.1
"""As a share of the spans: more, and the device waits for the host between steps."""

GPU_BOUND, LAUNCH_BOUND, HOST_STALLED, BACK_PRESSURED = (
    "gpu-bound",
    "launch-bound",
    "host-stalled",
    "back-pressured",
)
BY_EVENT, BY_HOST = "event", "host"


class DeviceTime(NamedTuple):
    """What some steps come to, ns. `steps`: how many were timed. `launched`, `queued` and `gaps` are known by events alone.

    `bound`: how far off the instants were at most.
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
        if self.method != BY_EVENT or not self.span:
            return ""
        in_time = self.queued < HURRY_NS * self.steps
        if self.launched >= LAUNCHES * self.span:
            return LAUNCH_BOUND if in_time else BACK_PRESSURED
        return HOST_STALLED if in_time and self.gaps > GAPS * self.span else GPU_BOUND


class DeviceSteps:
    """Filled in any order; what a device says of a step goes before what its host does."""

    STEP, SPAN, LAUNCHED, QUEUED, GAP, BOUND, BY = range(7)

    def __init__(self) -> None:
        self._table: Any = np.zeros((7, CAPACITY), np.int64)

    def by_host(self, step: int, length: int) -> None:
        """So long it took by the host's clock."""
        i = step % CAPACITY
        if self._table[self.STEP, i] != step:
            self._table[:, i] = step, length, 0, 0, 0, 0, 0

    def by_event(self, step: int, span: int, launched: int, queued: int, gap: int, bound: int) -> None:
        """So long the device was at it."""
        self._table[:, step % CAPACITY] = step, span, launched, queued, gap, bound, 1

    def spans(self, steps: Any) -> Any:
        """How long the device was at each of these, ns; 0 where it did not say. None if it said of none of them."""
        found = self._of(steps)
        column = np.where((found[self.STEP] == steps) & (found[self.BY] == 1), found[self.SPAN], 0)
        return column if column.any() else None

    def time_of(self, steps: Any) -> DeviceTime | None:
        """What these come to; None if none of them was timed. By events, if any was."""
        found = self._of(steps)
        known = found[:, found[self.STEP] == steps]
        by_event = known[:, known[self.BY] == 1]
        if by_event.shape[1]:
            _, span, launched, queued, gaps, _, _ = by_event.sum(axis=1).tolist()
            bound = int(by_event[self.BOUND].max())
            return DeviceTime(BY_EVENT, by_event.shape[1], span, launched, queued, gaps, bound)
        return DeviceTime(BY_HOST, known.shape[1], int(known[self.SPAN].sum())) if known.shape[1] else None

    def lengths(self, steps: Any) -> Any:
        """How long a device, or the host in its place, was at each of these, ns; 0 where nobody said."""
        found = self._of(steps)
        return np.where(found[self.STEP] == steps, found[self.SPAN], 0)

    def _of(self, steps: Any) -> Any:
        return self._table[:, np.asarray(steps) % CAPACITY]
