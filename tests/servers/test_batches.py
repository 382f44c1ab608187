"""Batchers by hand: each request has its wait, its batch, the call of the model, and is counted once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from otel_infer import semconv
from tests.servers.receiving import spans_of
from tests.servers.requests_sent import Answer, send
from tests.servers.serving import ServedApp, make_command
from tests.support.arrivals import counted
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import Server, free_port
from tests.support.trees import tree

BATCHERS = {
    "asyncio.Queue": ServedApp(
        ("-m", "uvicorn", "--port", "{port}", "tests.servers.apps.batcher_app:app"), "/classify/{name}"
    ),
    "queue.Queue": ServedApp(("-m", "tests.servers.apps.worker_app", "{port}"), "/classify/<name>"),
}
Start = Callable[[ServedApp], tuple[int, OtlpReceiver]]
SIZE = 4


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a server; it ends with the test."""
    running: list[Server] = []
    with OtlpReceiver() as receiver:

        def start(app: ServedApp) -> tuple[int, OtlpReceiver]:
            port = free_port()
            environ = {
                **receiver.environ,
                "OTEL_METRIC_EXPORT_INTERVAL": "1000",
                "PYTHONPATH": str(Path.cwd()),
            }
            server = Server(make_command(app, port), port, tmp_path / "log", environ)
            running.append(server)
            server.start()
            return port, receiver

        yield start
        for server in running:
            server.stop()
            assert "hook on" not in server.read_log()


def send_at_once(port: int, path: str) -> list[Answer]:
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(lambda _: send(port, "POST", path), range(SIZE)))


def find_spans(spans: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [span for span in spans if span["name"] == name]


@pytest.mark.parametrize("name", BATCHERS)
def test_each_request_of_a_batch_has_its_waits_and_the_call(start: Start, name: str) -> None:
    app = BATCHERS[name]
    port, receiver = start(app)
    send(port, "POST", "/classify/a")  # warms the model up
    answers = send_at_once(port, "/classify/a")
    sizes, links = [], 0
    for answer in answers:
        assert answer.status == 200
        spans = spans_of(receiver, answer.trace_id)
        assert tree(spans, answer.parent_id) == [
            f"POST {app.route}",
            "  inference Scorer",
            "    ingress",
            "    queue wait",
            "    batch wait",
            "    forward",
            "    postprocess",
        ]
        (wait,), (forward,) = find_spans(spans, "batch wait"), find_spans(spans, "forward")
        (request,) = find_spans(spans, "inference Scorer")
        sizes.append(wait["attributes"][semconv.ITEMS])
        assert forward["attributes"][semconv.ITEMS] == wait["attributes"][semconv.ITEMS]
        links += len(request["links"])
    assert max(sizes) > 1
    assert links >= 2 * (max(sizes) - 1)
    assert receiver.wait_for(lambda it: counted(it) == SIZE + 1, 10), counted(receiver)


def test_a_request_alone_waits_for_the_window(start: Start) -> None:
    port, receiver = start(BATCHERS["asyncio.Queue"])
    send(port, "POST", "/classify/a")
    answer = send(port, "POST", "/classify/a")
    (wait,) = find_spans(spans_of(receiver, answer.trace_id), "batch wait")
    assert 0.045 <= (wait["end"] - wait["start"]) / 1e9 <= 0.1


def test_a_batch_of_generate_has_steps_for_each_request(start: Start, tiny_llama: Path) -> None:
    port, receiver = start(
        ServedApp(("-m", "tests.servers.apps.generator_app", "{port}", str(tiny_llama)), "")
    )
    send(port, "POST", "/generate")
    waits = 0
    for answer in send_at_once(port, "/generate"):
        spans = spans_of(receiver, answer.trace_id)
        lines = [line.strip() for line in tree(spans, answer.parent_id)]
        assert lines[:2] == ["POST /generate", f"text_completion {tiny_llama.name}"]
        waits += "batch wait" in lines  # the item that was taken last has none
        assert [line for line in lines if line in ("queue wait", "prefill", "decode")] == [
            "queue wait", "prefill", "decode",
        ]  # fmt: skip
        (request,) = [span for span in spans if span["name"].startswith("text_completion")]
        assert request["attributes"][semconv.USAGE_OUTPUT_TOKENS] == 6
    assert waits >= 1
