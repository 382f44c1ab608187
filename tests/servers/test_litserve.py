"""LitServe: its worker processes are a part of the request, with wait, batch and call, and count once."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from otel_infer import semconv
from tests.servers.leftovers import MARKER, kill_leftovers
from tests.servers.receiving import spans_of
from tests.servers.requests_sent import Answer, send
from tests.support.arrivals import counted
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import Server, free_port
from tests.support.trees import tree

APP = "tests.servers.apps.litserve_app"
BODY, BAD_BODY = b'{"value": 1.0}', b'{"other": 1.0}'
SIZE = 4


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture
def server(receiver: OtlpReceiver, tmp_path: Path) -> Iterator[Server]:
    port = free_port()
    environ = {
        **receiver.environ, "OTEL_METRIC_EXPORT_INTERVAL": "1000", "PYTHONPATH": str(Path.cwd()), MARKER: str(port),
    }  # fmt: skip
    command = [sys.executable, "-m", "otel_infer", "run", "--", sys.executable, "-m", APP, str(port)]
    server = Server(command, port, tmp_path / "log", environ)
    server.start()
    yield server
    server.stop()
    kill_leftovers(str(port))
    assert "hook on" not in server.read_log()


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
    server.stop()
    kill_leftovers(str(server.port))
    time.sleep(2)  # the sidecar reports what died, and ends
    starts = [span for span in receiver.spans if span["name"] == semconv.SPAN_SERVER_START]
    assert [span["attributes"].get(semconv.ERROR_TYPE, "") for span in starts] == [""]
    assert len({span["resource"]["service.instance.id"] for span in receiver.spans}) == 1
