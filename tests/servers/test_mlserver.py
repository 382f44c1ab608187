"""MLServer: adaptive batches and parallel workers are a part of the request, over HTTP and gRPC, and count once."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from mlserver.grpc import dataplane_pb2 as pb
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub

from otel_infer import semconv
from tests.servers.apps.scorer import CHUNKS
from tests.servers.receiving import ERROR, spans_of
from tests.servers.requests_sent import Answer, make_ids, send
from tests.servers.serving import start_module, stop_module
from tests.support.arrivals import counted
from tests.support.otlp_receiver import GRPC, OtlpReceiver
from tests.support.served import Server, free_port
from tests.support.trees import tree

MODELS = "single", "batched"
REQUEST = "inference Scorer"
SIZE, BURSTS = 4, 2
SERVER = 2
READY_S = 40


class Served(NamedTuple):
    """A server that runs, who receives what it exports, and its port for gRPC."""

    server: Server
    receiver: OtlpReceiver
    grpc_port: int

    def infer(self, model: str, value: float = 1.0, method: str = "infer") -> Answer:
        return send(self.server.port, "POST", f"/v2/models/{model}/{method}", make_body(value))

    def call(self, model: str, value: float = 1.0) -> tuple[str, str]:
        """Calls a model by gRPC. Returns the trace id, and the id of the client's span."""
        row = pb.ModelInferRequest.InferInputTensor(name="rows", datatype="FP32", shape=[1, 16])
        row.contents.fp32_contents.extend([value] * 16)
        trace_id, parent_id, header = make_ids()
        with grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel, suppress(grpc.RpcError):
            request = pb.ModelInferRequest(model_name=model, inputs=[row])
            GRPCInferenceServiceStub(channel).ModelInfer(
                request, metadata=(("traceparent", header),), timeout=20
            )
        return trace_id, parent_id

    def infer_together(self) -> list[Answer]:
        with ThreadPoolExecutor(SIZE) as pool:
            return list(pool.map(lambda _: self.infer("batched"), range(SIZE)))

    def lines_of(self, answer: Answer, name: str = "") -> list[str]:
        return tree(spans_of(self.receiver, answer.trace_id, name), answer.parent_id)


def make_body(value: float) -> bytes:
    row = {"name": "rows", "shape": [1, 16], "datatype": "FP32", "data": [value] * 16}
    return json.dumps({"inputs": [row]}).encode()


def start(receiver: OtlpReceiver, folder: Path, workers: int, **variables: str) -> Served:
    """Starts a server, and waits until its models are ready."""
    grpc_port = free_port()
    variables |= {
        "MLSERVER_PARALLEL_WORKERS": str(workers), "MLSERVER_GRPC_PORT": str(grpc_port),
        "MLSERVER_METRICS_PORT": str(free_port()), "MLSERVER_METRICS_DIR": str(folder / "metrics"),
        "MLSERVER_ENVIRONMENTS_DIR": str(folder / "environments"),
    }  # fmt: skip
    server = start_module("mlserver_app", receiver, folder / "log", path="/v2/health/live", **variables)
    deadline = time.monotonic() + READY_S
    while any(send(server.port, "GET", f"/v2/models/{model}/ready").status != 200 for model in MODELS):
        assert time.monotonic() < deadline, server.read_log()
        time.sleep(0.2)
    return Served(server, receiver, grpc_port)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with OtlpReceiver() as receiver:
        served = start(receiver, tmp_path_factory.mktemp("mlserver"), workers=0)
        yield served
        stop_module(served.server)


@pytest.fixture
def with_worker(receiver: OtlpReceiver, tmp_path: Path) -> Iterator[Served]:
    served = start(receiver, tmp_path, workers=1)
    yield served
    stop_module(served.server)


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_request_contains_its_wait_and_its_call(served: Served) -> None:
    before = counted(served.receiver)
    single, bad, missing = served.infer("single"), served.infer("single", -1.0), served.infer("missing")
    bursts = [served.infer_together() for _ in range(BURSTS)]
    assert [answer.status for answer in (single, bad, missing)] == [200, 500, 404]
    route = "POST /v2/models/{model_name}/infer"
    assert served.lines_of(single, REQUEST) == [
        route, f"  {REQUEST}", "    ingress", "    forward", "    postprocess",
    ]  # fmt: skip
    assert served.lines_of(missing) == [route]
    assert served.lines_of(bad) == [route]
    (failed,) = spans_of(served.receiver, bad.trace_id)
    assert failed["attributes"][semconv.ERROR_TYPE] == "ValueError"
    for answers in bursts:
        check_batches(served, answers, ["batch wait"])
    expected = before + 1 + BURSTS * SIZE
    assert served.receiver.wait_for(lambda it: counted(it) == expected, 10), counted(served.receiver)


def check_batches(served: Served, answers: list[Answer], waits: list[str]) -> None:
    """Checks a burst of requests, which arrive in one batch or in two."""
    sizes, links = [], 0
    for answer in answers:
        assert answer.status == 200
        spans = spans_of(served.receiver, answer.trace_id, REQUEST)
        lines = [line.strip() for line in tree(spans, answer.parent_id)]
        assert [line for line in lines if line not in ("queue wait", *waits)] == [
            "POST /v2/models/{model_name}/infer", REQUEST, "ingress", "forward", "postprocess",
        ]  # fmt: skip
        assert set(waits) <= set(lines)
        sizes.append(find_span(spans, "forward")["attributes"][semconv.ITEMS])
        assert find_span(spans, "batch wait")["attributes"][semconv.ITEMS] == sizes[-1]
        links += len(find_span(spans, REQUEST)["links"])
    assert max(sizes) > 1
    assert links >= 2 * (max(sizes) - 1)


