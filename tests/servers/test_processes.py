"""Models in other processes: pools and queues of the standard library. Their work belongs to the request, once."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from otel_infer import semconv
from tests.servers.receiving import spans_of
from tests.servers.requests_sent import send
from tests.support.arrivals import counted
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import Server, free_port
from tests.support.trees import tree

WAYS = [(method, has_line) for method in ("fork", "spawn", "forkserver") for has_line in (False, True)]
LINES = ["    ingress", "    forward", "    postprocess"]
MAP_LINES = ["    ingress", *["    forward"] * 3, "    postprocess"]
QUEUE_LINES = ["    ingress", "    queue wait", "    forward", "    postprocess"]
ROUTES = {"executor": LINES, "pool": LINES, "map": MAP_LINES, "threads": LINES, "queue": QUEUE_LINES}
Start = Callable[[str, bool], tuple[Server, int, OtlpReceiver]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a server with processes of this start method; it ends with the test."""
    running: list[Server] = []
    with OtlpReceiver() as receiver:

        def start(method: str, has_line: bool) -> tuple[Server, int, OtlpReceiver]:
            port = free_port()
            environ = {
                **receiver.environ,
                "OTEL_METRIC_EXPORT_INTERVAL": "1000",
                "PYTHONPATH": str(Path.cwd()),
            }
            command = [sys.executable, "-m", "tests.servers.apps.pool_app", str(port), method]
            run = [sys.executable, "-m", "otel_infer", "run", "--"]
            server = Server(
                [*command, "instrument"] if has_line else [*run, *command], port, tmp_path / "log", environ
            )
            running.append(server)
            server.start()
            return server, port, receiver

        yield start
        for server in running:
            server.stop()
            assert "hook on" not in server.read_log()


@pytest.mark.parametrize(("method", "has_line"), WAYS)
def test_what_another_process_does_belongs_to_the_request(start: Start, method: str, has_line: bool) -> None:
    server, port, receiver = start(method, has_line)
    for name, lines in ROUTES.items():
        answer = send(port, "POST", f"/{name}/a")
        assert answer.status == 200
        spans = spans_of(receiver, answer.trace_id, "inference Scorer")
        assert tree(spans, answer.parent_id) == [f"POST /{name}/<name>", "  inference Scorer", *lines]
    assert receiver.wait_for(lambda it: counted(it) == len(ROUTES), 10), counted(receiver)
    server.stop()
    time.sleep(2)  # the sidecar reports what died, and ends
    starts = [span for span in receiver.spans if span["name"] == semconv.SPAN_SERVER_START]
    assert [span["attributes"].get(semconv.ERROR_TYPE, "") for span in starts] == [""]
    assert len({span["resource"]["service.instance.id"] for span in receiver.spans}) == 1


def test_error_in_a_job_reaches_its_request(start: Start) -> None:
    _, port, receiver = start("fork", False)
    answer = send(port, "POST", "/executor/fail")
    assert answer.status == 500
    (span,) = spans_of(receiver, answer.trace_id)
    assert (span["name"], span["kind"], span["attributes"][semconv.ERROR_TYPE]) == (
        "POST /executor/<name>", 2, "500",
    )  # fmt: skip
