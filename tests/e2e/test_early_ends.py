"""However and wherever a request ends early, its trace says where and why, and it is counted once."""

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
from tests.support.toy_server import until

pytestmark = pytest.mark.real

STAGES = ("ingress", "tokenize", "queue", "prefill", "decode", "postprocess")
STAGE_OF = {
    "in the queue": "queue",
    "in its prefill": "prefill",
    "in mid-decode": "decode",
    "in egress": "postprocess",
}
AFTER = {"in mid-decode": 2}
"""How many passes through the place are let go."""
PAD = 2_000_000
"""Bytes that neither the sockets between two processes nor the server hold back."""
DEADLINE_S = 1.0
OF_SUCCESSES = (
    semconv.REQUEST_DURATION.name,
    semconv.TIME_TO_FIRST_TOKEN.name,
    semconv.TIME_PER_OUTPUT_TOKEN.name,
)
COUNTED = (*OF_SUCCESSES, semconv.REQUEST_ABANDONED.name)
REQUEST = "chat tiny-llama"
UNSET, ERROR = 0, 2


class Why(NamedTuple):
    """What is said of a request that ended like this. `aborted`: how long it waited is counted, for nobody failed it."""

    error_type: str
    status: int
    aborted: bool = True


LEAVES, WAITS_NO_LONGER = "whose client leaves", "whose client waits no longer"
GIVEN_UP, CUT_OFF = "that its server gives up in time", "whose stream its server cuts off in time"
FAILS, STUMBLES, STOPS = "that fails", "whose text fails", "that its client stops"
WHY = {
    LEAVES: Why("client_disconnect", UNSET),
    WAITS_NO_LONGER: Why("client_disconnect", UNSET),
    GIVEN_UP: Why("timeout", ERROR),
    CUT_OFF: Why("timeout", ERROR),
    FAILS: Why("MemoryError", ERROR, aborted=False),
    STUMBLES: Why("MemoryError", ERROR, aborted=False),
    STOPS: Why("", UNSET),
}
ENDS = [
    *((why, where) for why in (LEAVES, WAITS_NO_LONGER, FAILS) for where in STAGE_OF),
    *((why, where) for why in (GIVEN_UP, STOPS) for where in STAGE_OF if where != "in egress"),
    (CUT_OFF, "in mid-decode"),
    (CUT_OFF, "in egress"),
    (STUMBLES, "in mid-decode"),
]


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


