"""Divides the call of a model for a batch of requests, as a step of an engine is divided. Pure."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer.assembly.engine.step_cost import StepCostModel
from otel_infer.assembly.records.request import RequestRecord, Stage


def estimate_batching_time(record: RequestRecord, stage: Stage) -> int:
    """Returns how much longer the call in this stage took because of the other requests in its batch, ns. 0 for other stages."""
    requests, items = record.attributes.get(semconv.BATCH_REQUESTS), stage.attributes.get(semconv.ITEMS)
    if stage.name != semconv.SPAN_FORWARD or not isinstance(requests, int) or not isinstance(items, int):
        return 0
    return estimate_time_for_others(record.call_cost, requests, items, stage.ended_at - stage.started_at)


def estimate_time_for_others(cost: StepCostModel | None, requests: int, items: int, length: int) -> int:
    """Returns how much longer a call of `length` ns took because of the other requests among `requests`, ns.

    The cost of their items is known from calls of this model with other sizes. The time is at most their share of the
    call. It is 0 for a call of one request, and before calls of two sizes were seen.
    """
    if cost is None or not 1 < requests <= items:
        return 0
    others = items - items / requests
    return int(min(cost.per_sequence * others, length * others / items))
