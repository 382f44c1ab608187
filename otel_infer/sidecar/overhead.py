"""Keeps the reading side inside its overhead budget: above it, fewer step spans are created. Pure.

Requests, stages and metrics are never dropped, and nothing in the server changes. Only detail is dropped, and
counted.
"""

from __future__ import annotations

from otel_infer.config.budget import OverheadBudget

WINDOW_NS = 5_000_000_000
"""CPU is averaged over this time before a decision, so that a burst alone changes nothing."""
DECREASE_FACTOR, INCREASE_FACTOR = 0.7, 1.25
RECOVERY_LOAD = 0.8
"""Below this part of the budget, detail is restored."""
MIN_SHARE = 0.01


class OverheadGovernor:
    """Controller of the share of step spans that may be created, `MIN_SHARE` to 1 (all)."""

    def __init__(self, budget: OverheadBudget) -> None:
        self._budget = budget
        self._since, self._cpu_before = 0, 0
        self.share = 1.0

    def update_share(self, now: int, cpu: int, memory: int) -> float:
        """Returns the share from now on.

        `now` and `cpu` (used so far) are in ns, `memory` (in use now) in bytes.
        """
        if not self._since:
            self._since, self._cpu_before = now, cpu
        if now - self._since < WINDOW_NS:
            return self.share
        cores = (cpu - self._cpu_before) / (now - self._since)
        self._since, self._cpu_before = now, cpu
        load = max(cores / self._budget.cpu_cores, memory / self._budget.memory_bytes)
        if load > 1:
            self.share = max(self.share * DECREASE_FACTOR, MIN_SHARE)
        elif load < RECOVERY_LOAD:
            self.share = min(self.share * INCREASE_FACTOR, 1.0)
        return self.share
