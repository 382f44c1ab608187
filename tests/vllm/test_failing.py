"""What goes wrong around a real vLLM server, and what is left of it; the last test ends the server."""

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
from tests.support.toy_server import until
from tests.vllm.asking import CHAT, Answer, Asking, ask, counters, prompt
from tests.vllm.conftest import Serve
from tests.vllm.serving import engine_core, sidecars

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
SAID = [{"role": "user", "content": prompt(8)}]


@pytest.fixture(scope="module")
def server(serve: Serve) -> Server:
    """Forked from its front end, as where nothing forbids it."""
    server = serve(environ={"VLLM_WORKER_MULTIPROCESSING_METHOD": "fork"})
    ask(server.port, CHAT, messages=SAID, max_tokens=2)
    return server


def load(server: Server, requests: int = 6, tokens: int = 60) -> Asking:
    asking = Asking()
    for _ in range(requests):
        asking.ask(server.port, CHAT, messages=SAID, max_tokens=tokens, ignore_eos=True)
    return asking


def under_way(server: Server, requests: int, tokens: int) -> Asking:
    """A load of which each has a hundred tokens, nearly, whatever the machine's pace."""
    before = generated(server)
    asking = load(server, requests, tokens)
    until(lambda: generated(server) - before >= 100 * requests, every=0)
    return asking


def generated(server: Server) -> float:
    """Tokens so far, as vLLM counts them."""
    return counters(server.port)["vllm:generation_tokens_total"]


def served(answers: list[Answer]) -> list[str]:
    """Their traces; all were answered, and well."""
    assert [answer.status for answer in answers] == [200] * len(answers)
    return [answer.trace_id for answer in answers]


def whole(receiver: OtlpReceiver, traces: list[str], tokens: int = 60) -> None:
    """Each has arrived once, with a step for every token after the first."""
    for request in arrived(receiver, *traces):
        assert request["attributes"]["gen_ai.usage.output_tokens"] == tokens
        steps = steps_of(receiver, request["trace_id"])
        assert len(steps) == tokens - 1
    assert_nothing_came_twice(receiver)


def steps_of(receiver: OtlpReceiver, trace_id: str) -> list[dict[str, Any]]:
    return [s for s in receiver.spans if s["trace_id"] == trace_id and s["name"] == semconv.SPAN_DECODE_STEP]


def test_a_forked_engine_core_is_told_whole(server: Server, receiver: OtlpReceiver) -> None:
    whole(receiver, served(load(server).answers()))
    assert len(sidecars(server)) == 1


def test_a_sidecar_killed_under_load_is_replaced_and_nothing_is_told_twice(
    server: Server, receiver: OtlpReceiver
) -> None:
    (first,) = sidecars(server)
    across = under_way(server, requests=6, tokens=400)
    os.kill(first, signal.SIGKILL)
    (second,) = until(lambda: [pid for pid in sidecars(server) if pid != first])
    assert second != first
    traces = served(across.answers())
    whole(receiver, traces, 400)


def test_a_stopped_sidecar_stops_nobody(server: Server, receiver: OtlpReceiver) -> None:
    (sidecar,) = sidecars(server)
    os.kill(sidecar, signal.SIGSTOP)
    try:
        began = time.monotonic()
        traces = served(load(server).answers())
        assert time.monotonic() - began < 10
    finally:
        os.kill(sidecar, signal.SIGCONT)
    whole(receiver, traces)


def test_a_server_whose_ring_folder_is_taken_away_serves_on_and_makes_another(
    server: Server, receiver: OtlpReceiver
) -> None:
    (sidecar,) = sidecars(server)
    links = [os.readlink(link) for link in Path(f"/proc/{sidecar}/fd").iterdir()]
    folders = {Path(link).parent for link in links if "/otel_infer-" in link}
    assert folders
    for folder in folders:
        shutil.rmtree(folder)
    until(lambda: served(load(server, tokens=10).answers()) and sidecars(server) not in ([], [sidecar]))
    traces = served(load(server).answers())
    assert receiver.wait_for(lambda it: set(traces) <= set(requests_of(it)))
    whole(receiver, served(load(server).answers()))
    assert "Traceback" not in server.log.read_text(errors="replace")


def test_requests_in_an_engine_core_that_is_killed_are_reported(
    server: Server, receiver: OtlpReceiver
) -> None:
    asking = under_way(server, requests=4, tokens=450)
    os.kill(engine_core(server), signal.SIGKILL)
    answers = asking.answers()
    assert all(answer.status == 500 for answer in answers)
    for request in arrived(receiver, *[answer.trace_id for answer in answers]):
        attributes = request["attributes"]
        assert attributes[semconv.ERROR_TYPE] in ("EngineDeadError", "process_died")
        assert attributes[semconv.FAILED_STAGE] == "decode"
        assert len(steps_of(receiver, request["trace_id"])) > 20
    assert_nothing_came_twice(receiver)
    assert server.process is not None
    server.process.wait(30)
    assert until(lambda: not sidecars(server))
