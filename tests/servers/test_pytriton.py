"""PyTriton: a request that Triton forwards is a child of its client's span, over HTTP and gRPC, in batches, and counts once."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from otel_infer import semconv
from tests.servers import test_hooks
from tests.servers.apps.broken import PLACES
from tests.servers.apps.scorer import CHUNKS
from tests.servers.apps.scorer import PAUSE_S as CHUNK_S
from tests.servers.leftovers import kill_leftovers
from tests.servers.receiving import ERROR, spans_of
from tests.servers.requests_sent import Answer, make_ids, send
from tests.servers.serving import start_command, stop_module
from tests.support.arrivals import counted
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import Server, free_port
from tests.support.trees import tree

SIZE, BURSTS, SERVER = 4, 2, 2
MODELS = "single", "batched", "double", "misfit", "stream"
READY_S = 60
STAGES = {
    "single": ["ingress", "queue wait", "infer function", "forward", "postprocess"],
    "double": ["ingress", "queue wait", "infer function", "postprocess"],
    "misfit": ["ingress", "queue wait", "infer function"],
}
"""By model. What `double` calls has no torch, and `misfit` raises after its call."""


class Served(NamedTuple):
    """A server that runs, who receives what it exports, its port for gRPC, and the file with the calls of its functions."""

    server: Server
    receiver: OtlpReceiver
    grpc_port: int
    calls: Path

    def infer(self, model: str, value: float = 1.0) -> Answer:
        row = {"name": "rows", "shape": [1, 16], "datatype": "FP32", "data": [value] * 16}
        body = json.dumps({"inputs": [row]}).encode()
        return send(self.server.port, "POST", f"/v2/models/{model}/infer", body)

    def call(self, model: str, value: float = 1.0) -> tuple[str, str]:
        """Calls a model by gRPC. Returns the trace id, and the id of the client's span."""
        trace_id, parent_id, header = make_ids()
        with triton_grpc.InferenceServerClient(f"127.0.0.1:{self.grpc_port}") as client:
            with suppress(InferenceServerException):
                client.infer(model, [make_input(value)], headers={"traceparent": header})
        return trace_id, parent_id

    def infer_together(self) -> list[Answer]:
        with ThreadPoolExecutor(SIZE) as pool:
            return list(pool.map(lambda _: self.infer("batched"), range(SIZE)))

    def lines_of(self, answer: Answer) -> list[str]:
        name = json.loads(answer.body).get("model_name", "")
        return tree(spans_of(self.receiver, answer.trace_id, f"inference {name}".strip()), answer.parent_id)


def make_input(value: float) -> Any:
    rows = triton_grpc.InferInput("rows", [1, 16], "FP32")
    rows.set_data_from_numpy(np.full((1, 16), value, np.float32))
    return rows


def start(
    receiver: OtlpReceiver, folder: Path, *models: str, broken: tuple[str, ...] = (), **variables: str
) -> Served:
    """Starts a server with these models, and waits until they are ready. `broken`: arguments of `apps.broken`."""
    grpc_port, calls = free_port(), folder / "calls"
    module = (
        ("-m", "tests.servers.apps.broken", *broken, "pytriton_app")
        if broken
        else ("-m", "tests.servers.apps.pytriton_app")
    )
    variables |= {"GRPC_PORT": str(grpc_port), "CALLS": str(calls), "MODELS": " ".join(models)}
    server = start_command((*module, "{port}"), receiver, folder / "log", "/v2/health/live", **variables)
    deadline = time.monotonic() + READY_S
    while any(send(server.port, "GET", f"/v2/models/{model}/ready").status != 200 for model in models):
        assert time.monotonic() < deadline, server.read_log()
        time.sleep(0.2)
    return Served(server, receiver, grpc_port, calls)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with OtlpReceiver() as receiver:
        served = start(receiver, tmp_path_factory.mktemp("pytriton"), *MODELS)
        yield served
        stop_module(served.server)


def draw(model: str) -> list[str]:
    return [f"ModelInfer {model}", f"  inference {model}", *[f"    {stage}" for stage in STAGES[model]]]


