"""Limits a rate: a bucket that fills with time and that each permitted item empties. Pure."""

from __future__ import annotations


class TokenBucket:
    """A bucket that starts full. Instants are ns, from any clock; an earlier one than the last adds nothing."""

    def __init__(self, capacity: float) -> None:
        self.tokens = float(capacity)
        self._refilled_at = 0

    def refill(self, at: int, per_second: float, capacity: float) -> None:
        """Adds the tokens of the time since the last call, up to `capacity`."""
        if self._refilled_at:
            added = max(at - self._refilled_at, 0) * per_second / 1e9
            self.tokens = min(capacity, self.tokens + added)
        self._refilled_at = max(at, self._refilled_at)
