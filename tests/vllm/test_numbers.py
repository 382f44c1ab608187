"""Exported values are compared with a delayed engine and with vLLM's own counters."""

from __future__ import annotations

import http.client
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from otel_infer import semconv
from tests.support.arrivals import arrived, requests_of
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import Server
from tests.support.toy_server import wait_until
from tests.support.trees import trace
from tests.vllm.asking import (
    CHAT,
    COMPLETIONS,
    METRICS,
    Answer,
    ConcurrentRequests,
    block_size,
    counters,
    prompt,
    send_request,
)
from tests.vllm.conftest import Serve
from tests.vllm.stalls import stall, stalled, stalling

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
MS = 1_000_000
FEW_BLOCKS = "--block-size 32 --num-gpu-blocks-override 12 --max-num-batched-tokens 64 --max-model-len 256"


@pytest.fixture(scope="module")
def server(serve: Serve) -> Server:
    """Starts a server with one step at a time and KV blocks for a few requests only."""
    options = ["--no-async-scheduling", "--scheduler-cls", "tests.vllm.stalling.Synchronous"]
    server = serve(*options, *FEW_BLOCKS.split(), environ={"OTEL_METRIC_EXPORT_INTERVAL": "500"})
    for _ in range(2):
        send_request(server.port, CHAT, messages=messages(4), max_tokens=4, stream=True)
    return server


def messages(words: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt(words)}]


def spans_of(receiver: OtlpReceiver, answer: Answer) -> list[dict[str, Any]]:
    return trace(receiver, answer.trace_id, "chat tiny")


