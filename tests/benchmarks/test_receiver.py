"""The benchmarks' receiver counts received metrics and delays its responses."""

from __future__ import annotations

import gzip
import time
import urllib.request
from collections.abc import Iterator

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

from benchmarks.receiver import Receiver


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as running:
        yield running


def metrics() -> bytes:
    """Returns an export request with a counter by reason and a histogram."""
    lost, length = Metric(name="lost"), Metric(name="length")
    for reason, count in (("queue_full", 3), ("refused", 4)):
        point = lost.sum.data_points.add(as_int=count)
        point.attributes.add(key="reason").value.string_value = reason
    length.histogram.data_points.add(count=7, sum=1.5)
    request = ExportMetricsServiceRequest()
    request.resource_metrics.add().scope_metrics.add().metrics.extend([lost, length])
    return request.SerializeToString()


def post(receiver: Receiver, body: bytes, **headers: str) -> float:
    """Returns the response time (s)."""
    began = time.perf_counter()
    request = urllib.request.Request(f"{receiver.endpoint}/v1/metrics", body, headers)
    with urllib.request.urlopen(request, timeout=30):
        return time.perf_counter() - began


def test_the_last_metrics_are_counted_by_attributes(receiver: Receiver) -> None:
    assert receiver.read_counts()["metrics"] == {}
    post(receiver, b"")
    post(receiver, gzip.compress(metrics()), **{"Content-Encoding": "gzip"})
    for _ in range(2):  # a read does not remove metrics, unlike spans
        assert receiver.read_counts()["metrics"] == {
            "lost": {"queue_full": 3, "refused": 4},
            "length": {"": 7},
        }


def test_responses_are_delayed_as_configured(receiver: Receiver) -> None:
    receiver.delay_responses(0.3)
    assert post(receiver, metrics()) >= 0.3
    assert receiver.read_counts()["metrics"]
