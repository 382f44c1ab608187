"""gRPC servers, threaded and asyncio, with a real client."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
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

ATTEMPTS = 5
"""gRPC's asyncio server loses the status of about every fourth call whose handler runs in a thread and refuses it after its
first response (grpcio 1.85, without otel_infer as well). Its client waits until the deadline.
"""


class Served(NamedTuple):
    """A server that runs, a channel to it, and who receives what it exports."""

    channel: grpc.Channel
    receiver: OtlpReceiver

    def call(
        self,
        method: str,
        kind: str = "unary_unary",
        request: Any = b"x",
        more: str = "x",
        timeout: float = 20,
    ) -> tuple[Any, str, str]:
        """Calls a method. Returns its response (a list of a stream's, or the status code), trace id and parent id."""
        trace_id, parent_id, header = make_ids()
        metadata = (("traceparent", header), (more, "1"))
        function = getattr(self.channel, kind)(f"/toy.Scorer/{method}")
        try:
            response = function(request, metadata=metadata, timeout=timeout)
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


@contextmanager
def serve(receiver: OtlpReceiver, log: Path, *more: str) -> Iterator[tuple[GrpcServer, Served]]:
    """Runs the application, with a channel to it."""
    port = free_port()
    app = ServedApp(("-m", "tests.servers.apps.grpc_app", "{port}", *more), "")
    environ = {**receiver.environ, "OTEL_METRIC_EXPORT_INTERVAL": "1000", "PYTHONPATH": str(Path.cwd())}
    with GrpcServer(make_command(app, port), port, log, environ) as server:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield server, Served(channel, receiver)
        assert "hook on" not in server.read_log()


@pytest.fixture(scope="module", params=["threads", "aio", "aio_threads"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log, more = tmp_path_factory.mktemp("grpc") / "server.log", (request.param,)
    with OtlpReceiver() as receiver, serve(receiver, log, *more) as (_, running):
        yield running


def find_server(spans: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the attributes of the only SERVER span."""
    (server,) = [span for span in spans if span["kind"] == 2]
    return server["attributes"]  # type: ignore[no-any-return]


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


@pytest.mark.parametrize(
    ("method", "kind", "request_", "error_type"),
    [
        ("Classify", "unary_unary", b"x", None),
        ("Stream", "unary_stream", b"x", None),
        ("Gather", "stream_unary", [b"a", b"b"], None),
        ("Chat", "stream_stream", [b"a", b"b"], None),
        ("SetCode", "unary_unary", b"x", None),
        ("GiveUp", "unary_unary", b"x", "UNAVAILABLE"),
        ("RefuseLater", "unary_stream", b"x", "UNAVAILABLE"),
        ("Checked", "unary_unary", b"broken", "ValueError"),
        ("Gather", "stream_unary", [b"a", b"broken"], "ValueError"),
        ("Chat", "stream_stream", [b"a", b"broken"], "ValueError"),
        ("Unsendable", "unary_unary", b"x", "ValueError"),
        ("Nothing", "unary_unary", b"x", "TypeError"),
    ],
)
def test_a_call_ends_as_its_client_sees(
    served: Served, method: str, kind: str, request_: Any, error_type: str | None
) -> None:
    for _ in range(ATTEMPTS):
        request = iter(request_) if isinstance(request_, list) else request_
        response, trace_id, parent_id = served.call(method, kind, request, timeout=5)
        if response is not grpc.StatusCode.DEADLINE_EXCEEDED:
            break
    spans = spans_of(served.receiver, trace_id)
    attributes = find_server(spans)
    assert attributes[semconv.RPC_RESPONSE_STATUS_CODE] == getattr(response, "name", "OK")
    assert attributes.get(semconv.ERROR_TYPE) == error_type
    (server,) = [span for span in spans if span["parent_span_id"] == parent_id]
    assert server["end"] - server["start"] < 1e9
    assert sum(span["name"].startswith("inference") for span in spans) <= 1


def test_a_written_stream_has_its_messages(tmp_path: Path) -> None:
    with OtlpReceiver() as receiver, serve(receiver, tmp_path / "log", "aio") as (_, served):
        response, trace_id, parent_id = served.call("Write", "unary_stream")
        assert response == [b"0", b"1", b"2"]
        spans = spans_of(receiver, trace_id, "postprocess")
    lines = tree(spans, parent_id)
    assert lines[:2] == ["toy.Scorer/Write", "  inference Scorer"]
    assert "    postprocess" in lines


def test_a_deadline_ends_the_call(served: Served) -> None:
    trace_id, _, header = make_ids()
    call = served.channel.unary_unary("/toy.Scorer/Wait")
    with pytest.raises(grpc.RpcError) as raised:
        call(b"0.6", metadata=(("traceparent", header),), timeout=0.3)
    assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    attributes = find_server(spans_of(served.receiver, trace_id))
    assert attributes[semconv.RPC_RESPONSE_STATUS_CODE] == "DEADLINE_EXCEEDED"
    assert attributes[semconv.ERROR_TYPE] == "DEADLINE_EXCEEDED"


def test_a_call_that_never_got_a_thread_ends(tmp_path: Path) -> None:
    with OtlpReceiver() as receiver, serve(receiver, tmp_path / "log", "one_thread") as (_, served):
        first = served.channel.unary_unary("/toy.Scorer/Wait").future(b"0.6", timeout=20)
        time.sleep(0.2)
        trace_id, _, header = make_ids()
        with pytest.raises(grpc.RpcError):
            served.channel.unary_unary("/toy.Scorer/Classify")(
                b"x", metadata=(("traceparent", header),), timeout=0.1
            )
        assert first.result() == b"-"
        spans = spans_of(receiver, trace_id)
    (server,) = [span for span in spans if span["kind"] == 2]
    assert server["end"] - server["start"] > 0.2e9  # until the thread was free
    assert find_server(spans)[semconv.RPC_RESPONSE_STATUS_CODE] == "CANCELLED"


@pytest.mark.parametrize("kind", ["threads", "aio"])
def test_a_call_above_the_limit_is_refused(kind: str, tmp_path: Path) -> None:
    with OtlpReceiver() as receiver, serve(receiver, tmp_path / "log", kind, "crowded") as (_, served):
        first = served.channel.unary_unary("/toy.Scorer/Wait").future(b"0.6", timeout=20)
        time.sleep(0.2)
        response, trace_id, _ = served.call("Classify")
        assert response == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert first.result() == b"-"
        attributes = find_server(spans_of(receiver, trace_id))
    assert attributes[semconv.RPC_RESPONSE_STATUS_CODE] == "RESOURCE_EXHAUSTED"


@pytest.mark.parametrize("kind", ["threads", "aio", "aio_threads"])
def test_a_server_that_stops_ends_its_calls(kind: str, tmp_path: Path) -> None:
    with OtlpReceiver() as receiver, serve(receiver, tmp_path / "log", kind) as (server, served):
        ids = [make_ids() for _ in range(2)]
        metadata = [(("traceparent", header),) for _, _, header in ids]
        call = served.channel.unary_unary("/toy.Scorer/Wait").future(b"0.8", metadata=metadata[0], timeout=20)
        stream = served.channel.unary_stream("/toy.Scorer/Slow")(b"x", metadata=metadata[1], timeout=20)
        next(stream)
        server.stop()
        assert call.code() is not None and call.code() != grpc.StatusCode.OK
        for trace_id, _, _ in ids:
            attributes = find_server(spans_of(receiver, trace_id))
            assert attributes[semconv.RPC_RESPONSE_STATUS_CODE] == "CANCELLED"


def test_an_interceptor_that_fails_is_an_error(served: Served) -> None:
    response, trace_id, _ = served.call("Classify", more="fail")
    assert response == grpc.StatusCode.UNKNOWN
    attributes = find_server(spans_of(served.receiver, trace_id))
    assert attributes[semconv.RPC_RESPONSE_STATUS_CODE] == "UNKNOWN"
    assert attributes[semconv.RPC_METHOD] == semconv.OTHER
    assert attributes[semconv.ERROR_TYPE] == "RuntimeError"


def test_a_stream_that_an_interceptor_ends_is_whole(served: Served) -> None:
    response, trace_id, _ = served.call("Stream", "unary_stream", more="cut")
    assert response == [b"0"]
    attributes = find_server(spans_of(served.receiver, trace_id))
    assert attributes[semconv.RPC_RESPONSE_STATUS_CODE] == "OK"


def test_health_is_watched_without_a_thread(tmp_path: Path) -> None:
    with OtlpReceiver() as receiver, serve(receiver, tmp_path / "log", "one_thread") as (_, served):
        watch = served.channel.unary_stream("/toy.Scorer/Watch")(b"x", timeout=20)
        assert next(watch) == b"threadless"
        assert served.call("Classify")[0].startswith(b"[[")
        watch.cancel()


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


# ── the wait in gRPC's core ──────────────────────────────────────────────────────────────────────────────────────────

BLOCKED_S = 0.03
CLIENTS, CALLS = 8, 10


def call_blocked(channel: grpc.Channel, calls: int) -> dict[str, float]:
    """Calls a method that blocks the event loop, one call after the other. Returns their latencies in s by trace id."""
    latencies = {}
    for _ in range(calls):
        trace_id, _, header = make_ids()
        began = time.perf_counter()
        channel.unary_unary("/toy.Scorer/Block")(
            str(BLOCKED_S).encode(), metadata=(("traceparent", header),), timeout=20
        )
        latencies[trace_id] = time.perf_counter() - began
    return latencies


def count_servers(receiver: OtlpReceiver, latencies: dict[str, float]) -> int:
    """Returns the number of SERVER spans in these traces."""
    return sum(span["kind"] == 2 and span["trace_id"] in latencies for span in receiver.spans)


@pytest.mark.parametrize("has_own_channels", [False, True], ids=["one_channel", "own_channels"])
def test_a_call_waits_while_the_loop_is_blocked(has_own_channels: bool, tmp_path: Path) -> None:
    with (
        OtlpReceiver() as receiver,
        serve(receiver, tmp_path / "log", "aio") as (server, served),
        ExitStack() as opened,
    ):
        options = (("grpc.use_local_subchannel_pool", 1),)
        channels = [
            opened.enter_context(grpc.insecure_channel(f"127.0.0.1:{server.port}", options))
            if has_own_channels
            else served.channel
            for _ in range(CLIENTS)
        ]
        with ThreadPoolExecutor(CLIENTS) as pool:
            found = list(pool.map(call_blocked, channels, [CALLS] * CLIENTS))
        latencies = {trace_id: latency for some in found for trace_id, latency in some.items()}
        spans_of(receiver, list(latencies)[-1])
        assert receiver.wait_for(lambda it: count_servers(it, latencies) == len(latencies), 15)
        spans = [span for span in receiver.spans if span["trace_id"] in latencies]
    durations = [(span["end"] - span["start"]) / 1e9 for span in spans if span["kind"] == 2]
    assert median(latencies.values()) > CLIENTS * BLOCKED_S * 0.8
    assert median(durations) == pytest.approx(median(latencies.values()), rel=0.2)
    waits = [span for span in spans if span["name"] == semconv.SPAN_ACCEPT]
    assert len(waits) > CLIENTS * CALLS * 0.8
    assert not [span for span in waits if span["end"] - span["start"] > max(latencies.values()) * 1.2e9]


def test_calls_of_an_idle_server_do_not_wait(tmp_path: Path) -> None:
    """A busy machine can delay the server's own thread, so one call may wait; the calls before it are no reason to wait."""
    with OtlpReceiver() as receiver, serve(receiver, tmp_path / "log", "aio") as (_, served):
        latencies = call_blocked(served.channel, 10)
        assert receiver.wait_for(lambda it: count_servers(it, latencies) == len(latencies), 15)
        waits = [span for span in receiver.spans if span["name"] == semconv.SPAN_ACCEPT]
        assert len(waits) < len(latencies) / 2
