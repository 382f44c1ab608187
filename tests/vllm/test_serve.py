"""One request of a real vLLM server is one tree over all of its processes, below its caller's span."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_infer import semconv
from tests.otlp_receiver import OtlpReceiver
from tests.served import Server, chat
from tests.vllm.serving import READY_S, vllm_serve

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
REQUEST = "chat tiny"


def tree(spans: list[dict[str, Any]], parent: str, depth: int = 0) -> list[str]:
    """The spans below `parent`, indented, in order of time; steps in a row are counted."""
    lines: list[str] = []
    below = sorted((s for s in spans if s["parent_span_id"] == parent), key=lambda s: (s["start"], -s["end"]))
    for span in below:
        line = "  " * depth + span["name"]
        if lines and lines[-1].startswith(line + " ×"):
            lines[-1] = f"{line} ×{int(lines[-1].rpartition('×')[2]) + 1}"
            continue
        lines.append(f"{line} ×1" if span["name"] == semconv.SPAN_DECODE_STEP else line)
        lines += tree(spans, span["span_id"], depth + 1)
    return lines


def trace(receiver: OtlpReceiver, trace_id: str) -> list[dict[str, Any]]:
    """All spans of a trace, once its root is there."""

    def there(it: OtlpReceiver) -> bool:
        return any(span["trace_id"] == trace_id and span["kind"] == 2 for span in it.spans)

    assert receiver.wait_for(there, 15), "the request has not arrived"
    time.sleep(0.2)
    return [span for span in receiver.spans if span["trace_id"] == trace_id]


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def server(
    receiver: OtlpReceiver, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("logs") / "vllm.log"
    server = vllm_serve(tiny_llama, log, {**receiver.environ, "OTEL_INFER_STEPS": "all"}).start(READY_S)
    try:
        chat(server.port, Path("tiny"))
        yield server
    finally:
        server.stop()


def test_a_streamed_request_is_one_tree_over_all_processes(server: Server, receiver: OtlpReceiver) -> None:
    answer = chat(server.port, Path("tiny"), tokens=8, words=20)
    assert len(answer.chunks) == 8
    spans = trace(receiver, answer.trace_id)
    assert tree(spans, answer.parent_id) == [
        "POST /v1/chat/completions",
        "  chat tiny",
        "    ingress",
        "    tokenize",
        "    queue",
        "    prefill",
        "    decode",
        "      decode step ×7",
        "    postprocess",
    ]
    request = next(span for span in spans if span["name"] == REQUEST)
    assert (
        request["attributes"].items()
        >= {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "vllm",
            "gen_ai.request.model": "tiny",
            "gen_ai.request.max_tokens": 8,
            "gen_ai.usage.output_tokens": 8,
            "gen_ai.response.finish_reasons": ["length"],
        }.items()
    )
    queue = next(span for span in spans if span["name"] == "queue")
    assert queue["attributes"].keys() >= {semconv.QUEUE_HIDDEN, semconv.QUEUE_SCHEDULER}
