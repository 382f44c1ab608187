"""What a decode step costs an engine by the number of sequences in it, fitted from its own log. Pure.

The estimate is `base + per_sequence × sequences`: medians of the steps without a prompt in them, by batch size, and the
median of the slopes between those (Theil-Sen), so that a few stalled steps change nothing. Its error is given beside it:
`spread`, the median absolute deviation of those steps from the estimate, scaled to a standard deviation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

MIN_STEPS = 6
"""Steps without which nothing is estimated."""
MIN_GROUP_STEPS, MAX_GROUPS = 3, 32
_MAD_TO_SIGMA = 1.4826


class StepCostModel(NamedTuple):
    """ns; `steps`: how many the estimate is from."""

    base: float
    per_sequence: float
    spread: float
    steps: int


def cost_model_from_steps(table: Any, held: Any = 0) -> StepCostModel | None:
    """From a step log's columns (lines of `StepRows`, prompt tokens of all in the last): its steps without prompts.

    A step that began before the one before it was done (two are in flight) is counted from there on. `held`: ns of each
    step but the first in which it was held up for a reason that is known.
    """
    step, started, ended, _, size, prompts = table
    lengths = ended[1:] - np.maximum(started[1:], ended[:-1])
    plain = (prompts[1:] == 0) & (ended[1:] > 0) & (ended[:-1] > 0) & (step[1:] - step[:-1] == 1)
    return fit_cost_model(np.maximum(lengths - held, 0)[plain], size[1:][plain])


def fit_cost_model(lengths: Any, sizes: Any) -> StepCostModel | None:
    """From the lengths (ns) and batch sizes of steps without prompts; None where there are too few."""
    if len(lengths) < MIN_STEPS:
        return None
    _, group, often = np.unique(sizes, return_inverse=True, return_counts=True)
    # Sizes that were seen too seldom for a median go together with their neighbours.
    together = max(MIN_GROUP_STEPS, -(-len(lengths) // MAX_GROUPS))
    group = np.unique((np.cumsum(often) - often) // together, return_inverse=True)[1][group]
    order = np.lexsort((lengths, group))
    counts = np.bincount(group)
    begins = np.cumsum(counts) - counts
    middle = lengths[order][begins + counts // 2]
    size = np.add.reduceat(sizes[order], begins) / counts
    slope = _fit_slope(size, middle, counts)
    base = max(float(np.median(np.repeat(middle - slope * size, counts))), 0.0)
    off = np.abs(lengths - (base + slope * sizes))
    return StepCostModel(base, slope, float(np.median(off)) * _MAD_TO_SIGMA, len(lengths))


def _fit_slope(size: Any, middle: Any, counts: Any) -> float:
    """Never negative: a bigger batch is no cheaper. Sizes that were seen once or twice say little."""
    often = counts >= MIN_GROUP_STEPS
    size, middle = size[often], middle[often]
    if len(size) < 2:
        return 0.0
    first, second = np.triu_indices(len(size), 1)
    return max(float(np.median((middle[second] - middle[first]) / (size[second] - size[first]))), 0.0)
