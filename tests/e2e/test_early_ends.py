"""Requests that end early, by cause and stage: the trace names both, and the request is counted once."""

from __future__ import annotations

import contextlib
import http.client
import json
import secrets
import socket
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from otel_infer import semconv
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.served import BATCHING, RUN, Server, chat, free_port
from tests.support.toy_server import wait_until
from tests.support.trees import WAITS

pytestmark = pytest.mark.real

STAGES = ("ingress", "tokenize", "queue", "prefill", "decode", "postprocess")
STAGE_OF = {
    "in-queue": "queue",
    "in-prefill": "prefill",
    "in-decode": "decode",
    "in-egress": "postprocess",
}
PASSES = {"in-decode": 2}
"""Passes through the place before it holds or fails."""
PAD = 2_000_000
"""Bytes that exceed the buffers of the sockets and of the server."""
DEADLINE_S = 1.0
SUCCESS_METRICS = (
    semconv.REQUEST_DURATION.name,
    semconv.TIME_TO_FIRST_TOKEN.name,
    semconv.TIME_PER_OUTPUT_TOKEN.name,
)
COUNTED_METRICS = (*SUCCESS_METRICS, semconv.REQUEST_ABANDONED.name)
REQUEST = "chat tiny-llama"
UNSET, ERROR = 0, 2


class Expected(NamedTuple):
    """The expected telemetry of an end. `aborted`: the waiting time is counted, because it is no failure."""

    error_type: str
    status: int
    aborted: bool = True


CLIENT_DISCONNECTS, CLIENT_TIMES_OUT = "client-disconnects", "client-times-out"
SERVER_TIMES_OUT, SERVER_CUTS_STREAM = "server-times-out", "server-cuts-stream"
ENGINE_FAILS, TEXT_FAILS, CLIENT_STOPS = "engine-fails", "text-fails", "client-stops"
EXPECTED_BY_END = {
    CLIENT_DISCONNECTS: Expected("client_disconnect", UNSET),
    CLIENT_TIMES_OUT: Expected("client_disconnect", UNSET),
    SERVER_TIMES_OUT: Expected("timeout", ERROR),
    SERVER_CUTS_STREAM: Expected("timeout", ERROR),
    ENGINE_FAILS: Expected("MemoryError", ERROR, aborted=False),
    TEXT_FAILS: Expected("MemoryError", ERROR, aborted=False),
    CLIENT_STOPS: Expected("", UNSET),
}
ENDS = [
    *((end, where) for end in (CLIENT_DISCONNECTS, CLIENT_TIMES_OUT, ENGINE_FAILS) for where in STAGE_OF),
    *((end, where) for end in (SERVER_TIMES_OUT, CLIENT_STOPS) for where in STAGE_OF if where != "in-egress"),
    (SERVER_CUTS_STREAM, "in-decode"),
    (SERVER_CUTS_STREAM, "in-egress"),
    (TEXT_FAILS, "in-decode"),
]


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


