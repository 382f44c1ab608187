"""Servers that fork: workers behind a master, a process for each job, a pool. Each is one server with one start.

The patterns of gunicorn, RQ and gRPC, by the standard library.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from otel_infer import semconv
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.toy_server import RUN

SETUP = """
import os, signal, sys, time
import otel_infer
from otel_infer import _clock
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder

otel_infer.instrument()

def load():
    started_at = _clock.now()
    recorder.record_startup(events.PhaseBegan(started_at, events.WEIGHTS))
    recorder.ensure_rings()
    time.sleep(0.05)
    recorder.record_startup(events.PhaseEnded(_clock.now(), started_at, events.WEIGHTS, "toy", "toy", ""))

def serve():
    with otel_infer.request("chat", model="toy") as request:
        request.submitted()
        request.finished()
    assert otel_infer.flush(10)

def wait_for_stop():
    print("ready", flush=True)
    signal.pause()
"""
MASTER = """
load()
workers = []
for _ in range(2):
    worker = os.fork()
    if not worker:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        serve()
        signal.pause()
    workers.append(worker)

def stop(*_):
    for worker in workers:
        os.kill(worker, signal.SIGTERM)
        os.waitpid(worker, 0)
    os._exit(0)

signal.signal(signal.SIGTERM, stop)
wait_for_stop()
"""
JOBS = """
for _ in range(3):
    job = os.fork()
    if not job:
        load()
        serve()
        os._exit(0)
    os.waitpid(job, 0)
wait_for_stop()
"""
POOL = """
from concurrent.futures import ProcessPoolExecutor
load()
serve()
pool = ProcessPoolExecutor(2, initializer=load)
list(pool.map(time.sleep, [0.1] * 4))
pool.shutdown()
wait_for_stop()
"""
UNSERVED = """
load()
wait_for_stop()
"""


class Ended(NamedTuple):
    """What a server exported until its end. `starts`: (error type, readiness) of each start."""

    starts: list[tuple[str, str]]
    requests: int
    instances: set[str]
    phases: list[str]


def run_server(tmp_path: Path, pattern: str, requests: int, *launcher: str) -> Ended:
    """Runs a server, and stops it with SIGTERM once its requests have arrived."""
    program = tmp_path / "server.py"
    program.write_text(SETUP + pattern)
    with OtlpReceiver() as receiver:
        environ = {**os.environ, **receiver.environ}
        server = subprocess.Popen(
            [*launcher, sys.executable, str(program)], env=environ, stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None and "ready" in server.stdout.readline()
            assert receiver.wait_for(lambda it: len(named(it, "chat toy")) >= requests, 15)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(20)
            server.stdout.close()  # type: ignore[union-attr]
        time.sleep(1.5)  # the sidecar reports dead processes, and ends
        starts = named(receiver, semconv.SPAN_SERVER_START)
        return Ended(
            [(it["attributes"].get(semconv.ERROR_TYPE, ""), it["attributes"].get(semconv.READY_BY, "")) for it in starts],
            len(named(receiver, "chat toy")),
            {span["resource"]["service.instance.id"] for span in receiver.spans},
            [span["name"] for span in receiver.spans if span["name"] == semconv.SPAN_WEIGHTS],
        )  # fmt: skip


def named(receiver: OtlpReceiver, name: str) -> list[dict[str, Any]]:
    return [span for span in receiver.spans if span["name"] == name]


@pytest.mark.parametrize("launcher", [(), RUN], ids=["bare", "run"])
def test_workers_of_a_master_are_one_server(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    """The master loads the model and never serves; its end is no failure."""
    ended = run_server(tmp_path, MASTER, 2, *launcher)
    assert (ended.starts, ended.requests, len(ended.instances)) == ([("", "request")], 2, 1)
    assert ended.phases == ["weights"]


@pytest.mark.parametrize("launcher", [(), RUN], ids=["bare", "run"])
def test_a_process_for_each_job_is_no_start_of_a_server(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    ended = run_server(tmp_path, JOBS, 3, *launcher)
    assert (ended.starts, ended.requests, len(ended.instances)) == ([("", "request")], 3, 1)


def test_processes_of_a_pool_do_not_die(tmp_path: Path) -> None:
    ended = run_server(tmp_path, POOL, 1, *RUN)
    assert (ended.starts, len(ended.instances)) == ([("", "request")], 1)


def test_a_server_that_was_stopped_unused_has_not_died(tmp_path: Path) -> None:
    """SIGTERM ends a gRPC server, for example, without the functions of `atexit`."""
    assert run_server(tmp_path, UNSERVED, 0, *RUN).starts == []
