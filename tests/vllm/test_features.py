"""Engine features: speculative decoding, priorities, structured output, several API servers."""

from __future__ import annotations

import json

import pytest

from otel_infer import semconv
from tests.support.arrivals import arrived, assert_nothing_came_twice
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import Server
from tests.support.trees import trace
from tests.vllm.asking import CHAT, COMPLETIONS, ConcurrentRequests, counters, prompt, send_request
from tests.vllm.conftest import Serve
from tests.vllm.serving import sidecars

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
SPECULATIVE = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


@pytest.fixture(scope="module")
def server(serve: Serve) -> Server:
    return serve(
        "--speculative-config", json.dumps(SPECULATIVE), "--scheduling-policy", "priority", "--api-server-count", "2",
        environ={"OTEL_METRIC_EXPORT_INTERVAL": "500"},
    )  # fmt: skip


def test_an_accepted_draft_step_has_several_tokens(server: Server, receiver: OtlpReceiver) -> None:
    answer = send_request(
        server.port, COMPLETIONS, prompt=prompt(60), max_tokens=40, ignore_eos=True, temperature=0
    )
    spans = trace(receiver, answer.trace_id, "text_completion tiny")
    (request,) = [span for span in spans if span["name"] == "text_completion tiny"]
    steps = [span for span in spans if span["name"] == semconv.SPAN_DECODE_STEP]
    attributes = request["attributes"]
    assert attributes["gen_ai.usage.output_tokens"] == 40
    tokens = [step["attributes"].get(semconv.STEP_TOKENS, 1) for step in steps]
    assert sum(tokens) in range(36, 40)  # the prefill step may also deliver several tokens
    assert attributes[semconv.TOKENS_DRAFTED] >= attributes.get(semconv.TOKENS_ACCEPTED, 0)
    vllm_counters = counters(server.port)
    assert vllm_counters["vllm:spec_decode_num_draft_tokens_total"] == attributes[semconv.TOKENS_DRAFTED]
    assert vllm_counters["vllm:spec_decode_num_accepted_tokens_total"] == attributes.get(
        semconv.TOKENS_ACCEPTED, 0
    )


def test_priorities_and_structured_output_keep_the_trace_complete(
    server: Server, receiver: OtlpReceiver
) -> None:
    client = ConcurrentRequests()
    messages = [{"role": "user", "content": prompt(8)}]
    response_format = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "object", "properties": {}}},
    }
    for number in range(12):
        more = {"response_format": response_format} if number % 3 == 0 else {}
        client.send_request(server.port, CHAT, messages=messages, max_tokens=30, priority=number % 4, **more)
    answers = client.answers()
    assert [answer.status for answer in answers] == [200] * 12, answers[0].body
    requests = arrived(receiver, *[answer.trace_id for answer in answers])
    for answer, request in zip(answers, requests):
        used = answer.body["usage"]
        assert request["attributes"]["gen_ai.usage.output_tokens"] == used["completion_tokens"]
        stages = {span["name"] for span in receiver.spans if span["trace_id"] == answer.trace_id}
        assert stages >= {"ingress", "tokenize", "queue", "prefill", "decode", "postprocess"}
    assert_nothing_came_twice(receiver)
    assert len(sidecars(server)) == 1