class Ending(Server):
    """The server, with what it is told."""

    def tell(self, *words: object) -> Any:
        path = "/".join(map(str, words))
        return json.load(urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{path}", timeout=30))

    def wait_until(self, *words: object) -> None:
        until(lambda: self.tell(*words))


@pytest.fixture(scope="module")
def server(
    tiny_llama: Path, receiver: OtlpReceiver, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ending]:
    port = free_port()
    script = str(Path(__file__).parents[1] / "support" / "ending_server.py")
    options = (
        f"--host 127.0.0.1 --port {port} --device cpu --dtype float32 --attn-implementation sdpa".split()
    )
    command = [*RUN, sys.executable, script, "serve", str(tiny_llama), *options, *BATCHING]
    environ = {**receiver.environ, "OTEL_METRIC_EXPORT_INTERVAL": "200"}
    log = tmp_path_factory.mktemp("logs") / "server.log"
    with Ending(command, port, log, environ) as server:
        chat(port, tiny_llama, tokens=4)
        until(lambda: counted(receiver)[semconv.REQUEST_DURATION.name, "", ""] == 1)
        yield server


class Client:
    """One streamed chat completion, held in the hand."""

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
        said = {
            "content-type": "application/json",
            "traceparent": f"00-{self.trace_id}-{self.parent_id}-01",
            "x-request-id": self.request_id,
            **(headers or {}),
        }
        self.connection.request("POST", "/v1/chat/completions", json.dumps(body), said)
        self.socket = self.connection.sock
        self.response = self.connection.getresponse()

    def read(self, timeout: float = 30) -> str:
        """All there is; what went wrong instead, if something did."""
        self.socket.settimeout(timeout)
        try:
            return self.response.read().decode()
        except (OSError, http.client.HTTPException) as broken:
            return type(broken).__name__

    def leave(self) -> None:
        self.response.close()
        self.connection.close()


def counted(receiver: OtlpReceiver) -> Counter[tuple[str, str, str]]:
    """How many requests were counted so far, by metric, error type and stage."""
    latest = {metric["name"]: metric for metric in receiver.metrics if metric["name"] in COUNTED}
    counts: Counter[tuple[str, str, str]] = Counter()
    for name, metric in latest.items():
        for point in metric["points"]:
            said = point["attributes"]
            counts[name, said.get(semconv.ERROR_TYPE, ""), said.get(semconv.STAGE, "")] += point["count"]
    return counts


def trace(receiver: OtlpReceiver, trace_id: str) -> dict[str, dict[str, Any]]:
    """The spans of a trace by name; the same name twice is an error but for steps."""

    def there(it: OtlpReceiver) -> bool:
        kinds = [span["kind"] for span in it.spans if span["trace_id"] == trace_id]
        return 2 in kinds and len(kinds) > 2

    assert receiver.wait_for(there, 20), "the request has not arrived"
    spans = [span for span in receiver.spans if span["trace_id"] == trace_id]
    counts = Counter(span["name"] for span in spans)
    assert {name for name, count in counts.items() if count > 1} <= {"decode step", "prefill step"}
    return {span["name"]: span for span in spans}


@contextlib.contextmanager
def occupied(server: Ending, model: Path, receiver: OtlpReceiver) -> Iterator[None]:
    """The engine is in the midst of a step for somebody else, who is none the worse for it."""
    server.tell("arm", "decode", "hold", 2)
    client = Client(server.port, model)
    server.wait_until("held", "decode")
    yield
    server.tell("release", "decode")
    assert '"finish_reason":"length"' in client.read()
    client.leave()
    assert_ordinary(trace(receiver, client.trace_id))


@contextlib.contextmanager
def ending(server: Ending, model: Path, why: str, where: str) -> Iterator[Client]:
    """A request that ends like this. The engine is held there until the block is over."""
    place = {STUMBLES: "text"}.get(why, "egress" if where == "in egress" else STAGE_OF[where])
    fails, unread = why in (FAILS, STUMBLES), where == "in egress" and why in (LEAVES, CUT_OFF)
    if fails or not (unread or where == "in the queue"):
        server.tell("arm", place, "fail" if fails else "hold", AFTER.get(where, 0))
    if why == STUMBLES:  # the engine does not wait for the text
        server.tell("arm", "decode", "hold", 2)
    headers = {"x-deadline": str(DEADLINE_S)} if why in (GIVEN_UP, CUT_OFF) else {}
    client = Client(
        server.port,
        model,
        {**headers, "x-pad": str(PAD)} if unread else headers,
        words=600
        if why == STOPS
        else 40,  # a prompt in several steps, so that it can be stopped after the first
        stream=why != GIVEN_UP,
    )
    if where == "in egress" and not fails:
        server.wait_until("computed", client.request_id)
    elif where != "in the queue" and not fails:
        server.wait_until("held", place)
    DEEDS[why](server, client)
    if place == "egress":  # who only sends learns with the next piece that nobody is there
        server.tell("release", place)
    yield client
    client.leave()
    server.tell("release", "decode" if why == STUMBLES else place)
    if why == FAILS and where in ("in its prefill", "in mid-decode"):
        server.tell("revive")


def _wait_no_longer(server: Ending, client: Client) -> None:
    assert client.read(0.3) == "TimeoutError"
    client.leave()


def _stop(server: Ending, client: Client) -> None:
    server.tell("stop", client.request_id)
    assert '"finish_reason":"' in client.read()


DEEDS: dict[str, Callable[[Ending, Client], Any]] = {
    LEAVES: lambda server, client: client.leave(),
    WAITS_NO_LONGER: _wait_no_longer,
    GIVEN_UP: lambda server, client: client.response.status == 504 or pytest.fail("it was in time"),
    CUT_OFF: lambda server, client: None,
    FAILS: lambda server, client: client.read(),
    STUMBLES: lambda server, client: client.read(),
    STOPS: _stop,
}


def assert_ordinary(spans: dict[str, dict[str, Any]]) -> None:
    request = spans[REQUEST]
    assert set(STAGES) <= set(spans)
    assert (request["status"], request["attributes"].get(semconv.ERROR_TYPE)) == (UNSET, None)
    assert request["attributes"][semconv.RESPONSE_FINISH_REASONS] == ["length"]


@pytest.mark.parametrize(("why", "where"), ENDS, ids=[f"{why} {where}" for why, where in ENDS])
def test_its_trace_names_its_stage_and_why_and_it_is_counted_once__a_request(
    server: Ending, receiver: OtlpReceiver, tiny_llama: Path, why: str, where: str
) -> None:
    stage, expected, before = STAGE_OF[where], WHY[why], counted(receiver)
    waits = where == "in the queue" and why != FAILS
    others = occupied(server, tiny_llama, receiver) if waits else contextlib.nullcontext()
    with others, ending(server, tiny_llama, why, where) as client:
        spans = trace(receiver, client.trace_id)

    request, http_server = spans[REQUEST], spans["POST /v1/chat/completions"]
    assert (http_server["kind"], http_server["parent_span_id"]) == (2, client.parent_id)
    assert request["parent_span_id"] == http_server["span_id"]
    for span in (request, http_server):
        said = span["status"], span["attributes"].get(semconv.ERROR_TYPE, "")
        assert said == (expected.status, expected.error_type)
    assert request["attributes"][semconv.FAILED_STAGE] == stage
    below = [name for name, span in spans.items() if span["parent_span_id"] == request["span_id"]]
    assert below == [*STAGES[: STAGES.index(stage) + 1]]
    assert spans[stage]["end"] == request["end"]

    ordinary = chat(server.port, tiny_llama, tokens=4)
    assert len(ordinary.chunks) == 4
    assert_ordinary(trace(receiver, ordinary.trace_id))

    counts = before.copy()
    for name in OF_SUCCESSES:
        counts[name, "", ""] += 1 + waits
    counts[semconv.REQUEST_DURATION.name, expected.error_type, ""] += 1
    if expected.aborted:
        counts[semconv.REQUEST_ABANDONED.name, expected.error_type, stage] += 1
    receiver.wait_for(lambda it: counted(it) == counts, 5)
    assert counted(receiver) - before == counts - before
