"""Every request of a real vLLM server is one tree over all of its processes, below the client's span."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from otel_infer import semconv
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import Server
from tests.support.trees import trace, tree
from tests.vllm.asking import (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    Answer,
    ConcurrentRequests,
    prompt,
    send_request,
    texts,
)
from tests.vllm.conftest import Serve
from tests.vllm.serving import SEQUENCES
from tests.vllm.stalls import stall, stalling

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
STAGES = ["    ingress", "    tokenize", "    queue", "    prefill"]


@pytest.fixture(scope="module")
def server(serve: Serve) -> Server:
    server = serve("--scheduler-cls", "tests.vllm.stalling.Asynchronous")
    send_request(server.port, CHAT, messages=messages(4), max_tokens=2)
    return server


def messages(words: int, word: str = "time") -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt(words, word)}]


def spans_of(receiver: OtlpReceiver, answer: Answer, request: str = "chat tiny") -> list[dict[str, Any]]:
    return trace(receiver, answer.trace_id, request)


def only_span(spans: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The only span of this name."""
    (span,) = [span for span in spans if span["name"] == name]
    return span


def test_one_trace_has_the_start_of_all_processes(server: Server, receiver: OtlpReceiver) -> None:
    assert receiver.wait_for(
        lambda it: [span for span in it.spans if span["name"] == semconv.SPAN_SERVER_START]
    )
    (root,) = [span for span in receiver.spans if span["name"] == semconv.SPAN_SERVER_START]
    spans = [span for span in receiver.spans if span["trace_id"] == root["trace_id"]]
    # On a busy machine a second may pass between two imports, which are then phases of their own.
    drawn = [line for line, _ in itertools.groupby(tree(spans, ""))]
    assert sorted(drawn) == sorted(
        [
            "server start",
            "  imports",
            "  ready",
            "  engine start",
            "    imports",
            "  worker start",
            "    imports",
            "    weights",
            "    warmup",
        ]
    )
    assert not [span for span in spans if semconv.ERROR_TYPE in span["attributes"]]
    assert server.log.read_text(errors="replace").count("hooks bound") == 1


# ── requests that succeed ────────────────────────────────────────────────────────────────────────────────────────


def test_streamed_request_is_one_tree_over_all_processes(server: Server, receiver: OtlpReceiver) -> None:
    answer = send_request(server.port, CHAT, messages=messages(20), max_tokens=8, stream=True)
    assert 1 <= len(texts(answer)) <= 8  # a token without text, for example half a character, has no chunk
    spans = spans_of(receiver, answer)
    assert tree(spans, answer.parent_id) == [
        "POST /v1/chat/completions",
        "  chat tiny",
        *STAGES,
        "    decode",
        "      decode step ×7",
        "    postprocess",
    ]
    request = only_span(spans, "chat tiny")
    assert (
        request["attributes"].items()
        >= {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "vllm",
            "gen_ai.request.model": "tiny",
            "gen_ai.request.max_tokens": 8,
            "gen_ai.usage.output_tokens": 8,
            "gen_ai.response.finish_reasons": ["length"],
            semconv.RESPONSE_ID: answer.events[0]["id"],
        }.items()
    )
    assert only_span(spans, "queue")["attributes"].keys() >= {semconv.QUEUE_HIDDEN, semconv.QUEUE_SCHEDULER}
    timed = only_span(spans, "decode")["attributes"]
    assert timed[semconv.DEVICE_METHOD] == "host"  # there is no device, so no device values are exported
    assert timed[semconv.DEVICE_STEPS] == timed[semconv.DEVICE_STEPS_ALL] == 7
    assert not {semconv.DEVICE_BOTTLENECK, semconv.DEVICE_CLOCK_ERROR} & timed.keys()
    assert not [span for span in spans if semconv.DEVICE_SPAN in span["attributes"]]


