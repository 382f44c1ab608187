"""The examples under `otel-infer run`: complete span trees on the tape, even if the client disconnects."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from otel_infer import semconv
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.cli import replay
from otel_infer.export.sampling import tail_sampler
from otel_infer.export.spans import tree
from otel_infer.ringbuffer.events import ABORTED, OK
from tests.support.rings import stages_of
from tests.support.served import Server, free_port
from tests.support.trees import WAITS

pytestmark = pytest.mark.real

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
NO_EXPORT = {"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"}
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
CONCURRENCY = 6


class Answer(NamedTuple):
    """The response of one request: the events of its stream, or its body as one event."""

    trace_id: str
    parent_id: str
    status: int
    events: list[dict[str, Any]]


def post(port: int, path: str, body: dict[str, Any], disconnect_after: int = 0) -> Answer:
    """Sends a request with a new `traceparent`. The client disconnects after `disconnect_after` events; 0 = never."""
    trace_id, parent_id = secrets.token_hex(16), secrets.token_hex(8)
    headers = {"content-type": "application/json", "traceparent": f"00-{trace_id}-{parent_id}-01"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, json.dumps(body), headers)
    response = connection.getresponse()
    events: list[dict[str, Any]] = []
    if response.getheader("content-type", "").startswith("text/event-stream"):
        while line := response.readline():
            if line.startswith(b"data: {"):
                events.append(json.loads(line[6:]))
            if disconnect_after and len(events) >= disconnect_after:
                assert connection.sock is not None
                connection.sock.shutdown(socket.SHUT_RDWR)
                break
    else:
        events.append(json.loads(response.read()))
    connection.close()
    return Answer(trace_id, parent_id, response.status, events)


def run_concurrently(calls: list[Callable[[], Answer]]) -> list[Answer]:
    """Runs each call in a thread. Returns the answers in the order of `calls`."""
    answers: dict[int, Answer] = {}
    threads = [
        threading.Thread(target=lambda n=n, call=call: answers.__setitem__(n, call()))
        for n, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[number] for number in range(len(calls))]


def run_example(
    example: str, folder: Path, environ: Mapping[str, str], play: Callable[[int], list[Answer]]
) -> tuple[list[Answer], dict[str, RequestRecord]]:
    """Runs an example under the load of `play`, and ends it with SIGINT. Returns answers, and records by trace id."""
    port, tape = free_port(), folder / "server.tape"
    run = [sys.executable, "-m", "otel_infer", "run", "--show", "--tape", str(tape), "--"]
    command = [*run, sys.executable, str(EXAMPLES / example / "server.py")]
    variables = {**NO_EXPORT, **ONE_THREAD, **environ, "PORT": str(port)}
    with Server(command, port, folder / "server.log", variables) as server:
        answers = play(port)
        assert server.process is not None
        time.sleep(0.3)
        server.process.send_signal(signal.SIGINT)  # once, because a second signal would interrupt the flush
        assert server.process.wait(30) == 0, server.read_log()
    assert all(answer.status == 200 for answer in answers)
    records = {record.trace_id.hex(): record for record in replay.read_records(tape)}
    assert set(records) == {answer.trace_id for answer in answers}, server.read_log()
    assert "Traceback" not in server.read_log()
    return answers, records


def span_lines(record: RequestRecord, answer: Answer) -> list[str]:
    """Returns the indented names of the spans below the client's, without waits of a busy machine.

    Asserts that each parent contains its children.
    """
    spans = tree.build_request_spans(record, tail_sampler.Decision(True, 1000, "sampled"))
    by_id = {span.span_id: span for span in spans}
    found = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        depth, ancestor = 0, span
        while ancestor.parent_span_id in by_id:
            parent = by_id[ancestor.parent_span_id]
            assert parent.start <= ancestor.start <= ancestor.end <= parent.end, (parent.name, ancestor.name)
            ancestor, depth = parent, depth + 1
        assert ancestor.parent_span_id.hex() == answer.parent_id
        if span.name not in WAITS:
            found.append("  " * depth + span.name)
    return found


def assert_stages_in_sequence(record: RequestRecord, *names: str) -> None:
    """Asserts that the stages do not overlap, and that queue, prefill and decode are contiguous."""
    stages = [record.find_stage(name) for name in names]
    for before, after in itertools.pairwise(stages):
        assert before is not None and after is not None
        assert before.ended_at <= after.started_at, (before.name, after.name)
    queue, prefill, decode = (record.find_stage(name) for name in ("queue", "prefill", "decode"))
    assert queue is not None and prefill is not None and decode is not None
    assert queue.ended_at == prefill.started_at and prefill.ended_at == decode.started_at


def assert_each_token_has_a_step(record: RequestRecord, tokens: int) -> None:
    """Asserts one decode step per token after the first, each inside `decode`."""
    decode = record.find_stage(semconv.SPAN_DECODE)
    assert decode is not None and record.steps is not None
    assert record.output_tokens == tokens
    assert int(record.steps.tokens.sum()) == tokens
    assert len(record.steps) - 1 == tokens - 1
    assert decode.started_at <= int(record.steps.ended_at[1:].min())
    assert int(record.steps.ended_at.max()) == decode.ended_at
    assert not record.telemetry_lost


# ── examples/custom_loop ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Answer], dict[str, RequestRecord]]:
    def play(port: int) -> list[Answer]:
        def generate(number: int, tokens: int, disconnect_after: int = 0) -> Answer:
            body = {"prompt": "tell me of foxes " * number, "user": f"user {number}", "max_tokens": tokens}
            return post(port, "/v1/generate", body, disconnect_after)

        concurrent = run_concurrently([lambda n=n: generate(n, 150 + n) for n in range(1, CONCURRENCY + 1)])
        disconnected = generate(7, 5000, disconnect_after=4)
        return [*concurrent, disconnected, generate(8, 5)]

    return run_example("custom_loop", tmp_path_factory.mktemp("custom_loop"), {}, play)


LOOP_TREE = [
    "POST /v1/generate",
    "  text_completion toy",
    "    ingress",
    "    database",
    "    tokenize",
    "    queue",
    "    prefill",
    "    decode",
    "    postprocess",
]
LOOP_STAGES = [line.strip() for line in LOOP_TREE[2:]]


def test_custom_loop_records_every_stage(
    loop: tuple[list[Answer], dict[str, RequestRecord]],
) -> None:
    answers, records = loop
    for number, answer in enumerate(answers[:CONCURRENCY], 1):
        record = records[answer.trace_id]
        assert span_lines(record, answer) == LOOP_TREE
        assert_stages_in_sequence(record, *LOOP_STAGES[:-1])
        assert record.outcome == OK
        assert (record.provider, record.engine, record.finish_reasons) == ("custom", "custom", ("length",))
        assert (record.input_tokens, record.max_tokens) == (4 * number, 150 + number)
        assert_each_token_has_a_step(record, 150 + number)
        assert sum("text" in event for event in answer.events) == record.output_tokens
        assert record.chunks == 0  # not counted: they pass without a frame of ours


def test_database_stage_has_the_lookup_duration(
    loop: tuple[list[Answer], dict[str, RequestRecord]],
) -> None:
    answers, records = loop
    delays = []
    for answer in answers:
        stage = records[answer.trace_id].find_stage("database")
        assert stage is not None
        delays.append((stage.ended_at - stage.started_at) / 1e9 - answer.events[0]["database_s"])
    assert min(delays) >= -0.001
    assert sorted(delays)[len(delays) // 2] < 0.03


def test_concurrent_requests_share_steps(loop: tuple[list[Answer], dict[str, RequestRecord]]) -> None:
    answers, records = loop
    concurrent = [records[answer.trace_id] for answer in answers[:CONCURRENCY]]
    for record in concurrent:
        assert record.steps is not None
        assert int(record.steps.batch_size.max()) > 1
    member_counts: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for record in records.values():
        assert record.steps is not None
        member_counts.update({step: member_counts.get(step, 0) + 1 for step in record.steps.step.tolist()})
        sizes.update(zip(record.steps.step.tolist(), record.steps.batch_size.tolist()))
    disconnected = records[answers[CONCURRENCY].trace_id]  # its last steps had no client
    assert {step: size for step, size in sizes.items() if member_counts[step] != size} == {}, (
        disconnected.steps
    )
    last = records[answers[-1].trace_id]
    assert last.steps is not None
    assert set(last.steps.batch_size.tolist()) <= {1, 2}


def test_client_disconnect_from_loop_aborts_the_request(
    loop: tuple[list[Answer], dict[str, RequestRecord]],
) -> None:
    answers, records = loop
    disconnected = records[answers[CONCURRENCY].trace_id]
    assert (disconnected.outcome, disconnected.error_type) == (ABORTED, "client_disconnect")
    assert stages_of(disconnected)[:6] == ["ingress", "database", "tokenize", "queue", "prefill", "decode"]
    assert disconnected.steps is not None
    assert 3 <= len(disconnected.steps) <= disconnected.output_tokens < 5000
    assert disconnected.ended_at >= disconnected.last_token_at
    after = records[answers[-1].trace_id]
    assert after.outcome == OK
    assert_each_token_has_a_step(after, 5)


def test_loop_runs_without_a_web_server(tmp_path: Path) -> None:
    tape = tmp_path / "script.tape"
    run = [sys.executable, "-m", "otel_infer", "run", "--tape", str(tape), "--"]
    command = [*run, sys.executable, str(EXAMPLES / "custom_loop" / "server.py"), "--requests", "5"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ(), timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "5 answers, 90 tokens\n"
    records = list(replay.read_records(tape))
    assert sorted(record.output_tokens for record in records) == [16, 17, 18, 19, 20]
    for record in records:
        assert stages_of(record) == LOOP_STAGES[1:-1]
        assert (record.server_span_id, record.parent_span_id) == (b"", b"")
        assert_each_token_has_a_step(record, record.max_tokens)


def environ() -> dict[str, str]:
    """Returns this environment without OTEL_* variables, as `Server` does."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return {**inherited, **NO_EXPORT, **ONE_THREAD}


