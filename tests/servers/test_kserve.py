"""KServe's SDK: the hooks of its models are stages of the request, over v1, v2 and gRPC, and in worker processes."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub

from otel_infer import semconv
from tests.servers.apps.scorer import CHUNKS
from tests.servers.receiving import ERROR, spans_of
from tests.servers.requests_sent import Answer, make_ids, send
from tests.servers.serving import start_module, stop_module
from tests.support.arrivals import counted
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import Server, free_port
from tests.support.trees import tree

REQUEST = "inference Scorer"
V1, V2 = "POST /v1/models/{model_name}:predict", "POST /v2/models/{model_name}/infer"
STAGES = {
    "plain": ["ingress", "predict", "forward", "postprocess"],
    "hooked": ["ingress", "preprocess", "predict", "forward", "postprocess", "postprocess hook"],
}
HOOK_MS = 20
"""Of each hook but `predict`, at least."""


class Served(NamedTuple):
    """A server that runs, who receives what it exports, and its port for gRPC."""

    server: Server
    receiver: OtlpReceiver
    grpc_port: int

    def predict(self, model: str, value: float = 1.0) -> Answer:
        body = {"instances": [[value] * 16]}
        return send(self.server.port, "POST", f"/v1/models/{model}:predict", json.dumps(body).encode())

    def infer(self, model: str) -> Answer:
        row = {"name": "rows", "shape": [1, 16], "datatype": "FP32", "data": [1.0] * 16}
        body = json.dumps({"inputs": [row]}).encode()
        return send(self.server.port, "POST", f"/v2/models/{model}/infer", body)

    def call(self, model: str) -> tuple[str, str]:
        """Calls a model by gRPC. Returns the trace id, and the id of the client's span."""
        row = pb.ModelInferRequest.InferInputTensor(name="rows", datatype="FP32", shape=[1, 16])
        row.contents.fp32_contents.extend([1.0] * 16)
        trace_id, parent_id, header = make_ids()
        with grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel, suppress(grpc.RpcError):
            request = pb.ModelInferRequest(model_name=model, inputs=[row])
            GRPCInferenceServiceStub(channel).ModelInfer(
                request, metadata=(("traceparent", header),), timeout=20
            )
        return trace_id, parent_id

    def lines_of(self, answer: Answer, name: str = "") -> list[str]:
        return tree(spans_of(self.receiver, answer.trace_id, name), answer.parent_id)


def start(receiver: OtlpReceiver, folder: Path, **variables: str) -> Served:
    port = free_port()
    server = start_module("kserve_app", receiver, folder / "log", path="/", GRPC_PORT=str(port), **variables)
    return Served(server, receiver, port)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with OtlpReceiver() as receiver:
        served = start(receiver, tmp_path_factory.mktemp("kserve"))
        yield served
        stop_module(served.server)


def draw(route: str, stages: list[str], request: str = REQUEST) -> list[str]:
    return [route, f"  {request}", *[f"    {stage}" for stage in stages]]


def test_hooks_of_a_model_are_stages(served: Served) -> None:
    before = counted(served.receiver)
    answers = [
        (route, model, call(model))
        for model in STAGES
        for route, call in ((V1, served.predict), (V2, served.infer))
    ]
    missing = served.predict("missing")
    for route, model, answer in answers:
        assert answer.status == 200, answer.body
        assert served.lines_of(answer, REQUEST) == draw(route, STAGES[model])
    assert missing.status == 404 and served.lines_of(missing) == [V1]
    lengths = {
        span["name"]: (span["end"] - span["start"]) / 1e6
        for span in spans_of(served.receiver, answer.trace_id)
    }
    assert min(lengths["preprocess"], lengths["postprocess hook"]) >= HOOK_MS > lengths["predict"]
    assert lengths["postprocess"] >= lengths["postprocess hook"]
    expected = before + len(answers)
    assert served.receiver.wait_for(lambda it: counted(it) == expected, 10), counted(served.receiver)


def test_error_names_the_hook_that_raised(served: Served) -> None:
    answer = served.predict("hooked", -1.0)
    assert answer.status == 500
    spans = spans_of(served.receiver, answer.trace_id, "inference")
    assert {span["attributes"].get(semconv.ERROR_TYPE) for span in spans if span["status"] == ERROR} == {
        "ValueError"
    }
    (request,) = [span for span in spans if span["name"] == "inference"]
    assert request["attributes"][semconv.FAILED_STAGE] == "predict"


def test_stream_has_each_call_of_the_model(served: Served) -> None:
    answer = served.predict("stream")
    assert answer.body.count(b"\n") == CHUNKS
    assert served.lines_of(answer, REQUEST).count("    forward") == CHUNKS


def test_client_that_leaves_is_no_error(served: Served) -> None:
    trace_id, _, header = make_ids()
    body = json.dumps({"instances": [[1.0] * 16]}).encode()
    with socket.create_connection(("127.0.0.1", served.server.port), timeout=20) as connection:
        head = f"POST /v1/models/stream:predict HTTP/1.1\r\nhost: a\r\ntraceparent: {header}\r\n"
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        found = b""
        while b"predictions" not in found and (part := connection.recv(4096)):
            found += part
    (request,) = [span for span in spans_of(served.receiver, trace_id, REQUEST) if span["name"] == REQUEST]
    assert request["attributes"][semconv.ERROR_TYPE] == "client_disconnect"
    assert request["status"] != ERROR


def test_remote_call_contains_the_hooks_of_its_model(served: Served) -> None:
    calls = {model: served.call(model) for model in STAGES}
    for model, (trace_id, parent_id) in calls.items():
        lines = tree(spans_of(served.receiver, trace_id, REQUEST), parent_id)
        assert lines == draw("inference.GRPCInferenceService/ModelInfer", STAGES[model])


def test_worker_processes_are_one_server(receiver: OtlpReceiver, tmp_path: Path) -> None:
    """A model is pickled into each worker, in evaluation mode."""
    served = start(receiver, tmp_path, WORKERS="2")
    try:
        answer = served.predict("hooked")
        assert served.lines_of(answer) == draw(V1, STAGES["hooked"])
    finally:
        stop_module(served.server)
    time.sleep(2)  # the sidecar reports what died, and ends
    starts = [span for span in receiver.spans if span["name"] == semconv.SPAN_SERVER_START]
    assert [span["attributes"].get(semconv.ERROR_TYPE, "") for span in starts] == [""]
    assert len({span["resource"]["service.instance.id"] for span in receiver.spans}) == 1
