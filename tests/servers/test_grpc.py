"""gRPC servers, threaded and asyncio, with a real client."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from otel_infer import semconv
from tests.servers.receiving import ERROR, spans_of
from tests.servers.requests_sent import make_ids
from tests.servers.serving import ServedApp, make_command
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import Server, free_port
from tests.support.trees import tree


class Served(NamedTuple):
    """A server that runs, a channel to it, and who receives what it exports."""

    channel: grpc.Channel
    receiver: OtlpReceiver

    def call(self, method: str, kind: str = "unary_unary", request: Any = b"x") -> tuple[Any, str, str]:
        """Calls a method. Returns its response (a list of a stream's, or the status code), trace id and parent id."""
        trace_id, parent_id, header = make_ids()
        metadata = (("traceparent", header),)
        function = getattr(self.channel, kind)(f"/toy.Scorer/{method}")
        try:
            response = function(request, metadata=metadata, timeout=20)
            response = list(response) if kind.endswith("stream") else response
        except grpc.RpcError as error:
            response = error.code()
        return response, trace_id, parent_id


class GrpcServer(Server):
    """A server that is ready once a channel to it is."""

    def responds(self) -> bool:
        with grpc.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            try:
                grpc.channel_ready_future(channel).result(timeout=1)
            except grpc.FutureTimeoutError:
                return False
        return True


@pytest.fixture(scope="module", params=["threads", "aio"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    port, log = free_port(), tmp_path_factory.mktemp("grpc") / "server.log"
    more = ("aio",) if request.param == "aio" else ()
    app = ServedApp(("-m", "tests.servers.apps.grpc_app", "{port}", *more), "")
    with OtlpReceiver() as receiver:
        environ = {**receiver.environ, "OTEL_METRIC_EXPORT_INTERVAL": "1000", "PYTHONPATH": str(Path.cwd())}
        with GrpcServer(make_command(app, port), port, log, environ):
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                yield Served(channel, receiver)


def test_a_call_is_a_child_of_its_caller_with_the_model_below(served: Served) -> None:
    response, trace_id, parent_id = served.call("Classify")
    assert response.startswith(b"[[")
    spans = spans_of(served.receiver, trace_id)
    assert tree(spans, parent_id) == [
        "toy.Scorer/Classify", "  inference Scorer", "    ingress", "    forward", "    postprocess",
    ]  # fmt: skip
    (server,) = [span for span in spans if span["kind"] == 2]
    assert server["attributes"] == {
        semconv.RPC_SYSTEM_NAME: "grpc",
        semconv.RPC_METHOD: "toy.Scorer/Classify",
        semconv.RPC_RESPONSE_STATUS_CODE: "OK",
    }


def test_a_stream_of_responses_has_each_call_of_the_model(served: Served) -> None:
    response, trace_id, parent_id = served.call("Stream", "unary_stream")
    assert response == [b"0", b"1", b"2"]
    lines = tree(spans_of(served.receiver, trace_id), parent_id)
    assert lines[:2] == ["toy.Scorer/Stream", "  inference Scorer"]
    assert sum("forward" in line for line in lines) >= 1


def test_a_stream_of_requests_is_one_call(served: Served) -> None:
    response, trace_id, parent_id = served.call("Gather", "stream_unary", iter([b"a", b"b", b"c"]))
    assert response.count(b"[") == 4
    assert tree(spans_of(served.receiver, trace_id), parent_id)[0] == "toy.Scorer/Gather"


@pytest.mark.parametrize(
    ("method", "code", "error_type"),
    [
        ("Fail", "UNKNOWN", "RuntimeError"),
        ("Refuse", "INVALID_ARGUMENT", None),
        ("Missing", "UNIMPLEMENTED", None),
    ],
)
def test_a_failed_call_has_its_code(served: Served, method: str, code: str, error_type: str | None) -> None:
    response, trace_id, _ = served.call(method)
    assert response.name == code
    (server,) = [span for span in spans_of(served.receiver, trace_id) if span["kind"] == 2]
    assert server["attributes"][semconv.RPC_RESPONSE_STATUS_CODE] == code
    if error_type:
        assert server["attributes"][semconv.ERROR_TYPE] == error_type


def test_a_client_that_cancels_is_no_error(served: Served) -> None:
    trace_id, _, header = make_ids()
    metadata = (("traceparent", header),)
    messages = served.channel.unary_stream("/toy.Scorer/Slow")(b"x", metadata=metadata)
    next(messages)
    messages.cancel()
    (server,) = [span for span in spans_of(served.receiver, trace_id) if span["kind"] == 2]
    assert server["attributes"][semconv.RPC_RESPONSE_STATUS_CODE] == "CANCELLED"
    assert server["status"] != ERROR


def test_an_http_metric_counts_no_call(served: Served) -> None:
    served.call("Classify")
    time.sleep(2)
    assert not [
        metric for metric in served.receiver.metrics if metric["name"] == semconv.HTTP_REQUEST_DURATION.name
    ]
