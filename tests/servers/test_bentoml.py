"""BentoML: batches of its dispatcher, and services that depend on each other, are parts of the request."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from otel_infer import semconv
from tests.servers.receiving import spans_of
from tests.servers.requests_sent import Answer, make_ids, send
from tests.servers.serving import APPS, start_command, stop_module
from tests.support.arrivals import counted
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import Server
from tests.support.trees import tree

pytest.importorskip("bentoml", reason="BentoML is not installed")

COMMAND = ("-m", "bentoml", "serve", "--host", "127.0.0.1", "--port", "{port}", f"{APPS}.bentoml_app:Scores")
REQUEST, WORK = "  inference Scorer", ["    ingress", "    forward", "    postprocess"]
SIZE = 5
SERVER = 2


def start_bentoml(receiver: OtlpReceiver, log: Path, **variables: str) -> Server:
    return start_command(COMMAND, receiver, log, "/readyz", BENTOML_DO_NOT_TRACK="True", **variables)


@pytest.fixture
def server(receiver: OtlpReceiver, tmp_path: Path) -> Iterator[Server]:
    server = start_bentoml(receiver, tmp_path / "log")
    yield server
    stop_module(server)


def lines_of(receiver: OtlpReceiver, answer: Answer, name: str = "") -> list[str]:
    return tree(spans_of(receiver, answer.trace_id, name), answer.parent_id)


def test_request_is_followed_through_batches_and_services(server: Server, receiver: OtlpReceiver) -> None:
    port = server.port
    single = send(port, "POST", "/classify", b'{"rows": 2}')
    stream = send(port, "POST", "/stream", b'{"pause_s": 0}')
    bad = send(port, "POST", "/classify", b'{"rows": -1}')
    depend = send(port, "POST", "/depend", b'{"rows": 2}')
    with ThreadPoolExecutor(SIZE) as pool:
        batched = list(pool.map(lambda _: send(port, "POST", "/batched", b'{"values": [1.0]}'), range(SIZE)))
    assert [answer.status for answer in (single, stream, bad, depend)] == [200, 200, 500, 200]
    assert lines_of(receiver, single, REQUEST.strip()) == ["POST /classify", REQUEST, *WORK]
    first, second, *stages = lines_of(receiver, stream, REQUEST.strip())
    assert [first, second] == ["POST /stream", REQUEST]
    assert sorted(stages) == sorted([*WORK, *["    forward"] * 2])
    assert lines_of(receiver, bad) == ["POST /classify"]
    below = [f"  {line}" for line in (REQUEST, *WORK)]
    assert lines_of(receiver, depend, REQUEST.strip()) == ["POST /depend", "  POST /score", *below]
    check_batches(receiver, batched)
    assert receiver.wait_for(lambda it: counted(it) == 3 + SIZE, 10), counted(receiver)


def check_batches(receiver: OtlpReceiver, answers: list[Answer]) -> None:
    """The first request is called for alone. The others wait meanwhile, and are the next batch."""
    sizes, links, waits = [], 0, set()
    for answer in answers:
        assert answer.status == 200
        spans = spans_of(receiver, answer.trace_id, "inference Scorer")
        sizes.append(find_span(spans, "forward")["attributes"][semconv.ITEMS])
        links += len(find_span(spans, "inference Scorer")["links"])
        waits |= {span["name"] for span in spans}
    assert max(sizes) > 1
    assert links >= 2 * (max(sizes) - 1)
    assert {"queue wait", "batch wait"} <= waits


def find_span(spans: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (span,) = [span for span in spans if span["name"] == name]
    return span


def test_client_that_leaves_is_a_client_disconnect(server: Server, receiver: OtlpReceiver) -> None:
    trace_id, _, header = make_ids()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    headers = {"traceparent": header, "content-type": "application/json"}
    connection.request("POST", "/stream", b'{"pause_s": 1.0}', headers)
    response = connection.getresponse()
    response.read(2)
    response.close()
    connection.close()
    span = find_span(spans_of(receiver, trace_id, "inference Scorer"), "inference Scorer")
    assert span["attributes"][semconv.ERROR_TYPE] == "client_disconnect"
    check_one_server(server, receiver)


def check_one_server(server: Server, receiver: OtlpReceiver) -> None:
    """Each service runs in a process of its own."""
    assert send(server.port, "POST", "/depend", b'{"rows": 2}').status == 200
    stop_module(server)
    time.sleep(2)  # the sidecar reports what died, and ends
    starts = [span for span in receiver.spans if span["name"] == semconv.SPAN_SERVER_START]
    assert [span["attributes"].get(semconv.ERROR_TYPE, "") for span in starts] == [""]
    assert len({span["resource"]["service.instance.id"] for span in receiver.spans}) == 1


def test_spans_of_bentoml_are_in_the_same_trace(receiver: OtlpReceiver, tmp_path: Path) -> None:
    endpoint = receiver.environ["OTEL_EXPORTER_OTLP_ENDPOINT"]
    settings = (
        'exporter_type="otlp"',
        "sample_rate=1.0",
        'otlp.protocol="http"',
        f'otlp.endpoint="{endpoint}/v1/traces"',
    )
    options = " ".join(
        f"services.{name}.tracing.{each}" for name in ("Scores", "Runner") for each in settings
    )
    variables = {"BENTOML_CONFIG_OPTIONS": options, "OTEL_BSP_SCHEDULE_DELAY": "200"}
    server = start_bentoml(receiver, tmp_path / "log", **variables)
    try:
        answer = send(server.port, "POST", "/depend", b'{"rows": 2}')
        spans_of(receiver, answer.trace_id, "POST /score http send")
        spans = spans_of(receiver, answer.trace_id, "inference Scorer")
        by_id = {span["span_id"]: span for span in spans}
        lonely = [span for span in spans if span["parent_span_id"] not in by_id]
        assert [span["parent_span_id"] for span in lonely] == [answer.parent_id]
        servers = [span for span in spans if span["kind"] == SERVER]
        assert [span["scope"]["name"] for span in servers] == ["otel_infer"] * 2  # one in each service
        assert {span["scope"]["name"] for span in spans} > {"otel_infer"}
    finally:
        stop_module(server)
