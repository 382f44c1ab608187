"""Estimates how long a stream's tokens take to become text, from its first outputs."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from otel_infer.ringbuffer.native import native

SAMPLED_OUTPUTS = 4
"""Outputs of a stream that are timed. To time each one would cost two clock readings per token."""


class PythonOutputSums:
    """The fields of a sample; compiled code reads and writes them as well, where it was built."""

    __slots__ = ("ns_per_token", "spent_ns", "tokens")

    tokens: int
    spent_ns: int
    ns_per_token: list[float]


if TYPE_CHECKING or native is None:
    OutputSums = PythonOutputSums
else:
    OutputSums = native.OutputSums


class DetokenizeSample(OutputSums):
    """The timed outputs of one stream. `tokens`, `spent_ns`: their sums. `ns_per_token`: of each output."""

    __slots__ = ()

    def __init__(self) -> None:
        self.tokens = self.spent_ns = 0
        self.ns_per_token = []

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