def test_completion_has_the_id_sent_to_its_client(server: Server, receiver: OtlpReceiver) -> None:
    answer = send_request(server.port, COMPLETIONS, prompt=prompt(6), max_tokens=4)
    spans = spans_of(receiver, answer, "text_completion tiny")
    assert tree(spans, answer.parent_id) == [
        "POST /v1/completions",
        "  text_completion tiny",
        *STAGES,
        "    decode",
        "      decode step ×3",
        "    postprocess",
    ]
    request = only_span(spans, "text_completion tiny")
    assert request["attributes"][semconv.RESPONSE_ID] == answer.body["id"]
    assert request["attributes"]["gen_ai.usage.input_tokens"] == answer.body["usage"]["prompt_tokens"]


def test_two_sequences_of_one_prompt_share_its_steps(server: Server, receiver: OtlpReceiver) -> None:
    answer = send_request(server.port, CHAT, messages=messages(8), max_tokens=5, n=2)
    assert len(answer.body["choices"]) == 2
    spans = spans_of(receiver, answer)
    attributes = only_span(spans, "chat tiny")["attributes"]
    assert attributes[semconv.SEQUENCES] == 2
    assert attributes["gen_ai.usage.output_tokens"] == 10
    assert attributes["gen_ai.response.finish_reasons"] == ["length", "length"]
    steps = [span for span in spans if span["name"] == semconv.SPAN_DECODE_STEP]
    after_first = sum(step["attributes"].get(semconv.STEP_TOKENS, 1) for step in steps)
    assert after_first in (8, 9)  # the second sequence starts with the first one, or a step later
    assert len({step["attributes"][semconv.STEP_ID] for step in steps}) == len(steps)


def test_stop_token_ends_the_request_with_its_step(server: Server, receiver: OtlpReceiver) -> None:
    """On a CPU vLLM has one step in flight, so no result is discarded."""
    options = {"prompt": prompt(5), "temperature": 0, "ignore_eos": True}
    first = send_request(server.port, COMPLETIONS, max_tokens=12, return_token_ids=True, **options)
    tokens = first.body["choices"][0]["token_ids"]
    stop = tokens[-1]
    answer = send_request(server.port, COMPLETIONS, max_tokens=40, stop_token_ids=[stop], **options)
    assert answer.body["choices"][0]["finish_reason"] == "stop"
    spans = spans_of(receiver, answer, "text_completion tiny")
    steps = [span for span in spans if span["name"] == semconv.SPAN_DECODE_STEP]
    assert len(steps) == tokens.index(stop)
    assert semconv.STEPS_DISCARDED not in only_span(spans, "decode")["attributes"]


