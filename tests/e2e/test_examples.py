"""The examples as a newcomer runs them, under `otel-infer run`: whole trees on the tape, whatever the client does."""

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

pytestmark = pytest.mark.real

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
NOWHERE = {"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"}
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
AT_ONCE = 6


class Answer(NamedTuple):
    """What a client got of one request: the events of a stream, or the one body."""

    trace_id: str
    parent_id: str
    status: int
    events: list[dict[str, Any]]


def post(port: int, path: str, body: dict[str, Any], leave_after: int = 0) -> Answer:
    """One request with a `traceparent` of its own; the client is gone after `leave_after` events."""
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
            if leave_after and len(events) >= leave_after:
                assert connection.sock is not None
                connection.sock.shutdown(socket.SHUT_RDWR)
                break
    else:
        events.append(json.loads(response.read()))
    connection.close()
    return Answer(trace_id, parent_id, response.status, events)


def at_once(calls: list[Callable[[], Answer]]) -> list[Answer]:
    """All of them, each in a thread; in the order of `calls`."""
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


def played(
    example: str, folder: Path, environ: Mapping[str, str], play: Callable[[int], list[Answer]]
) -> tuple[list[Answer], dict[str, RequestRecord]]:
    """Runs an example, lets `play` drive it, ends it as Ctrl-C would; answers, and records by trace id."""
    port, tape = free_port(), folder / "server.tape"
    run = [sys.executable, "-m", "otel_infer", "run", "--show", "--tape", str(tape), "--"]
    command = [*run, sys.executable, str(EXAMPLES / example / "server.py")]
    variables = {**NOWHERE, **ONE_THREAD, **environ, "PORT": str(port)}
    with Server(command, port, folder / "server.log", variables) as server:
        answers = play(port)
        assert server.process is not None
        time.sleep(0.3)
        server.process.send_signal(signal.SIGINT)  # once: the second one would cut the flush short
        assert server.process.wait(30) == 0, server.said()
    assert all(answer.status == 200 for answer in answers)
    records = {record.trace_id.hex(): record for record in replay.read_records(tape)}
    assert set(records) == {answer.trace_id for answer in answers}, server.said()
    assert "Traceback" not in server.said()
    return answers, records


def lines(record: RequestRecord, answer: Answer) -> list[str]:
    """The spans below the client's, indented; asserts that every parent contains its children."""
    spans = tree.build_request_spans(record, tail_sampler.Decision(True, 1000, "sampled"))
    by_id = {span.span_id: span for span in spans}
    found = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        depth, above = 0, span
        while above.parent_span_id in by_id:
            parent = by_id[above.parent_span_id]
            assert parent.start <= above.start <= above.end <= parent.end, (parent.name, above.name)
            above, depth = parent, depth + 1
        assert above.parent_span_id.hex() == answer.parent_id
        found.append("  " * depth + span.name)
    return found


def one_after_the_other(record: RequestRecord, *names: str) -> None:
    """The stages do not overlap, and the last ones touch."""
    stages = [record.find_stage(name) for name in names]
    for before, after in itertools.pairwise(stages):
        assert before is not None and after is not None
        assert before.ended_at <= after.started_at, (before.name, after.name)
    queue, prefill, decode = (record.find_stage(name) for name in ("queue", "prefill", "decode"))
    assert queue is not None and prefill is not None and decode is not None
    assert queue.ended_at == prefill.started_at and prefill.ended_at == decode.started_at


def every_token_has_its_step(record: RequestRecord, tokens: int) -> None:
    """Decode steps are the tokens after the first, each inside `decode`."""
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
        def ask(number: int, tokens: int, leave_after: int = 0) -> Answer:
            body = {"prompt": "tell me of foxes " * number, "user": f"user {number}", "max_tokens": tokens}
            return post(port, "/v1/generate", body, leave_after)

        together = at_once([lambda n=n: ask(n, 150 + n) for n in range(1, AT_ONCE + 1)])
        left = ask(7, 5000, leave_after=4)
        return [*together, left, ask(8, 5)]

    return played("custom_loop", tmp_path_factory.mktemp("custom_loop"), {}, play)


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


def test_a_hand_written_loop_shows_every_stage_of_every_request(
    loop: tuple[list[Answer], dict[str, RequestRecord]],
) -> None:
    answers, records = loop
    for number, answer in enumerate(answers[:AT_ONCE], 1):
        record = records[answer.trace_id]
        assert lines(record, answer) == LOOP_TREE
        one_after_the_other(record, *LOOP_STAGES[:-1])
        assert record.outcome == OK
        assert (record.provider, record.engine, record.finish_reasons) == ("custom", "custom", ("length",))
        assert (record.input_tokens, record.max_tokens) == (4 * number, 150 + number)
        every_token_has_its_step(record, 150 + number)
        assert sum("text" in event for event in answer.events) == record.output_tokens
        assert record.chunks == record.output_tokens + 2  # the look-up before it, [DONE] after it


