"""Each server on a real socket: the request's tree, its attributes, its errors, its clients that leave, its metrics."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from otel_infer import semconv
from tests.servers.apps.scorer import CHUNKS
from tests.servers.receiving import ERROR, spans_of
from tests.servers.requests_sent import Answer, make_ids, send
from tests.servers.serving import SERVERS, ServedApp, make_command
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import Server, free_port
from tests.support.trees import tree


class Served(NamedTuple):
    """A server that runs, and who receives what it exports."""

    app: ServedApp
    port: int
    receiver: OtlpReceiver

    def send(self, method: str, path: str) -> Answer:
        """Sends a request with a `traceparent` of its own."""
        return send(self.port, method, path)

    def spans_of(self, trace_id: str) -> list[dict[str, Any]]:
        """Returns the spans of a trace, once its SERVER span is there."""
        return spans_of(self.receiver, trace_id)

    def server_span(self, trace_id: str) -> dict[str, Any]:
        (span,) = [span for span in self.spans_of(trace_id) if span["kind"] == 2]
        return span


@pytest.fixture(scope="module", params=SERVERS, ids=lambda name: name.replace(", ", "-"))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    app, port = SERVERS[request.param], free_port()
    log = tmp_path_factory.mktemp("server") / "server.log"
    with OtlpReceiver() as receiver:
        environ = {**receiver.environ, "OTEL_METRIC_EXPORT_INTERVAL": "1000", "PYTHONPATH": str(Path.cwd())}
        with Server(make_command(app, port), port, log, environ) as server:
            yield Served(app, port, receiver)
            assert "hook on" not in server.read_log()


def test_a_post_is_a_child_of_its_caller_with_the_model_below(served: Served) -> None:
    before = count_http(served.receiver, "POST")
    answer = served.send("POST", "/classify/a")
    assert answer.status == 200
    assert served.receiver.wait_for(lambda it: count_http(it, "POST") == before + 1, 10)
    spans = served.spans_of(answer.trace_id)
    assert tree(spans, answer.parent_id) == [
        f"POST {served.app.route}",
        "  inference Scorer",
        "    ingress",
        "    forward",
        "    postprocess",
    ]


def test_its_attributes_are_those_of_the_conventions(served: Served) -> None:
    answer = served.send("POST", "/classify/a?key=canary")
    attributes = served.server_span(answer.trace_id)["attributes"]
    assert attributes[semconv.HTTP_REQUEST_METHOD] == "POST"
    assert attributes[semconv.HTTP_RESPONSE_STATUS_CODE] == 200
    assert attributes[semconv.URL_SCHEME] == "http"
    assert attributes[semconv.HTTP_ROUTE] == served.app.route
    assert semconv.URL_PATH not in attributes  # it has the client's text
    address = served.app.address
    assert attributes.get(semconv.SERVER_ADDRESS) == address
    assert attributes.get(semconv.SERVER_PORT) == (served.port if address else None)
    assert "canary" not in str(served.spans_of(answer.trace_id))


def test_a_get_that_reaches_a_model_has_a_tree(served: Served) -> None:
    answer = served.send("GET", "/score/a")
    assert tree(served.spans_of(answer.trace_id), answer.parent_id) == [
        f"GET {served.app.route.replace('classify', 'score')}",
        "  inference Scorer",
        "    ingress",
        "    forward",
        "    postprocess",
    ]


def test_a_stream_has_each_call_of_the_model(served: Served) -> None:
    answer = served.send("POST", "/stream")
    assert answer.body == b"0\n1\n2\n"
    assert served.server_span(answer.trace_id)["attributes"][semconv.URL_PATH] == "/stream"
    lines = [line.strip() for line in tree(served.spans_of(answer.trace_id), answer.parent_id)]
    assert lines.count("forward") == CHUNKS


def test_an_exception_is_an_error_of_its_type(served: Served) -> None:
    answer = served.send("POST", "/fail")
    assert answer.status == 500
    span = served.server_span(answer.trace_id)
    assert span["attributes"][semconv.HTTP_RESPONSE_STATUS_CODE] == 500
    assert span["attributes"][semconv.ERROR_TYPE] == served.app.error_type


def test_a_client_that_leaves_is_no_error(served: Served) -> None:
    trace_id, _, header = make_ids()
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        client.sendall(
            f"POST /slow HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\ntraceparent: {header}\r\n\r\n".encode()
        )
        client.recv(100)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # closes with a reset
    span = served.server_span(trace_id)
    assert span["status"] != ERROR


def test_a_health_check_has_no_span_and_is_counted(served: Served) -> None:
    before = count_http(served.receiver, "GET")
    assert served.send("GET", "/health").body == b"ok"
    assert served.receiver.wait_for(lambda it: count_http(it, "GET") > before, 10)


def count_http(receiver: OtlpReceiver, method: str) -> int:
    """Returns how many HTTP requests with this method the metrics have counted."""
    last: dict[Any, int] = {}
    for metric in receiver.metrics:
        if metric["name"] == semconv.HTTP_REQUEST_DURATION.name:
            for point in metric["points"]:
                if point["attributes"].get(semconv.HTTP_REQUEST_METHOD) == method:
                    series = (point["start_time_unix_nano"], *sorted(point["attributes"].items()))
                    last[series] = max(last.get(series, 0), point["count"])
    return sum(last.values())
