"""Finds HTTP requests whose model calls are not connected with them, so that a verdict on the calls is none on the requests. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from otel_infer import semconv
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.ringbuffer import events

if TYPE_CHECKING:
    from otel_infer.analysis.diagnosis.rules import Diagnosis

MIN_UNFOLLOWED, _MAIN_SHARE = 3, 0.5
"""Requests without a call, and their share of those with a body and those with a call, from which there is no verdict."""
_METHODS_WITH_INPUT = frozenset(("POST", "PUT", "PATCH"))
_NS_PER_MS = 1_000_000


def describe_unfollowed(finished: Sequence[RequestRecord]) -> str:
    """Returns which requests lack their model calls, and what to do; empty if most have them, or there are none."""
    without = [record for record in finished if _lacks_model(record)]
    with_model = sum(bool(record.operation and record.server_span_id) for record in finished)
    calls = sum(bool(record.operation) and not _has_parent(record) for record in finished)
    queued = [record for record in without if _has_waited(record)]
    if len(without) < MIN_UNFOLLOWED or len(without) <= _MAIN_SHARE * (len(without) + with_model):
        return ""
    if calls:
        return (
            f"{_describe_requests(without)} contain no call of a model, and {calls:,} calls of a model belong to no request. A worker "
            "takes items in a way that is not followed, such as a list, a deque, a pipe or queue.SimpleQueue. Put "
            "`otel_infer.item()` beside each item, and `with otel_infer.batch(items)` around the call"
        )
    if len(queued) > _MAIN_SHARE * len(without):
        return (
            f"{_describe_requests(queued)} waited in a queue, and no call of a model was seen. Put "
            '`with otel_infer.stage("forward")` around the call of a library that is not instrumented, such as NumPy or ONNX Runtime'
        )
    return ""


def replace_by_unfollowed(diagnosis: Diagnosis, unfollowed: str) -> Diagnosis:
    """Returns the diagnosis, which has no verdict where `unfollowed` is not empty."""
    return (
        diagnosis._replace(verdict="insufficient", findings=[], note=unfollowed) if unfollowed else diagnosis
    )


def _lacks_model(record: RequestRecord) -> bool:
    method = record.attributes.get(semconv.HTTP_REQUEST_METHOD) or record.name
    return not record.operation and method in _METHODS_WITH_INPUT and record.outcome == events.OK


def _has_parent(record: RequestRecord) -> bool:
    return bool(record.server_span_id or record.parent_span_id or record.remote_parent)


def _has_waited(record: RequestRecord) -> bool:
    return any(stage.name == semconv.SPAN_QUEUE_WAIT for stage in record.stages)


def _describe_requests(records: Sequence[RequestRecord]) -> str:
    median, high = np.percentile([record.duration_ns / _NS_PER_MS for record in records], (50, 95))
    return f"{len(records):,} HTTP requests (p50 {median:.0f} ms, p95 {high:.0f} ms)"
