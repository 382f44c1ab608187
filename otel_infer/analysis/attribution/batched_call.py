"""Divides the call of a model for a batch of requests, as a step of an engine is divided. Pure."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer.assembly.records.request import RequestRecord, Stage


def estimate_batching_time(record: RequestRecord, stage: Stage) -> int:
    """Returns how much longer the call took because of the other requests in its batch, ns.

    That is what their items cost by the calls of this model of other sizes, at most their share of the call. 0 for a
    call of one request, and before calls of two sizes were seen.
    """
    requests, items = record.attributes.get(semconv.BATCH_REQUESTS), stage.attributes.get(semconv.ITEMS)
    if record.call_cost is None or not isinstance(requests, int) or not isinstance(items, int):
        return 0
    if stage.name != semconv.SPAN_FORWARD or not 1 < requests <= items:
        return 0
    others = items - items / requests
    share = (stage.ended_at - stage.started_at) * others / items
    return int(min(record.call_cost.per_sequence * others, share))
