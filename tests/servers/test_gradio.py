"""Gradio: an event of its queue is a job of the request that has joined the queue, with its wait and its result."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from otel_infer import semconv
from tests.servers.receiving import spans_of
from tests.servers.requests_sent import Answer, send
from tests.servers.serving import start_module, stop_module
from tests.support.arrivals import counted
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import Server
from tests.support.trees import tree

SIZE = 4
CONSUMER = 5


@pytest.fixture
def server(receiver: OtlpReceiver, tmp_path: Path) -> Iterator[Server]:
    server = start_module(
        "gradio_app", receiver, tmp_path / "log", path="/config", GRADIO_ANALYTICS_ENABLED="False"
    )
    yield server
    stop_module(server)


def call(port: int, name: str, value: float) -> tuple[Answer, str]:
    """Calls a function as a client does: it joins the queue, then reads the stream of the result."""
    answer = send(port, "POST", f"/gradio_api/call/{name}", json.dumps({"data": [value]}).encode())
    assert answer.status == 200, answer
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", f"/gradio_api/call/{name}/{json.loads(answer.body)['event_id']}")
    text = connection.getresponse().read().decode()
    connection.close()
    return answer, text


def lines_of(receiver: OtlpReceiver, answer: Answer, name: str) -> list[str]:
    return tree(spans_of(receiver, answer.trace_id, name), answer.parent_id)


def test_event_is_a_job_of_the_request_that_has_joined_the_queue(
    server: Server, receiver: OtlpReceiver
) -> None:
    route = "POST /gradio_api/call/{api_name}"
    work = ["      queue wait", "      ingress", "      forward", "      postprocess"]
    one, text = call(server.port, "classify", 1.0)
    assert "event: complete" in text
    job = "process classify"
    assert lines_of(receiver, one, job) == [route, f"  {job}", "    inference Scorer", *work]
    streamed, text = call(server.port, "stream", 1.0)
    assert text.count("event: generating") == 3
    assert lines_of(receiver, streamed, "process stream") == [
        route, "  process stream", "    inference Scorer", *work[:2], *["      forward"] * 3, "      postprocess",
    ]  # fmt: skip
    bad, text = call(server.port, "classify", -1.0)
    assert "event: error" in text
    (failed,) = [span for span in spans_of(receiver, bad.trace_id, job) if span["name"] == job]
    assert (failed["kind"], failed["attributes"][semconv.ERROR_TYPE]) == (CONSUMER, "ValueError")


def test_events_of_a_batch_share_the_call(server: Server, receiver: OtlpReceiver) -> None:
    call(server.port, "classify_batch", 1.0)
    with ThreadPoolExecutor(SIZE) as pool:
        answers = [
            answer for answer, _ in pool.map(lambda _: call(server.port, "classify_batch", 1.0), range(SIZE))
        ]
    links = 0
    for answer in answers:
        spans = spans_of(receiver, answer.trace_id, "inference Scorer")
        (request,) = [span for span in spans if span["name"] == "inference Scorer"]
        assert [span["name"] for span in spans].count("forward") == 1
        links += len(request["links"])
    time.sleep(1.5)
    assert links >= 2
    assert receiver.wait_for(lambda it: counted(it) == SIZE + 1, 10), counted(receiver)
