"""What torch's CUDA allocator counts when memory is short: that it freed what it kept and asked again, or had no more.

    a request ends, once a second at most ─ memory_stats of each device ─▶ a mark, from the last look to this one

The figures are the allocator's own, read under its lock, without a word to the device. Each time costs the request that waits
for memory milliseconds, but how many is not said: `_record_memory_history` would say it, and makes each allocation dear.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from otel_infer import clock

EVERY_NS = 1_000_000_000
COUNTED = {"num_alloc_retries": "allocator_retry", "num_ooms": "allocator_oom"}
"""Figures of the allocator, and the marks they become."""

Say = Callable[[str, int, int, int], None]
"""(mark, since, at, count)."""


class Allocator:
    """Its figures as they were at the last look. Never loads torch, never makes it turn to CUDA."""

    def __init__(self, say: Say, now: Callable[[], int] = clock.now) -> None:
        self._say, self._now = say, now
        self._looked_at = now()
        self._before = self._read() or dict.fromkeys(COUNTED.values(), 0)

    def look(self) -> None:
        """Says what was added since the last time; nothing within a second of it."""
        at = self._now()
        if at - self._looked_at < EVERY_NS:
            return
        since, self._looked_at = self._looked_at, at
        known = self._read()
        if known is None:
            return
        before, self._before = self._before, known
        for mark, count in known.items():
            if count > before[mark]:
                self._say(mark, since, at, count - before[mark])

    def _read(self) -> dict[str, int] | None:
        """The marks so far, of all devices; None while CUDA is not in use."""
        cuda = sys.modules.get("torch.cuda")
        is_initialized = getattr(cuda, "is_initialized", None)  # another thread may be importing it
        if cuda is None or is_initialized is None or not is_initialized():
            return None
        devices: list[Mapping[str, Any]] = [
            cuda.memory_stats_as_nested_dict(device) for device in range(cuda.device_count())
        ]
        return {mark: sum(int(stats.get(key, 0)) for stats in devices) for key, mark in COUNTED.items()}
