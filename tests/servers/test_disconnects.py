"""Clients that leave before the last byte: what is known until then is recorded, and the request ends with them."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from otel_infer import semconv
from tests.servers.receiving import spans_of
from tests.servers.requests_sent import make_ids, send
from tests.servers.serving import SERVERS, start_command, stop_module
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import Server

ASYNC_SERVERS = "aiohttp", "tornado", "sanic", "falcon, uvicorn", "falcon, hypercorn"
LEAVES_AFTER_S = 0.45
"""Of a stream: after its first chunk, before its second. Of a plain response: before it."""
END_S = 0.7
"""A request that was left has ended by then; the handlers run for longer."""


@pytest.fixture(scope="module", params=ASYNC_SERVERS, ids=lambda name: name.replace(", ", "-"))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, OtlpReceiver]]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    with OtlpReceiver() as receiver:
        server = start_command(
            SERVERS[request.param].command, receiver, log, "/health", PYTHONWARNINGS="error::UserWarning"
        )
        yield server, receiver
        stop_module(server)


def leave(port: int, path: str) -> str:
    """Sends a request, leaves after `LEAVES_AFTER_S`, and returns its trace id."""
    trace_id, _, header = make_ids()
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\ntraceparent: {header}\r\n\r\n".encode()
        )
        time.sleep(LEAVES_AFTER_S)
    return trace_id


def find_left(receiver: OtlpReceiver, trace_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the SERVER span of a request that was left, and the span of its inference."""
    spans = spans_of(receiver, trace_id, "inference Scorer")
    (server,) = [span for span in spans if span["kind"] == 2]
    (inference,) = [span for span in spans if span["name"] == "inference Scorer"]
    return server, inference


def test_a_plain_response_that_is_left_has_route_and_address(served: tuple[Server, OtlpReceiver]) -> None:
    """It is also the first request of its server."""
    server, receiver = served
    span, inference = find_left(receiver, leave(server.port, "/wait"))
    attributes = span["attributes"]
    assert span["name"] == "POST /wait" and attributes[semconv.HTTP_ROUTE] == "/wait"
    assert attributes[semconv.ERROR_TYPE] == "client_disconnect"
    assert semconv.HTTP_RESPONSE_STATUS_CODE not in attributes
    assert (attributes[semconv.SERVER_ADDRESS], attributes[semconv.SERVER_PORT]) == ("127.0.0.1", server.port)
    assert LEAVES_AFTER_S * 0.9 < (span["end"] - span["start"]) / 1e9 < END_S
    # The model had answered, and the handler was asleep.
    assert semconv.FAILED_STAGE not in inference["attributes"]


def test_a_stream_that_is_left_has_the_status_that_was_sent(served: tuple[Server, OtlpReceiver]) -> None:
    server, receiver = served
    span, inference = find_left(receiver, leave(server.port, "/slow"))
    attributes = span["attributes"]
    assert attributes[semconv.HTTP_ROUTE] == "/slow"
    assert attributes[semconv.ERROR_TYPE] == "client_disconnect"
    assert attributes[semconv.HTTP_RESPONSE_STATUS_CODE] == 200
    assert attributes[semconv.SERVER_PORT] == server.port
    assert (span["end"] - span["start"]) / 1e9 < END_S
    assert inference["attributes"][semconv.FAILED_STAGE] == semconv.SPAN_POSTPROCESS


def test_a_response_in_full_before_the_connection_closes_is_no_disconnect(
    served: tuple[Server, OtlpReceiver],
) -> None:
    server, receiver = served
    for path in ("/slow", "/wait"):
        answer = send(server.port, "POST", path)  # with `Connection: close`
        assert answer.status == 200
        span, _ = find_left(receiver, answer.trace_id)
        assert semconv.ERROR_TYPE not in span["attributes"]
        assert span["attributes"][semconv.HTTP_RESPONSE_STATUS_CODE] == 200