def find_span(spans: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (span,) = [span for span in spans if span["name"] == name]
    return span


def test_stream_has_each_call_of_the_model(served: Served) -> None:
    stream = served.infer("single", method="infer_stream")
    assert stream.body.count(b"data:") == CHUNKS
    first, second, *stages = served.lines_of(stream, REQUEST)
    assert [first, second] == ["POST /v2/models/{model_name}/infer_stream", f"  {REQUEST}"]
    assert stages.count("    forward") == CHUNKS


def test_client_that_leaves_is_no_error(served: Served) -> None:
    trace_id, _, header = make_ids()
    body = make_body(1.0)
    with socket.create_connection(("127.0.0.1", served.server.port), timeout=20) as connection:
        head = f"POST /v2/models/single/infer_stream HTTP/1.1\r\nhost: a\r\ntraceparent: {header}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        assert b"data:" in read_until(connection, b"data:")
    request = find_span(spans_of(served.receiver, trace_id, REQUEST), REQUEST)
    assert request["attributes"][semconv.ERROR_TYPE] == "client_disconnect"
    assert request["status"] != ERROR


def read_until(connection: socket.socket, wanted: bytes) -> bytes:
    found = b""
    while wanted not in found and (part := connection.recv(4096)):
        found += part
    return found


def test_remote_call_contains_its_call_of_the_model(served: Served) -> None:
    waits = {"single": [], "batched": ["    queue wait", "    batch wait"]}
    calls = {model: served.call(model) for model in waits}
    failed = {"NOT_FOUND": served.call("missing"), "INTERNAL": served.call("single", -1.0)}
    for model, (trace_id, parent_id) in calls.items():
        assert tree(spans_of(served.receiver, trace_id, REQUEST), parent_id) == [
            "inference.GRPCInferenceService/ModelInfer", f"  {REQUEST}",
            "    ingress", *waits[model], "    forward", "    postprocess",
        ]  # fmt: skip
    for code, (trace_id, _) in failed.items():
        (span,) = spans_of(served.receiver, trace_id)
        assert span["attributes"][semconv.RPC_RESPONSE_STATUS_CODE] == code


# ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_worker_is_a_part_of_request_and_server(with_worker: Served) -> None:
    served = with_worker
    single, bad = served.infer("single"), served.infer("single", -1.0)
    bursts = [served.infer_together() for _ in range(BURSTS)]
    assert [answer.status for answer in (single, bad)] == [200, 500]
    assert served.lines_of(single, REQUEST) == [
        "POST /v2/models/{model_name}/infer", f"  {REQUEST}",
        "    ingress", "    queue wait", "    forward", "    postprocess",
    ]  # fmt: skip
    assert "forward" not in str(served.lines_of(bad))
    for answers in bursts:
        check_batches(served, answers, ["batch wait", "queue wait"])
    expected = 1 + BURSTS * SIZE
    assert served.receiver.wait_for(lambda it: counted(it) == expected, 10), counted(served.receiver)
    stop_module(served.server)
    time.sleep(2)  # the sidecar reports what died, and ends
    starts = [span for span in served.receiver.spans if span["name"] == semconv.SPAN_SERVER_START]
    assert [span["attributes"].get(semconv.ERROR_TYPE, "") for span in starts] == [""]
    assert len({span["resource"]["service.instance.id"] for span in served.receiver.spans}) == 1


# ── its own tracing ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_server_span_is_that_of_its_own_tracing(receiver: OtlpReceiver, tmp_path: Path) -> None:
    with OtlpReceiver(GRPC) as others:
        served = start(
            receiver,
            tmp_path,
            workers=0,
            MLSERVER_TRACING_SERVER=others.endpoint,
            OTEL_BSP_SCHEDULE_DELAY="200",
        )
        try:
            answers = [served.infer("single"), *served.infer_together()]
            calls = [(answer.trace_id, answer.parent_id) for answer in answers]
            calls.append(served.call("single"))
            for trace_id, parent_id in calls:
                check_parents(receiver, others, trace_id, parent_id)
        finally:
            stop_module(served.server)


def check_parents(receiver: OtlpReceiver, others: OtlpReceiver, trace_id: str, parent_id: str) -> None:
    """Checks that a request is below the SERVER span of the framework, which is the only one."""
    (server,) = [span for span in spans_of(others, trace_id) if span["kind"] == SERVER]
    assert server["parent_span_id"] == parent_id
    assert receiver.wait_for(
        lambda it: REQUEST in str([s for s in it.spans if s["trace_id"] == trace_id]), 10
    )
    ours = [span for span in receiver.spans if span["trace_id"] == trace_id]
    assert not [span for span in ours if span["kind"] == SERVER]
    assert find_span(ours, REQUEST)["parent_span_id"] == server["span_id"]
    assert find_span(ours, "forward")["parent_span_id"] == find_span(ours, REQUEST)["span_id"]
