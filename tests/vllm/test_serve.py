"""One request of a real vLLM server is one tree over all of its processes, below its caller's span."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from otel_infer import semconv
from tests.otlp_receiver import OtlpReceiver
from tests.served import Server, chat
from tests.trees import trace, tree
from tests.vllm.serving import READY_S, vllm_serve

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
REQUEST = "chat tiny"


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
    spans = trace(receiver, answer.trace_id, REQUEST)
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
