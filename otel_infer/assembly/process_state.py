"""What each process said last of itself: which of its hooks are bound, and who waits in its scheduler. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Any

from otel_infer.ringbuffer import events


class ProcessState:
    """By the ring that a process writes to. `hooks`: of each integration in it, (active, in all)."""

    def __init__(self) -> None:
        self.hooks: dict[tuple[int, str], tuple[int, int]] = {}
        self._waiting: dict[tuple[int, str], int] = {}

    def set_hooks(self, ring: int, handle: int, fact: events.HooksReported) -> None:
        """The hooks of one integration."""
        self.hooks[ring, fact.integration] = (fact.active, fact.total)

    def set_waiting(self, ring: int, handle: int, fact: events.WaitingSeen) -> None:
        """Who waits for one reason."""
        self._waiting[ring, fact.reason] = fact.requests

    def count_waiting(self) -> Counter[str]:
        """How many requests wait, by reason; one that was said stays, with 0."""
        counts = Counter[str]()
        for (_, reason), requests in self._waiting.items():
            counts[reason] += requests
        return counts

    def remove_process(self, ring: int) -> None:
        """The process is gone."""
        known: tuple[dict[Any, Any], ...] = (self.hooks, self._waiting)
        for said in known:
            for key in [key for key in said if key[0] == ring]:
                del said[key]