def test_two_prompts_of_one_request_are_one_tree(server: Server, receiver: OtlpReceiver) -> None:
    answer = send_request(server.port, COMPLETIONS, prompt=[prompt(6), prompt(9)], max_tokens=3)
    spans = spans_of(receiver, answer, "text_completion tiny")
    attributes = only_span(spans, "text_completion tiny")["attributes"]
    assert attributes["gen_ai.usage.input_tokens"] == answer.body["usage"]["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == 6
    assert attributes[semconv.RESPONSE_ID] == answer.body["id"]


def test_a_response_is_one_tree(server: Server, receiver: OtlpReceiver) -> None:
    answer = send_request(server.port, RESPONSES, input=prompt(6), max_output_tokens=4)
    assert answer.status == 200, answer.body
    spans = spans_of(receiver, answer)
    assert tree(spans, answer.parent_id)[:2] == ["POST /v1/responses", "  chat tiny"]
    assert only_span(spans, "chat tiny")["attributes"][semconv.RESPONSE_ID] == answer.body["id"]


def test_a_repeated_prompt_is_read_from_the_cache(server: Server, receiver: OtlpReceiver) -> None:
    long = prompt(200, "cache")
    first = send_request(server.port, COMPLETIONS, prompt=long, max_tokens=2)
    again = send_request(server.port, COMPLETIONS, prompt=long, max_tokens=2)
    before, after = (
        only_span(spans_of(receiver, answer, "text_completion tiny"), "text_completion tiny")["attributes"]
        for answer in (first, again)
    )
    assert semconv.USAGE_CACHE_READ not in before
    assert after[semconv.USAGE_CACHE_READ] >= 128


# ── requests that fail ───────────────────────────────────────────────────────────────────────────────────────────


def test_prompt_over_the_context_limit_has_a_trace(server: Server, receiver: OtlpReceiver) -> None:
    answer = send_request(server.port, CHAT, messages=messages(900), max_tokens=8)
    assert answer.status == 400
    spans = spans_of(receiver, answer, "tokenize")
    assert tree(spans, answer.parent_id) == [
        "POST /v1/chat/completions",
        "  ingress",
        "  tokenize",
        "  postprocess",
    ]
    assert only_span(spans, "POST /v1/chat/completions")["attributes"]["http.response.status_code"] == 400


def check_disconnect(receiver: OtlpReceiver, answer: Answer, stage: str) -> list[dict[str, Any]]:
    """Returns the trace of a request whose client disconnected in this stage."""
    spans = spans_of(receiver, answer)
    attributes = only_span(spans, "chat tiny")["attributes"]
    assert attributes[semconv.FAILED_STAGE] == stage, tree(spans, answer.parent_id)
    assert attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert attributes[semconv.ERROR_TYPE] == semconv.ERROR_CLIENT_DISCONNECT
    assert all(span["parent_span_id"] for span in spans)
    return spans


def test_a_disconnect_in_decode_is_recorded(server: Server, receiver: OtlpReceiver) -> None:
    answer = send_request(server.port, CHAT, messages=messages(8), max_tokens=400, stream=True, close_after=6)
    spans = check_disconnect(receiver, answer, "decode")
    steps = [span for span in spans if span["name"] == semconv.SPAN_DECODE_STEP]
    assert len(texts(answer)) - 1 <= len(steps) < 399
    assert only_span(spans, "chat tiny")["attributes"]["gen_ai.usage.output_tokens"] == len(steps) + 1


def test_a_token_after_the_disconnect_counts_as_discarded(server: Server, receiver: OtlpReceiver) -> None:
    stall(server, "execution", 600)
    answer = send_request(server.port, CHAT, messages=messages(8), max_tokens=400, stream=True, close_in=0.4)
    spans = check_disconnect(receiver, answer, "decode")
    decode = only_span(spans, semconv.SPAN_DECODE)["attributes"]
    assert decode[semconv.STEPS_DISCARDED] == 1
    steps = [span for span in spans if span["name"] == semconv.SPAN_DECODE_STEP]
    assert decode.get(semconv.STEPS_COUNT, 0) == len(steps) < 5


def test_a_disconnect_in_prefill_is_recorded(server: Server, receiver: OtlpReceiver) -> None:
    stall(server, "prefill", 500)
    answer = send_request(server.port, CHAT, messages=messages(8), max_tokens=8, stream=True, close_in=0.25)
    spans = check_disconnect(receiver, answer, "prefill")
    assert not [span for span in spans if span["name"] == semconv.SPAN_DECODE_STEP]


def test_a_disconnect_in_the_queue_is_recorded(server: Server, receiver: OtlpReceiver) -> None:
    stall(server, "decode", 400, members=SEQUENCES)
    others = ConcurrentRequests()
    for _ in range(SEQUENCES):
        others.send_request(server.port, CHAT, messages=messages(8), max_tokens=300, ignore_eos=True)
    stalling(server)
    answer = send_request(server.port, CHAT, messages=messages(8), max_tokens=8, stream=True, close_in=0.2)
    assert [other.status for other in others.answers()] == [200] * SEQUENCES
    spans = check_disconnect(receiver, answer, "queue")
    assert tree(spans, answer.parent_id) == [
        "POST /v1/chat/completions",
        "  chat tiny",
        "    ingress",
        "    tokenize",
        "    queue",
    ]
