"""Finds HTTP requests whose model calls are not connected with them, or with others: a verdict on them would be wrong. Pure."""

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
MIN_END_SHARE = 0.3
"""Share of a request's time after its last call, from which it may be in a loop that serves others as well."""
_WRAP_CALL = 'put `with otel_infer.stage("forward")` around the call of a library that is not instrumented, such as scikit-learn, NumPy or ONNX Runtime'


def select_explained(finished: Sequence[RequestRecord], unfollowed: str) -> list[RequestRecord]:
    """Returns the requests to show: inferences, or where `unfollowed` is not empty, the requests without their model calls."""
    without = select_without_model(finished) if unfollowed else []
    return without or [record for record in finished if record.operation or record.failed_in_queue]


def select_without_model(finished: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Returns the requests that lack their model calls; empty if most have them, or there are none."""
    without = [record for record in finished if _lacks_model(record)]
    with_model = _count_with_model(finished)
    is_main = len(without) > _MAIN_SHARE * (len(without) + with_model)
    return without if is_main and len(without) >= MIN_UNFOLLOWED else []


def describe_unfollowed(finished: Sequence[RequestRecord]) -> str:
    """Returns which requests lack their model calls, and what to do; empty if most have them, or there are none."""
    without = select_without_model(finished)
    calls = sum(bool(record.operation) and not _has_parent(record) for record in finished)
    queued = [record for record in without if _has_waited(record)]
    if not without:
        return describe_loop(finished)
    if calls:
        return (
            f"{_describe_requests(without)} contain no call of a model, and {calls:,} calls of a model belong to no request. A worker "
            "takes items in a way that is not followed, such as a list, a deque, a pipe or queue.SimpleQueue. Put "
            "`otel_infer.item()` beside each item, and `with otel_infer.batch(items)` around the call"
        )
    if len(queued) > _MAIN_SHARE * len(without):
        return (
            f"{_describe_requests(queued)} waited in a queue, and no call of a model was seen: {_WRAP_CALL}"
        )
    if _count_with_model(finished):
        return ""
    return (
        f"{_describe_requests(without)} contain no call of a model. If this server calls one, {_WRAP_CALL}. If another server or "
        "a worker of jobs calls it, explain the recording of that process"
    )


def describe_loop(finished: Sequence[RequestRecord]) -> str:
    """Returns that a worker's loop calls the model for several requests in turn; empty if none is seen.

    Its calls belong to the request that it took last: that one has calls after its response began, and the others seem to
    end long after their last call.
    """
    worked = [
        record for record in finished if record.find_stage(semconv.SPAN_FORWARD) and _has_waited(record)
    ]
    late = [record for record in worked if _count_late_calls(record)]
    others = [_measure_end_share(record) for record in worked if not _count_late_calls(record)]
    if not MIN_UNFOLLOWED <= len(late) <= len(others) or np.median(others) < MIN_END_SHARE:
        return ""
    return (
        f"a worker's loop calls the model for several requests in turn: {sum(map(_count_late_calls, late)):,} calls of a model belong to "
        f"{len(late)} requests whose responses had begun, and the other {len(others)} requests end long after their last call. Put "
        "`with otel_infer.step(requests)` around each pass of the loop: docs/engines/custom-loop.md"
    )


def _count_late_calls(record: RequestRecord) -> int:
    """Returns the number of calls of a model that began after the response had begun."""
    responded = record.find_stage(semconv.SPAN_POSTPROCESS)
    calls = [stage.started_at for stage in record.stages if stage.name == semconv.SPAN_FORWARD]
    return 0 if responded is None else sum(at > responded.started_at for at in calls)


def _measure_end_share(record: RequestRecord) -> float:
    """Returns the share of a request's time after its last call of a model."""
    called_until = max(stage.ended_at for stage in record.stages if stage.name == semconv.SPAN_FORWARD)
    return (record.ended_at - called_until) / max(record.duration_ns, 1)


def replace_by_unfollowed(diagnosis: Diagnosis, unfollowed: str) -> Diagnosis:
    """Returns the diagnosis, which has no verdict where `unfollowed` is not empty."""
    return (
        diagnosis._replace(verdict="insufficient", findings=[], note=unfollowed) if unfollowed else diagnosis
    )


def _count_with_model(finished: Sequence[RequestRecord]) -> int:
    return sum(bool(record.operation and record.server_span_id) for record in finished)


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