class ControlledServer(Server):
    """A server with a control interface over HTTP."""

    def control(self, *words: object) -> Any:
        path = "/".join(map(str, words))
        return json.load(urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{path}", timeout=30))

    def wait_until(self, *words: object) -> None:
        wait_until(lambda: self.control(*words))


@pytest.fixture(scope="module")
def server(
    tiny_llama: Path, receiver: OtlpReceiver, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlledServer]:
    port = free_port()
    script = str(Path(__file__).parents[1] / "support" / "ending_server.py")
    options = (
        f"--host 127.0.0.1 --port {port} --device cpu --dtype float32 --attn-implementation sdpa".split()
    )
    command = [*RUN, sys.executable, script, "serve", str(tiny_llama), *options, *BATCHING]
    environ = {**receiver.environ, "OTEL_METRIC_EXPORT_INTERVAL": "200"}
    log = tmp_path_factory.mktemp("logs") / "server.log"
    with ControlledServer(command, port, log, environ) as server:
        chat(port, tiny_llama, tokens=4)
        wait_until(lambda: count_requests(receiver)[semconv.REQUEST_DURATION.name, "", ""] == 1)
        yield server


class Client:
    """A streamed chat completion that a test controls step by step."""

    def __init__(
        self,
        port: int,
        model: Path,
        headers: Mapping[str, str] | None = None,
        words: int = 40,
        stream: bool = True,
    ) -> None:
        self.trace_id, self.parent_id = secrets.token_hex(16), secrets.token_hex(8)
        self.request_id = secrets.token_hex(8)
        message = {"role": "user", "content": " ".join(["time"] * words)}
        body = {"model": str(model), "messages": [message], "max_tokens": 8, "stream": stream}
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self.connection.connect()
        self.connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        all_headers = {
            "content-type": "application/json",
            "traceparent": f"00-{self.trace_id}-{self.parent_id}-01",
            "x-request-id": self.request_id,
            **(headers or {}),
        }
        self.connection.request("POST", "/v1/chat/completions", json.dumps(body), all_headers)
        self.socket = self.connection.sock
        self.response = self.connection.getresponse()

    def read(self, timeout: float = 30) -> str:
        """Returns the rest of the body, or the name of the error."""
        self.socket.settimeout(timeout)
        try:
            return self.response.read().decode()
        except (OSError, http.client.HTTPException) as broken:
            return type(broken).__name__

    def leave(self) -> None:
        self.response.close()
        self.connection.close()


def count_requests(receiver: OtlpReceiver) -> Counter[tuple[str, str, str]]:
    """Returns the request counts by metric, error type and stage."""
    latest = {metric["name"]: metric for metric in receiver.metrics if metric["name"] in COUNTED_METRICS}
    counts: Counter[tuple[str, str, str]] = Counter()
    for name, metric in latest.items():
        for point in metric["points"]:
            attributes = point["attributes"]
            counts[name, attributes.get(semconv.ERROR_TYPE, ""), attributes.get(semconv.STAGE, "")] += point[
                "count"
            ]
    return counts


def trace(receiver: OtlpReceiver, trace_id: str) -> dict[str, dict[str, Any]]:
    """Returns the spans of a trace by name. Only steps may share a name."""

    def has_arrived(it: OtlpReceiver) -> bool:
        kinds = [span["kind"] for span in it.spans if span["trace_id"] == trace_id]
        return 2 in kinds and len(kinds) > 2

    assert receiver.wait_for(has_arrived, 20), "the request has not arrived"
    spans = [span for span in receiver.spans if span["trace_id"] == trace_id]
    counts = Counter(span["name"] for span in spans)
    assert {name for name, count in counts.items() if count > 1} <= {"decode step", "prefill step"}
    return {span["name"]: span for span in spans}


@contextlib.contextmanager
def occupy_engine(server: ControlledServer, model: Path, receiver: OtlpReceiver) -> Iterator[None]:
    """Holds the engine in a step of another request, which then ends normally."""
    server.control("arm", "decode", "hold", 2)
    client = Client(server.port, model)
    server.wait_until("held", "decode")
    yield
    server.control("release", "decode")
    assert '"finish_reason":"length"' in client.read()
    client.leave()
    assert_ordinary(trace(receiver, client.trace_id))


@contextlib.contextmanager
def end_early(server: ControlledServer, model: Path, end: str, where: str) -> Iterator[Client]:
    """Starts a request that ends early. The engine is held there during the block."""
    place = {TEXT_FAILS: "text"}.get(end, "egress" if where == "in-egress" else STAGE_OF[where])
    fails, unread = (
        end in (ENGINE_FAILS, TEXT_FAILS),
        where == "in-egress" and end in (CLIENT_DISCONNECTS, SERVER_CUTS_STREAM),
    )
    if fails or not (unread or where == "in-queue"):
        server.control("arm", place, "fail" if fails else "hold", PASSES.get(where, 0))
    if end == TEXT_FAILS:  # the engine does not wait for the text
        server.control("arm", "decode", "hold", 2)
    headers = {"x-deadline": str(DEADLINE_S)} if end in (SERVER_TIMES_OUT, SERVER_CUTS_STREAM) else {}
    client = Client(
        server.port,
        model,
        {**headers, "x-pad": str(PAD)} if unread else headers,
        words=600
        if end == CLIENT_STOPS
        else 40,  # a prompt in several steps, so that it can be stopped after the first
        stream=end != SERVER_TIMES_OUT,
    )
    if where == "in-egress" and not fails:
        server.wait_until("computed", client.request_id)
    elif where != "in-queue" and not fails:
        server.wait_until("held", place)
    ACTIONS[end](server, client)
    if place == "egress":  # the sender notices the disconnect at the next chunk
        server.control("release", place)
    yield client
    client.leave()
    server.control("release", "decode" if end == TEXT_FAILS else place)
    if end == ENGINE_FAILS and where in ("in-prefill", "in-decode"):
        server.control("revive")


def _time_out(server: ControlledServer, client: Client) -> None:
    assert client.read(0.3) == "TimeoutError"
    client.leave()


def _stop(server: ControlledServer, client: Client) -> None:
    server.control("stop", client.request_id)
    assert '"finish_reason":"' in client.read()


ACTIONS: dict[str, Callable[[ControlledServer, Client], Any]] = {
    CLIENT_DISCONNECTS: lambda server, client: client.leave(),
    CLIENT_TIMES_OUT: _time_out,
    SERVER_TIMES_OUT: lambda server, client: client.response.status == 504 or pytest.fail("it was in time"),
    SERVER_CUTS_STREAM: lambda server, client: None,
    ENGINE_FAILS: lambda server, client: client.read(),
    TEXT_FAILS: lambda server, client: client.read(),
    CLIENT_STOPS: _stop,
}


def assert_ordinary(spans: dict[str, dict[str, Any]]) -> None:
    request = spans[REQUEST]
    assert set(STAGES) <= set(spans)
    assert (request["status"], request["attributes"].get(semconv.ERROR_TYPE)) == (UNSET, None)
    assert request["attributes"][semconv.RESPONSE_FINISH_REASONS] == ["length"]


@pytest.mark.parametrize(("end", "where"), ENDS, ids=[f"{end}-{where}" for end, where in ENDS])
def test_early_end_names_its_stage_and_counts_once(
    server: ControlledServer, receiver: OtlpReceiver, tiny_llama: Path, end: str, where: str
) -> None:
    stage, expected, before = STAGE_OF[where], EXPECTED_BY_END[end], count_requests(receiver)
    waits = where == "in-queue" and end != ENGINE_FAILS
    others = occupy_engine(server, tiny_llama, receiver) if waits else contextlib.nullcontext()
    with others, end_early(server, tiny_llama, end, where) as client:
        spans = trace(receiver, client.trace_id)

    request, http_server = spans[REQUEST], spans["POST /v1/chat/completions"]
    assert (http_server["kind"], http_server["parent_span_id"]) == (2, client.parent_id)
    assert request["parent_span_id"] == http_server["span_id"]
    for span in (request, http_server):
        actual = span["status"], span["attributes"].get(semconv.ERROR_TYPE, "")
        assert actual == (expected.status, expected.error_type)
    assert request["attributes"][semconv.FAILED_STAGE] == stage
    children = [name for name, span in spans.items() if span["parent_span_id"] == request["span_id"]]
    below = [name for name in children if name not in WAITS]
    assert below == [*STAGES[: STAGES.index(stage) + 1]]
    assert spans[stage]["end"] == request["end"]

    ordinary = chat(server.port, tiny_llama, tokens=4)
    assert len(ordinary.chunks) == 4
    assert_ordinary(trace(receiver, ordinary.trace_id))

    counts = before.copy()
    for name in SUCCESS_METRICS:
        counts[name, "", ""] += 1 + waits
    counts[semconv.REQUEST_DURATION.name, expected.error_type, ""] += 1
    if expected.aborted:
        counts[semconv.REQUEST_ABANDONED.name, expected.error_type, stage] += 1
    receiver.wait_for(lambda it: count_requests(it) == counts, 5)
    assert count_requests(receiver) - before == counts - before