# ── examples/fastapi_transformers ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def hosted(
    tiny_llama: Path, tiny_encoder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Answer], dict[str, RequestRecord]]:
    models = {"MODEL": str(tiny_llama), "ENCODER": str(tiny_encoder)}

    def play(port: int) -> list[Answer]:
        def generate(tokens: int, disconnect_after: int = 0) -> Answer:
            body = {"prompt": "hello world", "max_tokens": tokens}
            return post(port, "/v1/generate", body, disconnect_after)

        def embed(size: int) -> Answer:
            return post(port, "/v1/embeddings", {"input": ["hello world"] * size})

        texts: list[Callable[[], Answer]] = [lambda n=n: generate(10 + n) for n in range(3)]
        embeddings: list[Callable[[], Answer]] = [lambda n=n: embed(n) for n in range(1, 4)]
        concurrent = run_concurrently([*texts, *embeddings])
        return [*concurrent, generate(2000, disconnect_after=3), generate(4)]

    return run_example("fastapi_transformers", tmp_path_factory.mktemp("fastapi_transformers"), models, play)


def test_streamed_generation_records_every_stage(
    hosted: tuple[list[Answer], dict[str, RequestRecord]],
) -> None:
    answers, records = hosted
    for tokens, answer in zip((10, 11, 12), answers):
        record = records[answer.trace_id]
        assert span_lines(record, answer) == [
            "POST /v1/generate",
            "  text_completion tiny-llama",
            "    ingress",
            "    tokenize",
            "    queue",
            "    prefill",
            "    decode",
            "    postprocess",
        ]
        assert_stages_in_sequence(record, "ingress", "tokenize", "queue", "prefill", "decode")
        assert_each_token_has_a_step(record, tokens)
        assert (record.outcome, record.provider, record.model) == (OK, "transformers", "tiny-llama")
        assert "".join(event["text"] for event in answer.events)


