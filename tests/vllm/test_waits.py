"""Waits that keep a request from being scheduled even with free capacity: remote blocks, a grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest

from otel_infer import semconv
from tests.support.arrivals import arrived
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import Server
from tests.support.trees import trace
from tests.vllm.asking import CHAT, COMPLETIONS, ConcurrentRequests, eventually, prompt, send_request
from tests.vllm.conftest import Serve
from tests.vllm.fetching import AT_LEAST, TAKES_S

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
CONNECTOR = {
    "kv_connector": "Slow",
    "kv_connector_module_path": "tests.vllm.fetching",
    "kv_role": "kv_both",
}


@pytest.fixture(scope="module")
def server(serve: Serve) -> Server:
    return serve(
        "--kv-transfer-config", json.dumps(CONNECTOR), environ={"OTEL_METRIC_EXPORT_INTERVAL": "500"}
    )


def stage(spans: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (found,) = [span for span in spans if span["name"] == name]
    return found


def test_kv_transfer_is_stage_and_cause_of_queueing(server: Server, receiver: OtlpReceiver) -> None:
    send_request(server.port, COMPLETIONS, prompt=prompt(8), max_tokens=4)  # a warm-up without transfer
    answer = send_request(
        server.port, COMPLETIONS, prompt=prompt(AT_LEAST * 2), max_tokens=4, ignore_eos=True
    )
    spans = trace(receiver, answer.trace_id, "text_completion tiny")
    fetched, queue = stage(spans, semconv.SPAN_KV_TRANSFER), stage(spans, semconv.SPAN_QUEUE)
    assert queue["start"] <= fetched["start"] < fetched["end"] <= queue["end"]
    assert fetched["end"] - fetched["start"] >= TAKES_S * 1e9
    attributes = stage(spans, "text_completion tiny")["attributes"]
    assert attributes[semconv.LATENCY_BY_CAUSE[semconv.CAUSE_KV_TRANSFER]] >= TAKES_S
    assert attributes[semconv.USAGE_OUTPUT_TOKENS] == 4


def test_requests_waiting_for_blocks_are_counted(server: Server, receiver: OtlpReceiver) -> None:
    def send_together(first: int) -> None:
        client = ConcurrentRequests()
        for number in range(first, first + 8):
            client.send_request(
                server.port, COMPLETIONS, prompt=[number] * AT_LEAST * 2, max_tokens=60, ignore_eos=True
            )
        answers = client.answers()
        assert [answer.status for answer in answers] == [200] * 8, answers[0].body
        arrived(receiver, *[answer.trace_id for answer in answers])

    def waited() -> dict[str, set[float]]:
        """Returns the exported values of each reason."""
        values: dict[str, set[float]] = {}
        for metric in receiver.metrics:
            if metric["name"] == semconv.ENGINE_WAITING.name:
                for point in metric["points"]:
                    values.setdefault(point["attributes"][semconv.WAIT_REASON], set()).add(point["value"])
        return values

    for first in range(5, 85, 8):  # they wait for less than a second, which an export may miss
        send_together(first)
        if eventually(lambda: waited().get("kv_transfer", {0}) > {0}, 1.5):
            break
    assert max(waited()["kv_transfer"]) in range(1, 9)
    assert waited().keys() <= {"capacity", "kv_transfer"}


def test_a_grammar_is_a_stage_of_the_queue(server: Server, receiver: OtlpReceiver) -> None:
    messages = [{"role": "user", "content": prompt(8)}]
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    response_format = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    answer = send_request(
        server.port, CHAT, messages=messages, max_tokens=20, response_format=response_format
    )
    spans = trace(receiver, answer.trace_id, "chat tiny")
    grammar, queue = stage(spans, semconv.SPAN_GRAMMAR), stage(spans, semconv.SPAN_QUEUE)
    assert queue["start"] <= grammar["start"] < grammar["end"] <= queue["end"]
    plain = send_request(server.port, CHAT, messages=messages, max_tokens=20)
    names = {span["name"] for span in trace(receiver, plain.trace_id, "chat tiny")}
    assert semconv.SPAN_GRAMMAR not in names
