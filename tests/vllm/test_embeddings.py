"""Models that generate no tokens."""

from __future__ import annotations

import pytest

from otel_infer import semconv
from tests.support.arrivals import assert_nothing_came_twice
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.trees import trace, tree
from tests.vllm.asking import EMBEDDINGS, prompt, send_request
from tests.vllm.conftest import Serve

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


def test_an_embedding_has_a_queue_and_a_prefill(serve: Serve, receiver: OtlpReceiver) -> None:
    server = serve("--runner", "pooling")
    for texts in ([prompt(12)], [prompt(12), prompt(200)]):
        answer = send_request(server.port, EMBEDDINGS, input=texts)
        assert answer.status == 200 and len(answer.body["data"]) == len(texts), answer.body
        spans = trace(receiver, answer.trace_id, "embeddings tiny")
        stages = [line for line in tree(spans, answer.parent_id) if "step" not in line]
        assert stages == [
            "POST /v1/embeddings",
            "  embeddings tiny",
            "    ingress",
            *["    tokenize"] * len(texts),
            "    queue",
            "    prefill",
            "    postprocess",
        ]
        (request,) = [span for span in spans if span["name"] == "embeddings tiny"]
        assert request["attributes"]["gen_ai.usage.input_tokens"] == answer.body["usage"]["prompt_tokens"]
        assert semconv.TTFT not in request["attributes"]
    assert_nothing_came_twice(receiver)
