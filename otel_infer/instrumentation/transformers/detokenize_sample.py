"""Estimates how long a stream's tokens take to become text, from its first tokens."""

from __future__ import annotations

SAMPLED_TOKENS = 4
"""Tokens of a stream whose detokenizing is timed. To time each one would cost two clock readings per token."""


class DetokenizeSample:
    """The timed calls of one stream."""

    __slots__ = ("_sampled_ns", "_sampled_tokens")

    def __init__(self) -> None:
        self._sampled_ns = self._sampled_tokens = 0

    def add(self, tokens: int, taken_ns: int) -> None:
        """Adds a call. `tokens`: those that the stream has delivered by now."""
        self._sampled_ns += taken_ns
        self._sampled_tokens = tokens

    def estimate(self, tokens: int) -> int:
        """Returns the ns for all `tokens` of the stream; exact where each was timed."""
        sampled = self._sampled_tokens
        return self._sampled_ns * max(tokens, sampled) // sampled if sampled else 0
