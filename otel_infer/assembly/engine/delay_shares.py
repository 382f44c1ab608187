"""The shares of each cause in the excess of the steps that a sample of their thread covers. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from otel_infer.assembly.engine.step_cost import StepCostModel
from otel_infer.ringbuffer.events import ThreadSeen

_ERROR_SIGMAS, _MIN_ERROR_SHARE = 3.0, 0.05


class DelayShares(NamedTuple):
    """Shares of a step's excess, as numbers or columns; `blocked` and `longer` are shares of the remaining excess."""

    starved: Any
    faulted: Any
    blocked: Any
    longer: Any


NO_DELAY = DelayShares(0.0, 0.0, 0.0, 0.0)


def compute_error_margin(typical: Any, spread: Any) -> Any:
    """Returns the error of the estimate, ns: three times its spread, at least a twentieth of the estimate."""
    return np.maximum(_ERROR_SIGMAS * spread, _MIN_ERROR_SHARE * typical)


class SampledSteps(NamedTuple):
    """Steps as columns. `without_prompts`: whether a step has no prompt in it."""

    begins: Any
    ends: Any
    size: Any
    without_prompts: Any


def time_off_cpu(sample: ThreadSeen) -> int:
    """Returns how long the thread was on no CPU, ns."""
    return max(sample.at - sample.since - sample.ran_ns, 0)


class ExcessTime(NamedTuple):
    """The excess of the steps in a sample over their estimate; ns.

    `stalls`: the part of it from stalled steps without prompts. `usual`: the time of the steps without
    excess. `without_prompts`: no step has prompts, whose cost is known less well.
    """

    total: float
    stalls: float
    usual: float
    without_prompts: bool


def compute_excess(sample: ThreadSeen, steps: SampledSteps, cost_model: StepCostModel) -> ExcessTime | None:
    """Returns the excess of the steps in a sample; None where there are none."""
    inside = (steps.begins < sample.at) & (steps.ends > sample.since)
    if not inside.any():
        return None
    begins, ends, size, plain = (column[inside] for column in steps)
    lengths = np.maximum(ends - begins, 1)
    part = (np.minimum(ends, sample.at) - np.maximum(begins, sample.since)) / lengths
    typical = np.minimum(cost_model.base + cost_model.per_sequence * size, lengths)
    excess = lengths - typical
    # Only steps without prompts count as stalls, because a prompt's time on the device is no lock.
    stalls = (excess * part)[(excess > compute_error_margin(typical, cost_model.spread)) & plain]
    usual = np.where(plain, typical, lengths) * part
    return ExcessTime(
        float((excess * part).sum()), float(stalls.sum()), float(usual.sum()), bool(plain.all())
    )


def compute_shares(sample: ThreadSeen, fault_ns: float, excess: ExcessTime | None) -> DelayShares:
    """Returns the share of each cause in the excess of the steps in this sample."""
    if excess is None or excess.total <= 0:
        return NO_DELAY
    starved = min(sample.waited_ns, excess.total)
    faulted = min(fault_ns, excess.total - starved)
    remaining = excess.stalls * (1 - (starved + faulted) / excess.total)
    longer = max(sample.ran_ns - excess.usual - faulted, 0.0)
    slept = max(time_off_cpu(sample) - sample.waited_ns, 0)
    blocked = min(max(remaining - longer, 0.0), slept)
    longer = min(longer, max(remaining - blocked, 0.0))
    of_remaining = (blocked / remaining, longer / remaining) if remaining else (0.0, 0.0)
    return DelayShares(starved / excess.total, faulted / excess.total, *of_remaining)