def test_the_database_is_as_long_as_the_look_up_was(
    loop: tuple[list[Answer], dict[str, RequestRecord]],
) -> None:
    answers, records = loop
    late = []
    for answer in answers:
        stage = records[answer.trace_id].find_stage("database")
        assert stage is not None
        late.append((stage.ended_at - stage.started_at) / 1e9 - answer.events[0]["database_s"])
    assert min(late) >= -0.001
    assert sorted(late)[len(late) // 2] < 0.03


def test_requests_that_ran_together_say_so(loop: tuple[list[Answer], dict[str, RequestRecord]]) -> None:
    answers, records = loop
    together = [records[answer.trace_id] for answer in answers[:AT_ONCE]]
    for record in together:
        assert record.steps is not None
        assert int(record.steps.batch_size.max()) > 1
    members: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for record in records.values():
        assert record.steps is not None
        members.update({step: members.get(step, 0) + 1 for step in record.steps.step.tolist()})
        sizes.update(zip(record.steps.step.tolist(), record.steps.batch_size.tolist()))
    left = records[answers[AT_ONCE].trace_id]  # its last steps were for nobody
    assert {step: size for step, size in sizes.items() if members[step] != size} == {}, left.steps
    alone = records[answers[-1].trace_id]
    assert alone.steps is not None
    assert set(alone.steps.batch_size.tolist()) <= {1, 2}


def test_a_client_that_leaves_a_loop_is_an_aborted_request(
    loop: tuple[list[Answer], dict[str, RequestRecord]],
) -> None:
    answers, records = loop
    left = records[answers[AT_ONCE].trace_id]
    assert (left.outcome, left.error_type) == (ABORTED, "client_disconnect")
    assert stages_of(left)[:6] == ["ingress", "database", "tokenize", "queue", "prefill", "decode"]
    assert left.steps is not None
    assert 3 <= len(left.steps) <= left.output_tokens < 5000
    assert left.ended_at >= left.last_token_at
    after = records[answers[-1].trace_id]
    assert after.outcome == OK
    every_token_has_its_step(after, 5)


def test_the_loop_runs_without_a_web_server_too(tmp_path: Path) -> None:
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
        every_token_has_its_step(record, record.max_tokens)


def environ() -> dict[str, str]:
    """As `Server` does it: nothing of this session's own telemetry."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return {**kept, **NOWHERE, **ONE_THREAD}


# ── examples/fastapi_transformers ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def hosted(
    tiny_llama: Path, tiny_encoder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Answer], dict[str, RequestRecord]]:
    models = {"MODEL": str(tiny_llama), "ENCODER": str(tiny_encoder)}

    def play(port: int) -> list[Answer]:
        def generate(tokens: int, leave_after: int = 0) -> Answer:
            body = {"prompt": "hello world", "max_tokens": tokens}
            return post(port, "/v1/generate", body, leave_after)

        def embed(size: int) -> Answer:
            return post(port, "/v1/embeddings", {"input": ["hello world"] * size})

        texts: list[Callable[[], Answer]] = [lambda n=n: generate(10 + n) for n in range(3)]
        embeddings: list[Callable[[], Answer]] = [lambda n=n: embed(n) for n in range(1, 4)]
        together = at_once([*texts, *embeddings])
        return [*together, generate(2000, leave_after=3), generate(4)]

    return played("fastapi_transformers", tmp_path_factory.mktemp("fastapi_transformers"), models, play)


def test_streamed_generation_shows_every_stage_of_every_request(
    hosted: tuple[list[Answer], dict[str, RequestRecord]],
) -> None:
    answers, records = hosted
    for tokens, answer in zip((10, 11, 12), answers):
        record = records[answer.trace_id]
        assert lines(record, answer) == [
            "POST /v1/generate",
            "  text_completion tiny-llama",
            "    ingress",
            "    tokenize",
            "    queue",
            "    prefill",
            "    decode",
            "    postprocess",
        ]
        one_after_the_other(record, "ingress", "tokenize", "queue", "prefill", "decode")
        every_token_has_its_step(record, tokens)
        assert (record.outcome, record.provider, record.model) == (OK, "transformers", "tiny-llama")
        assert "".join(event["text"] for event in answer.events)


def test_embeddings_are_the_forward_of_an_encoder_that_no_engine_claims(
    hosted: tuple[list[Answer], dict[str, RequestRecord]],
) -> None:
    answers, records = hosted
    for size, answer in enumerate(answers[3:6], 1):
        record = records[answer.trace_id]
        assert lines(record, answer) == [
            "POST /v1/embeddings",
            "  inference tiny-encoder",
            "    ingress",
            "    tokenize",
            "    forward",
            "    postprocess",
        ]
        one = record.find_stage("forward")
        assert one is not None and one.attributes == {semconv.ITEMS: size}
        assert (record.provider, record.outcome, record.output_tokens) == ("torch", OK, 0)
        assert len(answer.events[0]["data"]) == size


def test_a_client_that_leaves_a_stream_is_an_aborted_request_and_the_model_stops(
    hosted: tuple[list[Answer], dict[str, RequestRecord]],
) -> None:
    answers, records = hosted
    left = records[answers[6].trace_id]
    assert (left.outcome, left.error_type) == (ABORTED, "client_disconnect")
    assert stages_of(left)[:5] == ["ingress", "tokenize", "queue", "prefill", "decode"]
    assert left.steps is not None
    assert 2 <= len(left.steps) <= left.output_tokens < 2000
    assert records[answers[7].trace_id].outcome == OK


# ── what their pages say ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("example", ["custom_loop", "fastapi_transformers"])
def test_the_lines_that_a_page_quotes_are_in_the_server(example: str) -> None:
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
def test_the_requests_that_a_page_shows_end_with_their_largest_cause(example: str) -> None:
    page = (EXAMPLES / example / "README.md").read_text()
    shown = re.findall(r"^[0-9a-f]{8}  .*", page, re.MULTILINE)
    assert shown
    for line in shown:
        cause = re.search(r"  \d+ % ([a-z ]+)$", line)
        assert cause is not None, line
        assert cause[1].replace(" ", "_") in semconv.CAUSES
