"""Keeps the reading side inside what it may take: above it, fewer step spans are made. Pure.

Requests, stages and metrics are never shed, and nothing in the server changes: what is given up is detail, and it is counted.
"""

from __future__ import annotations

from otel_infer.config.budget import OverheadBudget

WINDOW_NS = 5_000_000_000
"""How long CPU is averaged before anything is decided; a burst is not a state."""
DECREASE_FACTOR, INCREASE_FACTOR = 0.7, 1.25
RECOVERY_LOAD = 0.8
"""Below this part of what it may take, detail comes back."""
MIN_SHARE = 0.01


class OverheadGovernor:
    """Says which share of the step spans may be made, 1 = all."""

    def __init__(self, allowed: OverheadBudget) -> None:
        self._budget = allowed
        self._since, self._cpu_before = 0, 0
        self.share = 1.0

    def update_share(self, now: int, cpu: int, memory: int) -> float:
        """`now`, and `cpu` used so far, in ns; `memory` held now, bytes. The share from now on."""
        if not self._since:
            self._since, self._cpu_before = now, cpu
        if now - self._since < WINDOW_NS:
            return self.share
        used = (cpu - self._cpu_before) / (now - self._since)
        self._since, self._cpu_before = now, cpu
        load = max(used / self._budget.cpu_cores, memory / self._budget.memory_bytes)
        if load > 1:
            self.share = max(self.share * DECREASE_FACTOR, MIN_SHARE)
        elif load < RECOVERY_LOAD:
            self.share = min(self.share * INCREASE_FACTOR, 1.0)
        return self.share
