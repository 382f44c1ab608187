"""Returns the slope of a series with its confidence interval. Pure.

The slope is the median of the slopes between all pairs of points (Theil-Sen). Its interval is that of Sen (1968), by the distribution
of Kendall's S. Both depend on order alone, so a spike is one point among many. Neighbouring samples of memory are correlated, which
would make the interval too narrow. So a point is the median of a block of samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

BLOCKS = 20
MIN_BLOCKS = 5
Z = 1.959963984540054
"""Two-sided 95 %."""


class Slope(NamedTuple):
    """Per unit of x: the estimate and its two-sided 95 % interval. NaN = too few points."""

    value: float
    low: float
    high: float

    def scale_by(self, factor: float) -> Slope:
        """Returns the slope in another unit; `factor` is positive."""
        return Slope(*(number * factor for number in self))


def fit_slope(x: Sequence[float], y: Sequence[float], blocks: int = BLOCKS) -> Slope:
    """Returns the growth of `y` with `x`, which is sorted."""
    at, level = (_reduce_to_blocks(values, blocks) for values in (x, y))
    count = len(at)
    if count < MIN_BLOCKS:
        return Slope(*[float("nan")] * 3)
    first, second = np.triu_indices(count, 1)
    pairs = np.sort((level[second] - level[first]) / (at[second] - at[first]))
    reach = Z * np.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = int(np.floor((len(pairs) - reach) / 2)) - 1
    high = int(np.ceil((len(pairs) + reach) / 2))
    ends = (pairs[low] if low >= 0 else -np.inf, pairs[high] if high < len(pairs) else np.inf)
    return Slope(float(np.median(pairs)), float(ends[0]), float(ends[1]))


def _reduce_to_blocks(values: Sequence[float], blocks: int) -> np.ndarray:
    """Returns the medians of about `blocks` blocks of one length. A remainder at the beginning is dropped."""
    length = max(len(values) // blocks, 1)
    column = np.asarray(values, float)[len(values) % length :]
    return np.median(column.reshape(-1, length), axis=1)
