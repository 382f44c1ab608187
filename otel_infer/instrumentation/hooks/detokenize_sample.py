"""Estimates how long a stream's tokens take to become text, from its first outputs."""

from __future__ import annotations

from statistics import median

SAMPLED_OUTPUTS = 8
"""Outputs of a stream that are timed. To time each one would cost two clock readings per token."""


class DetokenizeSample:
    """The timed outputs of one stream, as (tokens, ns) each. `tokens`: their sum."""

    __slots__ = ("outputs", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.outputs: list[tuple[int, int]] = []

    def add_output(self, tokens: int, spent_ns: int) -> bool:
        """Adds an output of one or more tokens. Returns whether enough outputs were timed."""
        self.tokens += tokens
        self.outputs.append((tokens, spent_ns))
        return len(self.outputs) >= SAMPLED_OUTPUTS

    @property
    def spent_ns(self) -> int:
        """Returns the sum of their times."""
        return sum([spent_ns for _, spent_ns in self.outputs])

    def estimate_rest(self, tokens: int) -> int:
        """Returns the ns of those of all `tokens` of the stream that were not timed.

        The median is used, because one wait for the GIL in the sample would count for all tokens.
        """
        later = max(tokens - self.tokens, 0)
        ns_per_token = [spent_ns / timed for timed, spent_ns in self.outputs]
        return round(later * median(ns_per_token)) if ns_per_token else 0
