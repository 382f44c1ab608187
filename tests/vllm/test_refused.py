"""Requests that infer nothing: refused after the tokenizer, only tokenized, or a health check."""

from __future__ import annotations

import http.client
from collections import Counter
from typing import Any

import pytest

from otel_infer import semconv
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import Server
from tests.vllm.asking import CHAT, prompt, send_request
from tests.vllm.conftest import Serve

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
MESSAGES = [{"role": "user", "content": prompt(8)}]
TOKENIZE = "/tokenize"


@pytest.fixture(scope="module")
def server(serve: Serve) -> Server:
    return serve(environ={"OTEL_METRIC_EXPORT_INTERVAL": "500"})


def count_points(receiver: OtlpReceiver, metric: semconv.Metric, *keys: str) -> Counter[tuple[Any, ...]]:
    """Returns the last counts of a metric by these attributes."""
    counts: Counter[tuple[Any, ...]] = Counter()
    for received in [received for received in receiver.metrics if received["name"] == metric.name][-1:]:
        for point in received["points"]:
            counts[tuple(point["attributes"].get(key) for key in keys)] += point["count"]
    return counts


def test_only_inferences_are_in_the_request_duration(server: Server, receiver: OtlpReceiver) -> None:
    long = [{"role": "user", "content": prompt(100_000)}]
    assert send_request(server.port, CHAT, messages=MESSAGES, max_tokens=2).status == 200
    assert send_request(server.port, CHAT, messages=long, max_tokens=2).status == 400
    assert send_request(server.port, CHAT, messages=MESSAGES, max_tokens=-1).status == 400
    assert send_request(server.port, TOKENIZE, prompt="time and time again").status == 200
    assert send_request(server.port, TOKENIZE, messages=MESSAGES).status == 200
    health = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    health.request("GET", "/health")
    assert health.getresponse().status == 200
    health.close()

    http_keys = (semconv.HTTP_REQUEST_METHOD, semconv.HTTP_ROUTE, semconv.HTTP_RESPONSE_STATUS_CODE)
    expected = {("POST", CHAT, 200): 1, ("POST", CHAT, 400): 2, ("POST", TOKENIZE, 200): 2}

    def is_complete(it: OtlpReceiver) -> bool:
        counts = count_points(it, semconv.HTTP_REQUEST_DURATION, *http_keys)
        # The server's start polled its health, once there were rings.
        return counts["GET", "/health", 200] >= 1 and expected.items() <= counts.items()

    assert receiver.wait_for(is_complete, 15), count_points(
        receiver, semconv.HTTP_REQUEST_DURATION, *http_keys
    )
    keys = semconv.OPERATION_NAME, semconv.REQUEST_MODEL, semconv.ERROR_TYPE
    assert count_points(receiver, semconv.REQUEST_DURATION, *keys) == {("chat", "tiny", None): 1}
