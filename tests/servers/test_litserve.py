"""LitServe: its worker processes are a part of the request, with wait, batch and call, and count once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from otel_infer import semconv
from tests.servers.receiving import spans_of
from tests.servers.requests_sent import Answer, send
from tests.servers.serving import start_module, stop_module
from tests.support.arrivals import counted
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import Server
from tests.support.trees import tree

BODY, BAD_BODY = b'{"value": 1.0}', b'{"other": 1.0}'
SIZE = 4


@pytest.fixture
def server(receiver: OtlpReceiver, tmp_path: Path) -> Iterator[Server]:
    server = start_module("litserve_app", receiver, tmp_path / "log")
    yield server
    stop_module(server)


def lines_of(receiver: OtlpReceiver, answer: Answer) -> list[str]:
    return tree(spans_of(receiver, answer.trace_id), answer.parent_id)


def test_what_a_worker_does_belongs_to_the_request(server: Server, receiver: OtlpReceiver) -> None:
    single = send(server.port, "POST", "/single", BODY)
    stream = send(server.port, "POST", "/stream", BODY)
    bad = send(server.port, "POST", "/single", BAD_BODY)
    with ThreadPoolExecutor(SIZE) as pool:
        batched = list(pool.map(lambda _: send(server.port, "POST", "/batched", BODY), range(SIZE)))
    assert [answer.status for answer in (single, stream, bad)] == [200, 200, 500]
    work = ["    ingress", "    queue wait", "    forward", "    postprocess"]
    assert lines_of(receiver, single) == ["POST /single", "  inference Scorer", *work]
    first, second, *stages = lines_of(receiver, stream)
    assert [first, second] == ["POST /stream", "  inference Scorer"]
    assert sorted(stages) == sorted(
        [*work, *["    forward"] * 2]
    )  # the first byte is sent beside the later calls
    assert lines_of(receiver, bad)[0] == "POST /single" and "forward" not in str(lines_of(receiver, bad))
    check_batch(receiver, batched)
    assert receiver.wait_for(lambda it: counted(it) == 2 + SIZE, 10), counted(receiver)


def check_batch(receiver: OtlpReceiver, answers: list[Answer]) -> None:
    sizes, links = [], 0
    for answer in answers:
        assert answer.status == 200
        spans = spans_of(receiver, answer.trace_id, "inference Scorer")
        forward, request = find_span(spans, "forward"), find_span(spans, "inference Scorer")
        sizes.append(forward["attributes"][semconv.ITEMS])
        links += len(request["links"])
    assert max(sizes) > 1
    assert links >= 2 * (max(sizes) - 1)


def find_span(spans: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (span,) = [span for span in spans if span["name"] == name]
    return span


def test_server_and_workers_are_one_server(server: Server, receiver: OtlpReceiver) -> None:
    send(server.port, "POST", "/single", BODY)
    stop_module(server)
    time.sleep(2)  # the sidecar reports what died, and ends
    starts = [span for span in receiver.spans if span["name"] == semconv.SPAN_SERVER_START]
    assert [span["attributes"].get(semconv.ERROR_TYPE, "") for span in starts] == [""]
    assert len({span["resource"]["service.instance.id"] for span in receiver.spans}) == 1
