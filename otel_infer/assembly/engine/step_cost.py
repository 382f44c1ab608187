"""The step cost model: the length of a decode step by its number of sequences, fitted to the step log. Pure.

The estimate is `base + per_sequence × sequences`. `per_sequence` is the median of the slopes between the
median lengths of each batch size (Theil-Sen), over steps without prompts. Medians make it robust against a
few stalled steps. `spread` is its error: the median absolute deviation of those steps, scaled to a standard
deviation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

MIN_STEPS = 6
"""Fewest steps for an estimate."""
MIN_GROUP_STEPS, MAX_GROUPS = 3, 32
_MAD_TO_SIGMA = 1.4826
ANY_SIZE = 1 << 30
"""Largest batch of a model that was not fitted to steps."""


class StepCostModel(NamedTuple):
    """The cost of a step without prompts, ns. `steps`: number of steps it was fitted to; `max_size`: the largest batch."""

    base: float
    per_sequence: float
    spread: float
    steps: int
    max_size: int = ANY_SIZE


def cost_model_from_steps(table: Any, delays: Any = 0) -> StepCostModel | None:
    """Returns the model fitted to the steps without prompts in a step log; None if they are too few.

    `table`: columns of a `StepTable`. Two steps can be in flight: a step that began before its predecessor
    was done counts from the predecessor's end. `delays`: for each step but the first, its delay of known
    cause, ns.
    """
    step, started, ended, _, size, prompts = table
    lengths = ended[1:] - np.maximum(started[1:], ended[:-1])
    plain = (prompts[1:] == 0) & (ended[1:] > 0) & (ended[:-1] > 0) & (step[1:] - step[:-1] == 1)
    return fit_cost_model(np.maximum(lengths - delays, 0)[plain], size[1:][plain])


def fit_cost_model(lengths: Any, sizes: Any) -> StepCostModel | None:
    """Returns the model fitted to lengths (ns) and batch sizes of steps; None for fewer than `MIN_STEPS`."""
    if len(lengths) < MIN_STEPS:
        return None
    _, group, often = np.unique(sizes, return_inverse=True, return_counts=True)
    # Batch sizes with too few steps for a median are grouped with their neighbours.
    together = max(MIN_GROUP_STEPS, -(-len(lengths) // MAX_GROUPS))
    group = np.unique((np.cumsum(often) - often) // together, return_inverse=True)[1][group]
    order = np.lexsort((lengths, group))
    counts = np.bincount(group)
    begins = np.cumsum(counts) - counts
    middle = lengths[order][begins + counts // 2]
    size = np.add.reduceat(sizes[order], begins) / counts
    slope = _fit_slope(size, middle, counts)
    base = max(float(np.median(np.repeat(middle - slope * size, counts))), 0.0)
    deviations = np.abs(lengths - (base + slope * sizes))
    spread = float(np.median(deviations)) * _MAD_TO_SIGMA
    return StepCostModel(base, slope, spread, len(lengths), int(sizes.max()))


def _fit_slope(size: Any, middle: Any, counts: Any) -> float:
    """Returns the cost per sequence, ns; never negative, because a bigger batch is no cheaper.

    Groups of fewer than `MIN_GROUP_STEPS` steps are ignored, because their medians are noise.
    """
    often = counts >= MIN_GROUP_STEPS
    size, middle = size[often], middle[often]
    if len(size) < 2:
        return 0.0
    first, second = np.triu_indices(len(size), 1)
    return max(float(np.median((middle[second] - middle[first]) / (size[second] - size[first]))), 0.0)
