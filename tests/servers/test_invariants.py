"""What holds for each entrance: the user's code runs once, its exceptions are its own, and hooks come off again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from otel_infer import semconv
from tests.support.otlp_receiver import OtlpReceiver

ENTRANCES = {
    "uvicorn": "http:drive_uvicorn",
    "werkzeug": "http:drive_werkzeug",
    "waitress": "http:drive_waitress",
    "wsgiref": "http:drive_wsgiref",
    "gevent": "http:drive_gevent",
    "aiohttp": "http:drive_aiohttp",
    "tornado": "http:drive_tornado",
    "sanic": "http:drive_sanic",
    "grpc": "rpc:drive_threads",
    "grpc.aio": "rpc:drive_asyncio",
    "queue.Queue": "queues:drive_thread_queue",
    "asyncio.Queue": "queues:drive_asyncio_queue",
    "ThreadPoolExecutor": "queues:drive_thread_pool",
    "ProcessPoolExecutor": "queues:drive_process_pool",
    "multiprocessing.Pool": "queues:drive_multiprocessing_pool",
    "multiprocessing.Queue": "queues:drive_process_queue",
    "celery": "jobs:drive_celery",
    "dramatiq": "jobs:drive_dramatiq",
    "rq": "jobs:drive_rq",
    "arq": "jobs:drive_arq",
    "gradio": "jobs:drive_gradio",
}
"""Name ─▶ module and function of the driver in `tests.servers.entrances`."""

RUN = """
import importlib, json, os, sys
import otel_infer
from otel_infer.ringbuffer import writer
from otel_infer.tracing import request_span
from tests.servers.entrances.handlers import Handlers

module, function = sys.argv[1].split(":")
drive = getattr(importlib.import_module(f"tests.servers.entrances.{module}"), function)
seen = {}

def look(state):
    handlers = Handlers()
    drive(handlers)
    seen[state] = handlers.describe()

def fail(*args, **kwargs):
    raise RuntimeError("ours")

def break_and_look(state, owner, name):
    own = owner.__dict__[name]
    setattr(owner, name, fail)
    look(state)
    setattr(owner, name, own)
"""
BROKEN = """
look("without")
otel_infer.instrument()
look("with")
break_and_look("cannot open", request_span.RequestSpan, "__init__")
otel_infer.uninstrument()
otel_infer.instrument()
break_and_look("cannot record", writer.RequestWriter, "write_event")
otel_infer.uninstrument()
otel_infer.instrument()
break_and_look("cannot close", request_span.RequestSpan, "close")
otel_infer.uninstrument()
look("uninstrumented")
print("SEEN", json.dumps(seen))
"""
FORKED = """
otel_infer.instrument()
child = os.fork()
if child == 0:
    look("child")
    print("SEEN", json.dumps(seen), flush=True)
    otel_infer.flush(10)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
look("parent")
otel_infer.flush(10)
print("SEEN", json.dumps(seen))
"""


def run(script: str, entrance: str, environ: dict[str, str]) -> list[dict[str, Any]]:
    """Runs a script with an entrance in a process of its own, and returns what it has seen."""
    completed = subprocess.run(
        [sys.executable, "-c", RUN + script, ENTRANCES[entrance]],
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, **environ, "PYTHONPATH": str(Path.cwd())},
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr[-3000:]
    lines = [line.partition("SEEN ")[2] for line in completed.stdout.splitlines() if "SEEN " in line]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_the_users_code_runs_once_whatever_breaks(entrance: str, receiver: OtlpReceiver) -> None:
    """Calls, answers and exceptions are those of a run without otel_infer, also while our own code raises."""
    (seen,) = run(BROKEN, entrance, receiver.environ)
    calls, answers, errors = seen["without"]
    assert calls in (["fail", "work"], [])  # in another process nothing is counted
    assert answers and (errors or entrance == "multiprocessing.Queue")
    for state, found in seen.items():
        assert found == seen["without"], state


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_a_forked_process_serves_like_its_parent(entrance: str, receiver: OtlpReceiver) -> None:
    child, parent = run(FORKED, entrance, receiver.environ)
    assert child["child"] == parent["parent"]
    assert receiver.wait_for(lambda it: len(list_traces(it)) >= 2, 10)


def list_traces(receiver: OtlpReceiver) -> set[str]:
    return {span["trace_id"] for span in receiver.spans if span["name"] != semconv.SPAN_SERVER_START}
