"""Estimates how long a stream's tokens take to become text, from its first outputs."""

from __future__ import annotations

from statistics import median

SAMPLED_OUTPUTS = 4
"""Outputs of a stream that are timed. To time each one would cost two clock readings per token."""


class DetokenizeSample:
    """The timed outputs of one stream. `tokens`, `spent_ns`: their sums. `ns_per_token`: of each output."""

    __slots__ = ("ns_per_token", "spent_ns", "tokens")

    def __init__(self) -> None:
        self.tokens = self.spent_ns = 0
        self.ns_per_token: list[float] = []

    def add_output(self, tokens: int, spent_ns: int) -> bool:
        """Adds an output of one or more tokens. Returns whether enough outputs were timed."""
        self.tokens += tokens
        self.spent_ns += spent_ns
        self.ns_per_token.append(spent_ns / tokens)
        return len(self.ns_per_token) >= SAMPLED_OUTPUTS

    def estimate_rest(self, tokens: int) -> int:
        """Returns the ns of those of all `tokens` of the stream that were not timed.

        The median is used, because one wait for the GIL in the sample would count for all tokens.
        """
        later = max(tokens - self.tokens, 0)
        return round(later * median(self.ns_per_token)) if later and self.ns_per_token else 0
