"""What keeps a request from being scheduled, whatever room there is: blocks from elsewhere, a grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest

from otel_infer import semconv
from tests.support.arrivals import arrived
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import Server
from tests.support.trees import trace
from tests.vllm.asking import CHAT, COMPLETIONS, Asking, ask, eventually, prompt
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


def test_blocks_that_come_from_elsewhere_are_a_stage_of_the_queue_and_to_blame_for_it(
    server: Server, receiver: OtlpReceiver
) -> None:
    ask(
        server.port, COMPLETIONS, prompt=prompt(8), max_tokens=4
    )  # the first of its kind, and nothing fetched
    answer = ask(server.port, COMPLETIONS, prompt=prompt(AT_LEAST * 2), max_tokens=4, ignore_eos=True)
    spans = trace(receiver, answer.trace_id, "text_completion tiny")
    fetched, queue = stage(spans, semconv.SPAN_KV_TRANSFER), stage(spans, semconv.SPAN_QUEUE)
    assert queue["start"] <= fetched["start"] < fetched["end"] <= queue["end"]
    assert fetched["end"] - fetched["start"] >= TAKES_S * 1e9
    blamed = stage(spans, "text_completion tiny")["attributes"]
    assert blamed[semconv.LATENCY_BY_CAUSE[semconv.CAUSE_KV_TRANSFER]] >= TAKES_S
    assert blamed[semconv.USAGE_OUTPUT_TOKENS] == 4


def test_how_many_wait_for_blocks_is_told_while_they_do(server: Server, receiver: OtlpReceiver) -> None:
    def ask_together(first: int) -> None:
        asking = Asking()
        for number in range(first, first + 8):
            asking.ask(
                server.port, COMPLETIONS, prompt=[number] * AT_LEAST * 2, max_tokens=60, ignore_eos=True
            )
        answers = asking.answers()
        assert [answer.status for answer in answers] == [200] * 8, answers[0].body
        arrived(receiver, *[answer.trace_id for answer in answers])

    def waited() -> dict[str, set[float]]:
        """What was said of each reason."""
        said: dict[str, set[float]] = {}
        for metric in receiver.metrics:
            if metric["name"] == semconv.ENGINE_WAITING.name:
                for point in metric["points"]:
                    said.setdefault(point["attributes"][semconv.WAIT_REASON], set()).add(point["value"])
        return said

    for first in range(5, 85, 8):  # they wait for less than a second, and between two exports nobody looks
        ask_together(first)
        if eventually(lambda: waited().get("kv_transfer", {0}) > {0}, 1.5):
            break
    assert max(waited()["kv_transfer"]) in range(1, 9)
    assert waited().keys() <= {"capacity", "kv_transfer"}


def test_a_grammar_is_a_stage_of_the_queue(server: Server, receiver: OtlpReceiver) -> None:
    said = [{"role": "user", "content": prompt(8)}]
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    form = {"type": "json_schema", "json_schema": {"name": "who", "schema": schema}}
    answer = ask(server.port, CHAT, messages=said, max_tokens=20, response_format=form)
    spans = trace(receiver, answer.trace_id, "chat tiny")
    grammar, queue = stage(spans, semconv.SPAN_GRAMMAR), stage(spans, semconv.SPAN_QUEUE)
    assert queue["start"] <= grammar["start"] < grammar["end"] <= queue["end"]
    plain = ask(server.port, CHAT, messages=said, max_tokens=20)
    names = {span["name"] for span in trace(receiver, plain.trace_id, "chat tiny")}
    assert semconv.SPAN_GRAMMAR not in names
