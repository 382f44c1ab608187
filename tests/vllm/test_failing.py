"""Failures around a real vLLM server, and the exported traces; the last test ends the server."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from otel_infer import semconv
from tests.support.arrivals import arrived, assert_nothing_came_twice, requests_of
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import Server
from tests.support.toy_server import wait_until
from tests.vllm.asking import CHAT, Answer, ConcurrentRequests, counters, prompt, send_request
from tests.vllm.conftest import Serve
from tests.vllm.serving import engine_core, sidecars

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
MESSAGES = [{"role": "user", "content": prompt(8)}]


@pytest.fixture(scope="module")
def server(serve: Serve) -> Server:
    """Starts a server that forks its engine core."""
    server = serve(environ={"VLLM_WORKER_MULTIPROCESSING_METHOD": "fork"})
    send_request(server.port, CHAT, messages=MESSAGES, max_tokens=2)
    return server


def load(server: Server, requests: int = 6, tokens: int = 60) -> ConcurrentRequests:
    client = ConcurrentRequests()
    for _ in range(requests):
        client.send_request(server.port, CHAT, messages=MESSAGES, max_tokens=tokens, ignore_eos=True)
    return client


def start_load(server: Server, requests: int, tokens: int) -> ConcurrentRequests:
    """Starts requests; returns once they have about a hundred tokens each."""
    before = generated(server)
    client = load(server, requests, tokens)
    wait_until(lambda: generated(server) - before >= 100 * requests, every=0)
    return client


def generated(server: Server) -> float:
    """Returns the tokens generated so far, as counted by vLLM."""
    return counters(server.port)["vllm:generation_tokens_total"]


def served(answers: list[Answer]) -> list[str]:
    """Returns the trace ids; checks that every response has status 200."""
    assert [answer.status for answer in answers] == [200] * len(answers)
    return [answer.trace_id for answer in answers]


def check_complete(receiver: OtlpReceiver, traces: list[str], tokens: int = 60) -> None:
    """Checks that each request arrived once, with a step for every token after the first."""
    for request in arrived(receiver, *traces):
        assert request["attributes"]["gen_ai.usage.output_tokens"] == tokens
        steps = steps_of(receiver, request["trace_id"])
        assert len(steps) == tokens - 1
    assert_nothing_came_twice(receiver)


def steps_of(receiver: OtlpReceiver, trace_id: str) -> list[dict[str, Any]]:
    return [s for s in receiver.spans if s["trace_id"] == trace_id and s["name"] == semconv.SPAN_DECODE_STEP]


def test_a_forked_engine_core_exports_every_request_completely(
    server: Server, receiver: OtlpReceiver
) -> None:
    check_complete(receiver, served(load(server).answers()))
    assert len(sidecars(server)) == 1


def test_a_killed_sidecar_is_replaced_without_duplicate_exports(
    server: Server, receiver: OtlpReceiver
) -> None:
    (first,) = sidecars(server)
    across = start_load(server, requests=6, tokens=400)
    os.kill(first, signal.SIGKILL)
    (second,) = wait_until(lambda: [pid for pid in sidecars(server) if pid != first])
    assert second != first
    traces = served(across.answers())
    check_complete(receiver, traces, 400)


def test_a_stopped_sidecar_delays_no_request(server: Server, receiver: OtlpReceiver) -> None:
    (sidecar,) = sidecars(server)
    os.kill(sidecar, signal.SIGSTOP)
    try:
        began = time.monotonic()
        traces = served(load(server).answers())
        assert time.monotonic() - began < 10
    finally:
        os.kill(sidecar, signal.SIGCONT)
    check_complete(receiver, traces)


def test_a_server_recreates_a_deleted_ring_folder(server: Server, receiver: OtlpReceiver) -> None:
    (sidecar,) = sidecars(server)
    links = [os.readlink(link) for link in Path(f"/proc/{sidecar}/fd").iterdir()]
    links_to_rings = {Path(link).parent for link in links if "/otel_infer-" in link}
    folders = {folder for folder in links_to_rings if folder.is_dir()}  # a dead process's folder is gone
    assert folders
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)  # the server may add a ring meanwhile
        assert not folder.is_dir()
    wait_until(lambda: served(load(server, tokens=10).answers()) and sidecars(server) not in ([], [sidecar]))
    traces = served(load(server).answers())
    assert receiver.wait_for(lambda it: set(traces) <= set(requests_of(it)))
    check_complete(receiver, served(load(server).answers()))
    assert "Traceback" not in server.log.read_text(errors="replace")


def test_requests_in_a_killed_engine_core_are_exported(server: Server, receiver: OtlpReceiver) -> None:
    client = start_load(server, requests=4, tokens=450)
    os.kill(engine_core(server), signal.SIGKILL)
    answers = client.answers()
    assert all(answer.status == 500 for answer in answers)
    for request in arrived(receiver, *[answer.trace_id for answer in answers]):
        attributes = request["attributes"]
        assert attributes[semconv.ERROR_TYPE] in ("EngineDeadError", "process_died")
        assert attributes[semconv.FAILED_STAGE] == "decode"
        assert len(steps_of(receiver, request["trace_id"])) > 20
    assert_nothing_came_twice(receiver)
    assert server.process is not None
    server.process.wait(30)
    assert wait_until(lambda: not sidecars(server))