def named(spans: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [span for span in spans if span["name"] == name]


def test_hidden_queue_is_the_rest_of_the_step(server: Server, receiver: OtlpReceiver) -> None:
    stall(server, "prefill", 300)
    client = ConcurrentRequests()
    client.send_request(server.port, CHAT, messages=messages(8), max_tokens=12, stream=True)
    stalling(server)
    time.sleep(0.1)
    client.send_request(server.port, CHAT, messages=messages(8), max_tokens=12, stream=True)
    first, second = (spans_of(receiver, answer) for answer in client.answers())
    (prefill,), (queue,) = named(first, "prefill"), named(second, "queue")
    rest_ms = (prefill["end"] - queue["start"]) / MS
    assert 100 < rest_ms < 250
    assert queue["attributes"][semconv.QUEUE_HIDDEN] * 1e3 == pytest.approx(rest_ms, abs=5)
    (request,) = named(second, "chat tiny")
    assert request["attributes"]["infer.latency.hidden_queue"] * 1e3 == pytest.approx(rest_ms, abs=5)
    stalled(server)


def test_a_delayed_step_shows_on_exactly_its_requests(server: Server, receiver: OtlpReceiver) -> None:
    stall(server, "decode", 80, members=3)
    client = ConcurrentRequests()
    for _ in range(3):
        client.send_request(
            server.port, CHAT, messages=messages(4), max_tokens=60, ignore_eos=True, stream=True
        )
    members = stalled(server)["members"]
    late = send_request(server.port, CHAT, messages=messages(4), max_tokens=4, stream=True)
    answers = [*client.answers(), late]
    slow: dict[str, list[int]] = {}
    for answer in answers:
        spans = spans_of(receiver, answer)
        (request,) = named(spans, "chat tiny")
        steps = [s for s in named(spans, "decode step") if s["end"] - s["start"] >= 75 * MS]
        slow[request["attributes"][semconv.RESPONSE_ID]] = [s["attributes"][semconv.STEP_ID] for s in steps]
    in_it = {request_id for request_id in slow if any(member.startswith(request_id) for member in members)}
    assert {request_id for request_id, steps in slow.items() if steps} == in_it
    assert len(in_it) == len(members) == 3
    assert len({tuple(steps) for steps in slow.values() if steps}) == 1


def test_a_worker_reports_its_time_for_each_step(server: Server, receiver: OtlpReceiver) -> None:
    send_request(server.port, CHAT, messages=messages(4), max_tokens=20, stream=True)
    assert receiver.wait_for(lambda it: [m for m in it.metrics if m["name"] == semconv.STEP_EXECUTION.name])
    (point,) = [m for m in receiver.metrics if m["name"] == semconv.STEP_EXECUTION.name][-1]["points"]
    steps = [m for m in receiver.metrics if m["name"] == semconv.STEP_DURATION.name][-1]["points"]
    assert point["attributes"][semconv.WORKER_RANK] == 0
    assert point["attributes"][semconv.PROCESS_PID] in {
        step["attributes"][semconv.PROCESS_PID] for step in steps
    }
    assert point["count"] == sum(step["count"] for step in steps)
    assert 0 < point["sum"] < sum(step["sum"] for step in steps)


def test_a_preempted_request_is_sampled_with_its_cost(server: Server, receiver: OtlpReceiver) -> None:
    client = ConcurrentRequests()
    for _ in range(6):
        client.send_request(
            server.port, CHAT, messages=messages(20), max_tokens=150, ignore_eos=True, stream=True
        )
    answers = client.answers()
    assert [answer.status for answer in answers] == [200] * 6
    requests = arrived(receiver, *[answer.trace_id for answer in answers])
    preempted = [request for request in requests if semconv.PREEMPTIONS in request["attributes"]]
    assert preempted, "nothing was preempted: the cache is too large"
    for request in preempted:
        assert request["attributes"][semconv.KEEP_REASON] == "preempted"
        assert request["attributes"]["infer.latency.preemption"] > 0
        assert request["attributes"]["gen_ai.usage.output_tokens"] == 150
    decodes = [span for span in receiver.spans if span["name"] == "decode"]
    assert max(span["attributes"].get(semconv.KV_UTILIZATION_END, 0) for span in decodes) > 0.8


def test_counters_equal_vllms_own(server: Server, receiver: OtlpReceiver) -> None:
    same = prompt(100)
    for _ in range(3):
        send_request(server.port, COMPLETIONS, prompt=same, max_tokens=20, stream=True)
    gone = send_request(server.port, CHAT, messages=messages(8), max_tokens=200, stream=True, close_after=4)
    arrived(receiver, gone.trace_id)
    vllm_values = counters(server.port)
    expected = {
        ("infer.request.tokens", "input"): vllm_values["vllm:prompt_tokens_total"],
        ("infer.request.preemptions", None): vllm_values["vllm:num_preemptions_total"],
        ("infer.kv_cache.prefix.queries", None): vllm_values["vllm:prefix_cache_queries_total"],
        ("infer.kv_cache.prefix.hits", None): vllm_values["vllm:prefix_cache_hits_total"],
    }
    assert vllm_values["vllm:num_preemptions_total"] > 0 and vllm_values["vllm:prefix_cache_hits_total"] > 0
    wait_until(
        lambda: all(exported_counters(receiver).get(key) == value for key, value in expected.items()) or None,
        5,
    )
    assert exported_counters(receiver)["infer.kv_cache.block.size", None] == block_size(server.port)
    finished = vllm_values["vllm:request_success_total"]
    requests = [span for spans in requests_of(receiver).values() for span in spans]
    ends = [tuple(span["attributes"]["gen_ai.response.finish_reasons"]) for span in requests]
    assert len(requests) == finished + ends.count(("abort",)) - vllm_values.get("aborted", 0)
    assert ends.count(("abort",)) == 1
    complete = [span for span in requests if span["trace_id"] != gone.trace_id]
    tokens = sum(span["attributes"]["gen_ai.usage.output_tokens"] for span in complete)
    left = next(span for span in requests if span["trace_id"] == gone.trace_id)
    assert (
        tokens
        <= vllm_values["vllm:generation_tokens_total"]
        <= tokens + left["attributes"]["gen_ai.usage.output_tokens"]
    )


def exported_counters(receiver: OtlpReceiver) -> dict[tuple[str, Any], float]:
    """Returns the last values of the exported counters, by name and type of token."""
    found: dict[tuple[str, Any], dict[Any, float]] = defaultdict(dict)
    for metric in receiver.metrics:
        for point in metric["points"] if metric["name"].startswith("infer.") else ():
            if "value" in point:
                key = metric["name"], point["attributes"].get(semconv.TOKEN_TYPE)
                found[key][tuple(sorted(map(str, point["attributes"].items())))] = point["value"]
    return {key: sum(series.values()) for key, series in found.items()}


Length = Callable[[dict[str, Any]], list[float]]


def test_medians_are_within_one_bucket_of_vllms_histograms(server: Server, receiver: OtlpReceiver) -> None:
    """vLLM's first bucket of token latency ends at 5 ms, its first bucket of queue time at 0.3 s."""
    by_trace: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for span in receiver.spans:
        by_trace[span["trace_id"]].append(span)
    ttft = [s["attributes"][semconv.TTFT] for s in receiver.spans if semconv.TTFT in s["attributes"]]
    queue = [(s["end"] - s["start"]) / 1e9 for s in receiver.spans if s["name"] == "queue"]
    steps = [(s["end"] - s["start"]) / 1e9 for s in receiver.spans if s["name"] == "decode step"]
    for name, measured in (
        ("vllm:time_to_first_token_seconds", ttft),
        ("vllm:request_queue_time_seconds", queue),
        ("vllm:inter_token_latency_seconds", steps),
    ):
        bounds, counts = histogram(server.port, name)
        half = counts[-1] / 2
        vllm_bucket = next(i for i, count in enumerate(counts) if count >= half)
        median = statistics.median(measured)
        own_bucket = next(i for i, bound in enumerate(bounds) if median <= bound)
        assert abs(own_bucket - vllm_bucket) <= 1, (name, sorted(measured), bounds, counts)


def histogram(port: int, name: str) -> tuple[list[float], list[float]]:
    """Upper bounds and cumulative counts of one of vLLM's histograms."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", METRICS)
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    rows = [line for line in lines if line.startswith(f"{name}_bucket")]
    bounds = [float(row.partition('le="')[2].partition('"')[0]) for row in rows]
    return bounds, [float(row.rpartition(" ")[2]) for row in rows]
