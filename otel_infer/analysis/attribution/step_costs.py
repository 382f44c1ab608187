"""Divides the run time of decode steps by the cost model of their engine. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from otel_infer.analysis.attribution.step_columns import _UNKNOWN_COST, _DecodeSteps
from otel_infer.assembly.engine.delay_shares import compute_error_margin
from otel_infer.assembly.records.request import RequestRecord


class StepCosts(NamedTuple):
    """The run time of steps by the cost model, as columns in ns; the first five sum to it.

    `interference_ns`, `own_prefill_ns`: the excess over the model in steps with prompts, of other requests
    and of the request. `excess_ns`: the excess in other steps. `error_ns`: the model's error margin.
    """

    own_ns: Any
    batching_ns: Any
    interference_ns: Any
    own_prefill_ns: Any
    excess_ns: Any
    error_ns: Any


def split_by_cost(records: list[RequestRecord], steps: _DecodeSteps, ran: Any) -> StepCosts:
    """Divides the run time of steps by the cost model."""
    # With pipeline parallelism, `step_stride` steps are in flight, and one of them is the request's.
    # It lasts as long as all of them take together.
    strides = [record.step_stride for record in records]
    costs = np.array([record.cost_model or _UNKNOWN_COST for record in records]).T[:3] * strides
    base, per_sequence, spread = steps.repeat_per_step(costs)
    size = steps.size.astype(np.float64)
    # With speculative decoding, a sequence gets several tokens in a step.
    sequences = steps.repeat_per_step(np.array([[max(record.sequences, 1) for record in records]]))[0]
    own_size = np.minimum(np.minimum(steps.tokens, sequences), size)
    typical = base + per_sequence * size
    beyond_model = np.maximum(ran - typical, 0).astype(np.int64)
    interference_ns, own_prefill_ns = _split_by_prompts(steps, beyond_model)
    rest = ran - interference_ns - own_prefill_ns
    own_ns = np.minimum(rest, base + per_sequence * own_size).astype(np.int64)
    rest -= own_ns
    batching_ns = np.minimum(rest, per_sequence * (size - own_size)).astype(np.int64)
    return StepCosts(
        own_ns=own_ns,
        batching_ns=batching_ns,
        interference_ns=interference_ns,
        own_prefill_ns=own_prefill_ns,
        excess_ns=rest - batching_ns,
        error_ns=compute_error_margin(typical, spread),
    )


def _split_by_prompts(steps: _DecodeSteps, beyond_model: Any) -> tuple[Any, Any]:
    """Returns the parts of the excess that are due to other requests' prompts and to own prompts, ns."""
    if not steps.own_prefill.any():  # saves a division, which costs more than the rest of `split_by_cost`
        return beyond_model * (steps.prefill > 0), np.zeros_like(beyond_model)
    prompts = np.maximum(steps.prefill + steps.own_prefill, 1)
    return beyond_model * steps.prefill // prompts, beyond_model * steps.own_prefill // prompts
