"""What an OTLP receiver has received, request by request."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from otel_infer import semconv
from tests.support.otlp_receiver import OtlpReceiver


def requests_of(receiver: OtlpReceiver) -> dict[str, list[dict[str, Any]]]:
    """Returns the request spans by trace id."""
    found: dict[str, list[dict[str, Any]]] = {}
    for span in receiver.spans:
        if span["kind"] == 1 and semconv.OPERATION_NAME in span["attributes"]:
            found.setdefault(span["trace_id"], []).append(span)
    return found


def arrived(receiver: OtlpReceiver, *traces: str, timeout: float = 15.0) -> list[dict[str, Any]]:
    """Waits for the request spans of these traces; returns the single span of each."""
    assert receiver.wait_for(lambda it: set(traces) <= set(requests_of(it)), timeout), (
        f"{len(set(traces) - set(requests_of(receiver)))} of {len(traces)} requests have not arrived"
    )
    time.sleep(0.1)
    return [span for trace_id in traces for span in requests_of(receiver)[trace_id]]


def assert_nothing_came_twice(receiver: OtlpReceiver) -> None:
    ids = Counter((span["trace_id"], span["span_id"]) for span in receiver.spans)
    assert [] == [span_id for span_id, times in ids.items() if times > 1]


def counted(receiver: OtlpReceiver) -> int:
    """Returns how many requests the metrics have counted: the last value of each series, summed."""
    last: dict[Any, int] = {}
    for metric in receiver.metrics:
        if metric["name"] == semconv.REQUEST_DURATION.name:
            for point in metric["points"]:
                series = (point["start_time_unix_nano"], *sorted(point["attributes"].items()))
                last[series] = max(last.get(series, 0), point["count"])
    return sum(last.values())


def lost(receiver: OtlpReceiver) -> dict[str, float]:
    """Returns the losses by reason, as last exported."""
    losses: dict[str, float] = {}
    for metric in receiver.metrics:
        if metric["name"] == semconv.SELF_LOST.name:
            losses = {point["attributes"][semconv.LOSS_REASON]: point["value"] for point in metric["points"]}
    return losses