def test_embeddings_are_a_forward_stage_without_an_engine(
    hosted: tuple[list[Answer], dict[str, RequestRecord]],
) -> None:
    answers, records = hosted
    for size, answer in enumerate(answers[3:6], 1):
        record = records[answer.trace_id]
        assert span_lines(record, answer) == [
            "POST /v1/embeddings",
            "  inference tiny-encoder",
            "    ingress",
            "    tokenize",
            "    forward",
            "    postprocess",
        ]
        forward = record.find_stage("forward")
        assert forward is not None and forward.attributes == {semconv.ITEMS: size}
        assert (record.provider, record.outcome, record.output_tokens) == ("torch", OK, 0)
        assert len(answer.events[0]["data"]) == size


def test_client_disconnect_from_stream_aborts_request_and_generation(
    hosted: tuple[list[Answer], dict[str, RequestRecord]],
) -> None:
    answers, records = hosted
    disconnected = records[answers[6].trace_id]
    assert (disconnected.outcome, disconnected.error_type) == (ABORTED, "client_disconnect")
    assert stages_of(disconnected)[:5] == ["ingress", "tokenize", "queue", "prefill", "decode"]
    assert disconnected.steps is not None
    assert 2 <= len(disconnected.steps) <= disconnected.output_tokens < 2000
    assert records[answers[7].trace_id].outcome == OK


# ── README of each example ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("example", ["custom_loop", "fastapi_transformers"])
def test_readme_quotes_are_in_the_server(example: str) -> None:
    page = (EXAMPLES / example / "README.md").read_text()
    server = (EXAMPLES / example / "server.py").read_text()
    quoted = [
        line.strip()
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        for line in block.splitlines()
    ]
    quoted = [line.split("  #")[0] for line in quoted if line and line != "..."]
    assert quoted
    for line in quoted:
        assert line in server, line


@pytest.mark.parametrize("example", ["custom_loop", "fastapi_transformers"])
def test_readme_requests_end_with_their_largest_cause(example: str) -> None:
    page = (EXAMPLES / example / "README.md").read_text()
    shown = re.findall(r"^[0-9a-f]{8}  .*", page, re.MULTILINE)
    assert shown
    for line in shown:
        cause = re.search(r"  \d+ % ([a-z ]+)$", line)
        assert cause is not None, line
        assert cause[1].replace(" ", "_") in semconv.CAUSES