def find_span(spans: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (span,) = [span for span in spans if span["name"] == name]
    return span


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_request_contains_its_wait_and_its_call(served: Served) -> None:
    before = counted(served.receiver)
    single, double, missing = served.infer("single"), served.infer("double"), served.infer("missing")
    assert [answer.status for answer in (single, double, missing)] == [200, 200, 404]
    assert served.lines_of(single) == draw("single")
    assert served.lines_of(double) == draw("double")
    request = find_span(spans_of(served.receiver, single.trace_id), "inference single")
    assert request["attributes"][semconv.PROVIDER_NAME] == "pytriton"
    assert served.receiver.wait_for(lambda it: counted(it) == before + 2, 10), counted(served.receiver)
    time.sleep(1.5)  # one more export
    assert counted(served.receiver) == before + 2
    assert {"single", "double"} <= list_models(served.receiver)


def list_models(receiver: OtlpReceiver) -> set[str]:
    """Returns the models that are labels of the durations."""
    return {
        point["attributes"].get(semconv.REQUEST_MODEL)
        for metric in receiver.metrics
        if metric["name"] == semconv.REQUEST_DURATION.name
        for point in metric["points"]
    }


def test_batch_of_triton_is_one_call_of_linked_requests(served: Served) -> None:
    before = counted(served.receiver)
    for _ in range(BURSTS):
        check_batch(served, served.infer_together())
    expected = before + BURSTS * SIZE
    assert served.receiver.wait_for(lambda it: counted(it) == expected, 10), counted(served.receiver)


def check_batch(served: Served, answers: list[Answer]) -> None:
    """Checks a burst of requests, which arrive in one batch or in two."""
    sizes, links = [], 0
    for answer in answers:
        assert answer.status == 200
        assert served.lines_of(answer) == [line.replace("single", "batched") for line in draw("single")]
        spans = spans_of(served.receiver, answer.trace_id)
        request = find_span(spans, "inference batched")
        sizes.append(find_span(spans, "forward")["attributes"][semconv.ITEMS])
        assert find_span(spans, "infer function")["attributes"][semconv.ITEMS] == sizes[-1]
        assert request["attributes"].get(semconv.BATCH_REQUESTS, 1) == sizes[-1]
        links += len(request["links"])
    assert max(sizes) > 1
    assert links >= 2 * (max(sizes) - 1)


def test_error_of_the_function_is_an_error_of_its_type(served: Served) -> None:
    bad, misfit = served.infer("single", -1.0), served.infer("misfit")
    for answer, model in ((bad, "single"), (misfit, "misfit")):
        assert answer.status == 500 and b"ValueError" in answer.body
        spans = spans_of(served.receiver, answer.trace_id, f"inference {model}")
        assert {span["attributes"].get(semconv.ERROR_TYPE) for span in spans if span["status"] == ERROR} == {
            "ValueError"
        }
        request = find_span(spans, f"inference {model}")
        assert request["attributes"][semconv.FAILED_STAGE] == "infer function"


def test_remote_call_is_a_child_of_its_client(served: Served) -> None:
    for model in ("single", "double"):
        trace_id, parent_id = served.call(model)
        assert tree(spans_of(served.receiver, trace_id, f"inference {model}"), parent_id) == draw(model)
    trace_id, _ = served.call("single", -1.0)
    request = find_span(spans_of(served.receiver, trace_id, "inference single"), "inference single")
    assert request["attributes"][semconv.ERROR_TYPE] == "ValueError"


def test_stream_has_each_call_of_the_model(served: Served) -> None:
    trace_id, parent_id = read_stream(served, CHUNKS)
    first, second, *stages = tree(spans_of(served.receiver, trace_id, "inference stream"), parent_id)
    assert [first, second] == ["ModelInfer stream", "  inference stream"]
    assert stages.count("    forward") == CHUNKS


def test_stream_waits_while_another_one_works(served: Served) -> None:
    """Both are read in the one thread of the model, which a function without `await` keeps."""
    with ThreadPoolExecutor(2) as pool:
        streams = []
        for _ in range(2):
            streams.append(pool.submit(read_stream, served, CHUNKS))
            time.sleep(CHUNK_S / 3)
        traces = [stream.result()[0] for stream in streams]
    found = [spans_of(served.receiver, trace_id, "inference stream") for trace_id in traces]
    waits = [find_span(spans, "queue wait") for spans in found]
    assert max(wait["end"] - wait["start"] for wait in waits) >= CHUNK_S / 3 * 1e9
    assert [sum(span["name"] == "forward" for span in spans) for spans in found] == [CHUNKS] * 2


def test_client_that_leaves_is_not_seen(served: Served) -> None:
    """PyTriton does not look for cancelled requests: the function runs to its end."""
    trace_id, _ = read_stream(served, 1)
    spans = spans_of(served.receiver, trace_id, "inference stream")
    assert semconv.ERROR_TYPE not in find_span(spans, "inference stream")["attributes"]


def read_stream(served: Served, chunks: int) -> tuple[str, str]:
    """Reads so many responses of a stream, and leaves. Returns the trace id, and the id of the client's span."""
    trace_id, parent_id, header = make_ids()
    found: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{served.grpc_port}") as client:
        client.start_stream(lambda result, error: found.put(error), headers={"traceparent": header})
        client.async_stream_infer("stream", [make_input(1.0)])
        assert [found.get(timeout=20) for _ in range(chunks)] == [None] * chunks
        client.stop_stream(cancel_requests=True)
    return trace_id, parent_id


# ── headers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_function_sees_no_header_that_is_forwarded_for_us(served: Served) -> None:
    served.infer("double")
    assert {line for line in served.calls.read_text().splitlines() if line.startswith("double")} == {
        "double {}"
    }


def test_pattern_of_the_user_stays(receiver: OtlpReceiver, tmp_path: Path) -> None:
    served = start(
        receiver, tmp_path, "double", PYTRITON_TRITON_CONFIG_HTTP_HEADER_FORWARD_PATTERN="traceparent"
    )
    try:
        answer = served.infer("double")
        assert served.lines_of(answer) == draw("double")
        assert f"-{answer.trace_id}-" in served.calls.read_text()
        trace_id, _ = served.call("double")
        assert trace_id not in served.calls.read_text()
    finally:
        stop_module(served.server)


# ── its own tracing ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_request_is_below_the_span_of_its_own_tracing(receiver: OtlpReceiver, tmp_path: Path) -> None:
    """Triton sends its own spans as JSON, which this receiver does not take: those of Python are looked at."""
    with OtlpReceiver() as others:
        url = f"{others.endpoint}/v1/traces"
        served = start(receiver, tmp_path, "single", TRACE_URL=url, OTEL_BSP_SCHEDULE_DELAY="200")
        try:
            answer = served.infer("single")
            trace_id = answer.trace_id
            assert receiver.wait_for(lambda it: "inference single" in list_names(it, trace_id), 10)
            assert others.wait_for(lambda it: "python_backend_execute" in list_names(it, trace_id), 10)
            assert others.wait_for(lambda it: "proxy_inference_callable" in list_names(it, trace_id), 10)
        finally:
            stop_module(served.server)
        outer = find_span([s for s in others.spans if s["trace_id"] == trace_id], "proxy_inference_callable")
        ours = [span for span in receiver.spans if span["trace_id"] == trace_id]
        assert not [span for span in ours if span["kind"] == SERVER]
        assert find_span(ours, "inference single")["parent_span_id"] == outer["span_id"]


def list_names(receiver: OtlpReceiver, trace_id: str) -> list[str]:
    return [span["name"] for span in receiver.spans if span["trace_id"] == trace_id]


# ── what does not change ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("place", PLACES)
def test_an_error_of_our_own_changes_no_response(place: str, receiver: OtlpReceiver, tmp_path: Path) -> None:
    served = start(receiver, tmp_path, "single", broken=(place,))
    try:
        answers = [served.infer("single", value) for value in (1.0, -1.0, 1.0)]
        assert [answer.status for answer in answers] == [200, 500, 200]
        assert b"a negative row" in answers[1].body
        assert served.calls.read_text().splitlines() == ["infer"] * 3
        log = served.server.read_log()
        assert "of our own" not in log  # our errors are logged by their type
        assert ("hook on" in log) == (place != "uninstrument"), log
    finally:
        served.server.stop()
        kill_leftovers(str(served.server.port))
    if place == "uninstrument":
        assert not [span for span in receiver.spans if span["kind"] == SERVER]


@pytest.mark.parametrize("script", [test_hooks.RESTORED, test_hooks.DRIFTED], ids=["restored", "drifted"])
def test_every_hook_fits_and_comes_off_again(script: str) -> None:
    test_hooks.run(script, "pytriton")
