"""Handlers that the server cancels: their clients have not left."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest

from otel_infer import semconv
from tests.servers.receiving import spans_of
from tests.servers.requests_sent import make_ids, send
from tests.servers.serving import start_module, stop_module
from tests.support.otlp_receiver import OtlpReceiver


def find_server_span(receiver: OtlpReceiver, trace_id: str) -> dict[str, Any]:
    (span,) = [span for span in spans_of(receiver, trace_id) if span["kind"] == 2]
    return span["attributes"]


def test_a_response_timeout_of_sanic_has_the_status_that_it_answers(
    receiver: OtlpReceiver, tmp_path: Path
) -> None:
    server = start_module("sanic_app", receiver, tmp_path / "server.log")
    try:
        answer = send(server.port, "POST", "/never")
        attributes = find_server_span(receiver, answer.trace_id)
    finally:
        stop_module(server)
    assert answer.status == attributes[semconv.HTTP_RESPONSE_STATUS_CODE] == 503
    assert attributes[semconv.HTTP_ROUTE] == "/never"
    assert attributes[semconv.ERROR_TYPE] == "timeout"


def test_a_handler_that_a_shutdown_of_aiohttp_cancels_is_cancelled(
    receiver: OtlpReceiver, tmp_path: Path
) -> None:
    server = start_module("aiohttp_app", receiver, tmp_path / "server.log")
    trace_id, _, header = make_ids()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(
            f"POST /never HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\ntraceparent: {header}\r\n\r\n".encode()
        )
        time.sleep(0.3)
        stop_module(server)
    attributes = find_server_span(receiver, trace_id)
    assert attributes[semconv.ERROR_TYPE] == "cancelled"
    assert attributes[semconv.HTTP_ROUTE] == "/never"
    assert semconv.HTTP_RESPONSE_STATUS_CODE not in attributes


@pytest.mark.parametrize("name", ["aiohttp_app", "tornado_app", "sanic_app"])
def test_a_post_with_an_upgrade_header_is_no_websocket(
    receiver: OtlpReceiver, tmp_path: Path, name: str
) -> None:
    server = start_module(name, receiver, tmp_path / "server.log")
    trace_id, _, header = make_ids()
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(
                f"POST /stream HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\ncontent-length: 0\r\n"
                f"traceparent: {header}\r\n\r\n".encode()
            )
            assert b"200" in client.recv(100)
            time.sleep(0.2)
        attributes = find_server_span(receiver, trace_id)
    finally:
        stop_module(server)
    assert attributes[semconv.HTTP_RESPONSE_STATUS_CODE] == 200
