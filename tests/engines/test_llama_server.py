"""The server of llama-cpp-python: one request at a time has the model, and the others wait in its queue."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.gguf_models import make_gguf
from tests.servers.receiving import spans_of
from tests.servers.requests_sent import Answer, make_ids, send
from tests.servers.serving import start_command, stop_module
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import Server
from tests.support.trees import tree

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path
) -> Iterator[tuple[Server, OtlpReceiver]]:
    folder = tmp_path_factory.mktemp("llama")
    model = make_gguf(folder / "tiny-llama.gguf", tiny_llama)
    command = (
        "-m", "llama_cpp.server", "--model", str(model), "--host", "127.0.0.1", "--port", "{port}", "--n_ctx", "512",
        "--n_threads", "1", "--n_batch", "64",
    )  # fmt: skip
    with OtlpReceiver() as receiver:
        server = start_command(command, receiver, folder / "log", "/v1/models")
        yield server, receiver
        stop_module(server)


def ask(server: Server, path: str = TEXT, max_tokens: int = 4, **fields: Any) -> Answer:
    question: dict[str, Any] = {"prompt": "why is the sky blue?"}
    if path == CHAT:
        question = {"messages": [{"role": "user", "content": "why is the sky blue?"}]}
    body = json.dumps({**question, "max_tokens": max_tokens, **fields}).encode()
    return send(server.port, "POST", path, body)


def draw(route: str, request: str, steps: int) -> list[str]:
    return [
        f"POST {route}", f"  {request}", "    ingress", "    queue wait", "    tokenize", "    queue", "    prefill",
        "    decode", f"      decode step ×{steps}", "    postprocess",
    ]  # fmt: skip


@pytest.mark.parametrize(("path", "request_name"), [(TEXT, "text_completion"), (CHAT, "chat")])
def test_a_completion_is_a_child_of_its_caller(
    served: tuple[Server, OtlpReceiver], path: str, request_name: str
) -> None:
    server, receiver = served
    answer = ask(server, path)
    used = json.loads(answer.body)["usage"]["completion_tokens"]
    spans = spans_of(receiver, answer.trace_id)
    assert tree(spans, answer.parent_id) == draw(path, f"{request_name} tiny-llama", used - 1)


def test_a_stream_has_its_steps(served: tuple[Server, OtlpReceiver]) -> None:
    server, receiver = served
    answer = ask(server, stream=True, max_tokens=8)
    assert answer.body.endswith(b"data: [DONE]\n\n")
    lines = tree(spans_of(receiver, answer.trace_id), answer.parent_id)
    assert lines[:8] == draw(TEXT, "text_completion tiny-llama", 0)[:8]


def test_a_request_waits_for_the_one_before_it(served: tuple[Server, OtlpReceiver]) -> None:
    server, receiver = served
    first = threading.Thread(target=ask, args=(server, TEXT, 400))
    first.start()
    time.sleep(0.03)
    answer = ask(server)
    first.join()
    spans = spans_of(receiver, answer.trace_id)
    wait = next(span for span in spans if span["name"] == "queue wait")
    whole = next(span for span in spans if span["name"] == f"POST {TEXT}")
    assert length_of(wait) > 0.5 * length_of(whole) > 5e6


def read_until_cut(
    server: Server, ids: tuple[str, str, str], has_begun: threading.Event, read: list[bytes]
) -> None:
    """Reads a stream that its server cuts. `ids`: those of the caller."""
    body = {"prompt": "why is the sky blue?", "max_tokens": 200, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    headers = {"traceparent": ids[2], "content-type": "application/json"}
    connection.request("POST", TEXT, json.dumps(body), headers)
    response = connection.getresponse()
    response.readline()
    has_begun.set()
    try:
        read.append(response.read())
    except http.client.IncompleteRead as cut:
        read.append(cut.partial)
    connection.close()


def test_a_stream_that_a_later_request_interrupts_has_failed(served: tuple[Server, OtlpReceiver]) -> None:
    """By the server's `interrupt_requests`, which is on unless it is told otherwise."""
    server, receiver = served
    ids, has_begun, read = make_ids(), threading.Event(), list[bytes]()
    first = threading.Thread(target=read_until_cut, args=(server, ids, has_begun, read))
    first.start()
    assert has_begun.wait(30)
    ask(server)
    first.join()
    assert read[0].endswith(b"data: [DONE]\n\n")
    spans = spans_of(receiver, ids[0])
    for name in (f"POST {TEXT}", "text_completion tiny-llama"):
        span = next(span for span in spans if span["name"] == name)
        assert (span["status"], span["attributes"]["error.type"]) == (2, "_OTHER")


def length_of(span: dict[str, Any]) -> int:
    return int(span["end"]) - int(span["start"])


def test_an_embedding_that_is_refused_has_waited_as_well(served: tuple[Server, OtlpReceiver]) -> None:
    server, receiver = served
    body = json.dumps({"input": "why?", "model": "any"}).encode()
    answer = send(server.port, "POST", "/v1/embeddings", body)
    assert answer.status == 500
    assert tree(spans_of(receiver, answer.trace_id), answer.parent_id) == [
        "POST /v1/embeddings", "  embeddings tiny-llama", "    ingress", "    queue wait", "    forward", "    postprocess",
    ]  # fmt: skip
