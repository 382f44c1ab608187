"""The start of a server over a real socket: its phases, and the link from the first request."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from otel_infer import semconv
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import RUN, Server, chat, free_port, transformers_serve

pytestmark = pytest.mark.real


def wait_for_start(receiver: OtlpReceiver) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the root of the only start, and the other spans of its trace by start time."""

    def roots() -> list[dict[str, Any]]:
        return [span for span in receiver.spans if span["name"] == semconv.SPAN_SERVER_START]

    assert receiver.wait_for(lambda it: bool(roots()), 30), "no start has arrived"
    time.sleep(1.0)
    (root,) = roots()
    below = [s for s in receiver.spans if s["trace_id"] == root["trace_id"] and s is not root]
    return root, sorted(below, key=lambda span: span["start"])


def test_start_is_one_trace_linked_by_first_request(tiny_llama: Path, tmp_path: Path) -> None:
    with OtlpReceiver() as receiver:
        environ = {**receiver.environ, "OTEL_METRIC_EXPORT_INTERVAL": "500"}
        began = time.time_ns()
        with transformers_serve(tiny_llama, tmp_path / "log", environ, batching=True) as server:
            answered = time.time_ns()
            root, phases = wait_for_start(receiver)  # before any request
            first = chat(server.port, tiny_llama, tokens=4)
            second = chat(server.port, tiny_llama, tokens=4)
            requests = [_wait_for_request(receiver, answer.trace_id) for answer in (first, second)]
            assert receiver.wait_for(lambda it: _startup_points(it) != {}, 15)
    assert [span["name"] for span in phases] == ["imports", "weights", "ready"]
    assert root["parent_span_id"] == "" and root["status"] == 0
    assert root["attributes"][semconv.READY_BY] == "lifespan"
    # A process starts slightly before its program, and the kernel reports its start to 10 ms.
    assert began - 20_000_000 <= root["start"] < root["end"] <= answered
    for phase in phases:
        assert phase["parent_span_id"] == root["span_id"]
        assert root["start"] <= phase["start"] < phase["end"] <= root["end"]
    imports, weights, ready = phases
    assert imports["start"] == root["start"] and imports["end"] <= weights["start"]
    assert weights["end"] <= ready["start"] and ready["end"] == root["end"]
    assert weights["attributes"] == {semconv.REQUEST_MODEL: "tiny-llama"}
    assert {"torch", "transformers"} <= {e["attributes"][semconv.MODULE] for e in imports["events"]}
    links = [[(link["trace_id"], link["span_id"]) for link in request["links"]] for request in requests]
    assert links == [[(root["trace_id"], root["span_id"])], []]
    assert [request["attributes"].get(semconv.FIRST_REQUEST) for request in requests] == [True, None]
    total = (root["end"] - root["start"]) / 1e9
    points = _startup_points(receiver)
    assert set(points) == {"total", "imports", "weights", "ready"}
    assert points["total"]["count"] == 1 and points["total"]["sum"] == pytest.approx(total)
    assert {span["resource"]["service.name"] for span in receiver.spans} == {"transformers"}


def test_model_loading_in_lifespan_is_inside_ready(tiny_llama: Path, tmp_path: Path) -> None:
    program, port = tmp_path / "server.py", free_port()
    program.write_text(LIFESPAN)
    command = [*RUN, sys.executable, str(program), str(tiny_llama), str(port)]
    with OtlpReceiver() as receiver, Server(command, port, tmp_path / "log", receiver.environ):
        root, phases = wait_for_start(receiver)
    by_name = {span["name"]: span for span in phases}
    assert list(by_name) == ["imports", "ready", "weights", "compile"]
    assert root["attributes"][semconv.READY_BY] == "lifespan"
    ready, weights, compiled = by_name["ready"], by_name["weights"], by_name["compile"]
    assert ready["start"] <= weights["start"] and weights["end"] <= compiled["start"]
    assert compiled["end"] <= ready["end"] == root["end"]


def test_failing_application_is_a_failed_start(tiny_llama: Path, tmp_path: Path) -> None:
    program, port = tmp_path / "server.py", free_port()
    program.write_text(LIFESPAN)
    bare = tmp_path / "without-weights"
    bare.mkdir()
    shutil.copy(tiny_llama / "config.json", bare)
    command = [*RUN, sys.executable, str(program), str(bare), str(port)]
    with OtlpReceiver() as receiver:
        with pytest.raises(RuntimeError, match="the server ended with 3"):
            Server(command, port, tmp_path / "log", receiver.environ).start()
        root, phases = wait_for_start(receiver)
    assert root["status"] == 2
    assert (root["attributes"][semconv.FAILED_STAGE], root["attributes"][semconv.ERROR_TYPE]) == (
        "ready",
        "OSError",
    )
    assert [(span["name"], span["status"]) for span in phases] == [
        ("imports", 0),
        ("ready", 2),
        ("weights", 2),
    ]


def test_server_killed_while_loading_is_a_failed_start(tmp_path: Path) -> None:
    program = tmp_path / "server.py"
    program.write_text(LOADING)
    command = [*RUN, sys.executable, str(program)]
    with OtlpReceiver() as receiver:
        with pytest.raises(RuntimeError, match="the server ended with 137"):
            Server(command, free_port(), tmp_path / "log", receiver.environ).start()
        root, phases = wait_for_start(receiver)
    assert root["status"] == 2
    assert root["attributes"][semconv.ERROR_TYPE] == "process_died"
    assert root["attributes"][semconv.FAILED_STAGE] == "weights"
    assert [span["name"] for span in phases] == ["imports"]


LIFESPAN = """
import contextlib, sys
import torch, uvicorn
from starlette.applications import Starlette
from transformers import AutoModelForCausalLM

@contextlib.asynccontextmanager
async def lifespan(app):
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    torch.compile(lambda x: x * 2, backend="eager")(torch.ones(3))
    model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, pad_token_id=0)
    yield

uvicorn.run(Starlette(lifespan=lifespan), port=int(sys.argv[2]), log_level="warning")
"""

LOADING = """
import os, signal
from transformers import PreTrainedModel

class Model(PreTrainedModel):
    pass

class Name:  # loading begins with the name of the model
    def __fspath__(self):
        os.kill(os.getpid(), signal.SIGKILL)
    __str__ = __fspath__

Model.from_pretrained(Name())
"""


def _wait_for_request(receiver: OtlpReceiver, trace_id: str) -> dict[str, Any]:
    def spans() -> list[dict[str, Any]]:
        return [s for s in receiver.spans if s["trace_id"] == trace_id and s["name"] == "chat tiny-llama"]

    assert receiver.wait_for(lambda it: bool(spans()), 15), "the request has not arrived"
    return spans()[0]


def _startup_points(receiver: OtlpReceiver) -> dict[str, Any]:
    """Returns the latest point of each phase."""
    return {
        point["attributes"][semconv.STARTUP_PHASE]: point
        for metric in receiver.metrics
        if metric["name"] == semconv.STARTUP_DURATION.name
        for point in metric["points"]
    }
