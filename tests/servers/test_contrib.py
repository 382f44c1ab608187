"""Beside OpenTelemetry's own instrumentation its SERVER span is used, and none is added."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from otel_infer import semconv
from tests.servers.apps.scorer import CHUNKS
from tests.servers.receiving import spans_of
from tests.servers.requests_sent import make_ids, send
from tests.servers.serving import ServedApp, make_command
from tests.servers.test_grpc import GrpcServer, Served
from tests.support.arrivals import counted
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import Server, free_port
from tests.support.trees import tree

OURS = "otel_infer"


def serve(name: str, port: int, receiver: OtlpReceiver, log: Path, *more: str) -> Server:
    app = ServedApp(("-m", "tests.servers.apps.contrib", name, "{port}", *more), "")
    kind = GrpcServer if name == "grpc_app" else Server
    command = make_command(app, port)
    if "ours_last" in more:  # not started by `otel-infer run`, which is first
        command = [sys.executable, *command[command.index("--") + 2 :]]
    return kind(command, port, log, {**receiver.environ, "PYTHONPATH": str(Path.cwd())})


def draw_kinds(spans: list[dict[str, Any]], parent: str) -> list[tuple[str, str]]:
    """Returns kind and owner of the spans from the caller down to our request."""
    drawn = []
    while True:
        below = [span for span in spans if span["parent_span_id"] == parent and span["kind"] in (1, 2)]
        chosen = next(
            (span for span in below if span["kind"] == 2 or span["name"] == "inference Scorer"), None
        )
        if chosen is None:
            return drawn
        owner = OURS if chosen["scope"]["name"].startswith(OURS) else "contrib"
        drawn.append(("SERVER" if chosen["kind"] == 2 else "INTERNAL", owner))
        parent = chosen["span_id"]


EXPECTED = [("SERVER", "contrib"), ("INTERNAL", OURS)]


@pytest.mark.parametrize("name", ["flask_app", "falcon_app", "aiohttp_app", "tornado_app"])
def test_an_http_request_has_the_server_span_of_the_other(name: str, tmp_path: Path) -> None:
    port = free_port()
    with OtlpReceiver() as receiver, serve(name, port, receiver, tmp_path / "log"):
        for method, path in (("POST", "/classify/a"), ("GET", "/score/a")):
            answer = send(port, method, path)
            spans = spans_of(receiver, answer.trace_id, "inference Scorer")
            assert draw_kinds(spans, answer.parent_id) == EXPECTED
            assert sum(span["kind"] == 2 for span in spans) == 1
        answer = send(port, "POST", "/fail")
        time.sleep(1)
        assert sum(span["kind"] == 2 for span in spans_of(receiver, answer.trace_id)) == 1


def test_a_stream_and_an_error_have_the_server_span_of_the_other(tmp_path: Path) -> None:
    """Flask's instrumentation ends its span before the stream, and has replaced the context by the caller's."""
    port = free_port()
    stages = ["    ingress", "    forward", "    postprocess"]
    with OtlpReceiver() as receiver, serve("flask_app", port, receiver, tmp_path / "log"):
        for path, expected in (
            ("/classify/a", ["POST /classify/<name>", "  inference Scorer", *stages]),
            ("/stream", ["POST /stream", "  inference Scorer", *stages, *["    forward"] * (CHUNKS - 1)]),
        ):
            answer = send(port, "POST", path)
            spans = spans_of(receiver, answer.trace_id, "inference Scorer")
            first, second, *lines = tree(spans, answer.parent_id)
            assert [first, second, *sorted(lines)] == [*expected[:2], *sorted(expected[2:])]
            assert sum(span["kind"] == 2 for span in spans) == 1
        assert receiver.wait_for(lambda it: counted(it) == 2, 10)


@pytest.mark.parametrize(
    "more",
    [(), ("aio",), ("ours_last",), ("aio", "ours_last")],
    ids=["threads", "aio", "threads_ours_last", "aio_ours_last"],
)
def test_a_remote_call_has_the_server_span_of_the_other(more: tuple[str, ...], tmp_path: Path) -> None:
    port = free_port()
    with OtlpReceiver() as receiver, serve("grpc_app", port, receiver, tmp_path / "log", *more):
        trace_id, parent_id, header = make_ids()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            channel.unary_unary("/toy.Scorer/Classify")(b"x", metadata=(("traceparent", header),), timeout=20)
        spans = spans_of(receiver, trace_id, "inference Scorer")
        assert draw_kinds(spans, parent_id) == EXPECTED
        assert sum(span["kind"] == 2 for span in spans) == 1


CALLS = (
    ("Classify", "unary_unary", b"x", None),
    ("Stream", "unary_stream", b"x", None),
    ("Gather", "stream_unary", [b"a", b"b"], None),
    ("Chat", "stream_stream", [b"a", b"b"], None),
    ("GiveUp", "unary_unary", b"x", "UNAVAILABLE"),
    ("RefuseLater", "unary_stream", b"x", "UNAVAILABLE"),
    ("Chat", "stream_stream", [b"a", b"broken"], "ValueError"),
    ("Unsendable", "unary_unary", b"x", "ValueError"),
    ("Nothing", "unary_unary", b"x", "TypeError"),
)


@pytest.mark.parametrize("more", [(), ("aio",)], ids=["threads", "aio"])
def test_any_remote_call_is_one_request(more: tuple[str, ...], tmp_path: Path) -> None:
    port = free_port()
    with OtlpReceiver() as receiver, serve("grpc_app", port, receiver, tmp_path / "log", *more):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            served = Served(channel, receiver)
            for method, kind, request, error_type in CALLS:
                trace_id, parent_id = served.call(
                    method, kind, iter(request) if isinstance(request, list) else request
                )[1:]
                spans = spans_of(receiver, trace_id, "inference Scorer")
                assert draw_kinds(spans, parent_id) == EXPECTED, method
                assert sum(span["kind"] == 2 for span in spans) == 1
                (inference,) = [span for span in spans if span["name"] == "inference Scorer"]
                assert inference["attributes"].get(semconv.ERROR_TYPE) == error_type, method
                forwards = [span for span in spans if span["name"] == "forward"]
                assert forwards and all(span["parent_span_id"] == inference["span_id"] for span in forwards)
                assert "ingress" in {span["name"] for span in spans}


@pytest.mark.parametrize("more", [(), ("aio",)], ids=["threads", "aio"])
def test_a_cancelled_remote_stream_is_one_request(more: tuple[str, ...], tmp_path: Path) -> None:
    port = free_port()
    with OtlpReceiver() as receiver, serve("grpc_app", port, receiver, tmp_path / "log", *more):
        trace_id, parent_id, header = make_ids()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stream = channel.unary_stream("/toy.Scorer/Slow")(b"x", metadata=(("traceparent", header),))
            next(stream)
            stream.cancel()
            spans = spans_of(receiver, trace_id, "inference Scorer")
    assert draw_kinds(spans, parent_id) == EXPECTED
    assert sum(span["kind"] == 2 for span in spans) == 1
    (inference,) = [span for span in spans if span["name"] == "inference Scorer"]
    assert inference["attributes"][semconv.ERROR_TYPE] == semconv.ERROR_CLIENT_DISCONNECT


@pytest.mark.parametrize("more", [(), ("aio",)], ids=["threads", "aio"])
def test_a_span_of_a_stream_stays_current(more: tuple[str, ...], tmp_path: Path) -> None:
    port = free_port()
    with OtlpReceiver() as receiver, serve("grpc_app", port, receiver, tmp_path / "log", *more):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            trace_id = Served(channel, receiver).call("Steps", "unary_stream")[1]
        spans = {span["name"]: span for span in spans_of(receiver, trace_id, "inference Scorer")}
    for number in range(3):
        assert spans[f"step {number}"]["parent_span_id"] == spans["steps"]["span_id"]
