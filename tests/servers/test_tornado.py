"""Responses of Tornado that end before their handler, after it, or elsewhere."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from otel_infer import semconv
from tests.servers.apps.scorer import PAUSE_S
from tests.servers.receiving import spans_of
from tests.servers.requests_sent import make_ids, send
from tests.servers.serving import start_module, stop_module
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import Server


@pytest.fixture
def server(receiver: OtlpReceiver, tmp_path: Path) -> Iterator[Server]:
    server = start_module("tornado_app", receiver, tmp_path / "server.log")
    yield server
    stop_module(server)


def test_a_model_that_is_called_after_the_response_is_a_linked_trace(
    receiver: OtlpReceiver, server: Server
) -> None:
    answer = send(server.port, "POST", "/after")
    (request,) = spans_of(receiver, answer.trace_id)
    assert receiver.wait_for(lambda it: any(span["name"] == "forward" for span in it.spans), 10)
    (inference,) = [span for span in receiver.spans if span["name"] == "inference Scorer"]
    assert inference["trace_id"] != answer.trace_id
    assert [link["trace_id"] for link in inference["links"]] == [answer.trace_id]
    assert request["name"] == "POST /after" and semconv.ERROR_TYPE not in request["attributes"]


def test_a_response_that_is_finished_after_its_handler_ends_the_request(
    receiver: OtlpReceiver, server: Server
) -> None:
    answer = send(server.port, "POST", "/late")
    assert answer.body == b"late"
    spans = spans_of(receiver, answer.trace_id, "forward")
    (request,) = [span for span in spans if span["kind"] == 2]
    assert request["attributes"][semconv.HTTP_RESPONSE_STATUS_CODE] == 200
    assert semconv.ERROR_TYPE not in request["attributes"]
    assert (request["end"] - request["start"]) / 1e9 > PAUSE_S


def test_a_client_that_leaves_after_the_handler_has_returned_ends_the_request(
    receiver: OtlpReceiver, server: Server
) -> None:
    trace_id, _, header = make_ids()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(
            f"POST /late HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\ntraceparent: {header}\r\n\r\n".encode()
        )
        time.sleep(PAUSE_S / 3)
    (request,) = [span for span in spans_of(receiver, trace_id) if span["kind"] == 2]
    assert request["attributes"][semconv.ERROR_TYPE] == "client_disconnect"
    assert (request["end"] - request["start"]) / 1e9 < PAUSE_S * 0.8


def test_a_request_that_is_passed_on_is_recorded_once(receiver: OtlpReceiver, server: Server) -> None:
    answer = send(server.port, "POST", "/inner/health")
    (request,) = spans_of(receiver, answer.trace_id)
    assert request["name"] == "POST /inner/health" and semconv.ERROR_TYPE not in request["attributes"]
