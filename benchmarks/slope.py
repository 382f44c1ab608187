"""How fast something grows, with how sure that is. Pure.

The slope is the median of the slopes between all pairs of points (Theil–Sen), its interval that of Sen (1968), by the
distribution of Kendall's S. Both care for order alone, so that a step or a spike is one point among many. Neighbouring
samples of a process's memory are alike, and the interval would take each for news; so samples are first put together into
blocks, and a block is the median of its samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

BLOCKS = 20
FEWEST = 5
"""Blocks below which nothing is said."""
Z = 1.959963984540054
"""Two-sided 95 %."""


class Slope(NamedTuple):
    """Per unit of x: the estimate and its two-sided 95 % interval; NaN where there are too few points."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> Slope:
        """The same in another unit; `factor` is positive."""
        return Slope(*(number * factor for number in self))


def slope(x: Sequence[float], y: Sequence[float], blocks: int = BLOCKS) -> Slope:
    """How fast `y` grows with `x`, which is in order."""
    at, held = (_blocks(values, blocks) for values in (x, y))
    count = len(at)
    if count < FEWEST:
        return Slope(*[float("nan")] * 3)
    first, second = np.triu_indices(count, 1)
    pairs = np.sort((held[second] - held[first]) / (at[second] - at[first]))
    reach = Z * np.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = int(np.floor((len(pairs) - reach) / 2)) - 1
    high = int(np.ceil((len(pairs) + reach) / 2))
    ends = (pairs[low] if low >= 0 else -np.inf, pairs[high] if high < len(pairs) else np.inf)
    return Slope(float(np.median(pairs)), float(ends[0]), float(ends[1]))


def _blocks(values: Sequence[float], blocks: int) -> np.ndarray:
    """Medians of about as many blocks of neighbours, all of one length; what is left over at the beginning is left out."""
    length = max(len(values) // blocks, 1)
    column = np.asarray(values, float)[len(values) % length :]
    return np.median(column.reshape(-1, length), axis=1)
