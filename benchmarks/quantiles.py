"""Quantiles read off a histogram the way Prometheus' `histogram_quantile` does, and exact ones to hold them against. Pure.

The rank of quantile q among n values is q × n, in both: so the exact value lies in the bucket that is read, and an
estimate is off by what the bucket is wide, at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate


def exact(ordered: Sequence[float], q: float) -> float:
    """The smallest of these values, in order, that at least the share `q` of them do not exceed."""
    return float(ordered[max(math.ceil(q * len(ordered)) - 1, 0)])


def explicit(bounds: Sequence[float], counts: Sequence[int], q: float) -> float:
    """Linear inside the bucket, the first of which begins at 0; above the last bound nothing is known but that bound."""
    rank, bucket, below = _found(counts, q)
    if bucket >= len(bounds):
        return float(bounds[-1])
    begin = bounds[bucket - 1] if bucket else 0.0
    return begin + (bounds[bucket] - begin) * (rank - below) / counts[bucket]


def exponential(scale: int, offset: int, counts: Sequence[int], zeroes: int, q: float) -> float:
    """Linear in the logarithm inside the bucket, as for native histograms since Prometheus 3."""
    rank, bucket, below = _found([zeroes, *counts], q)
    if bucket == 0:
        return 0.0
    return base_of(scale) ** (offset + bucket - 1 + (rank - below) / counts[bucket - 1])


def base_of(scale: int) -> float:
    """How many times a bucket's upper bound is its lower one."""
    return float(2.0 ** (2.0**-scale))


def error(estimate: float, truth: float) -> float:
    """As a share of the truth, with its sign."""
    return estimate / truth - 1


def _found(counts: Sequence[int], q: float) -> tuple[float, int, int]:
    """The rank, the bucket it falls into, and how many values lie below that bucket."""
    rank = q * sum(counts)
    for bucket, upto in enumerate(accumulate(counts)):
        if upto >= rank and counts[bucket]:
            return rank, bucket, upto - counts[bucket]
    raise ValueError("an empty histogram has no quantiles")
