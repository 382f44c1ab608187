"""Requests that wait in the socket while the event loop is blocked: their stage `accept`."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_infer.instrumentation.http_server import socket_wait
from otel_infer.ringbuffer import events
from tests.instrumentation.asgi.test_servers import (
    Connection,
    ended,
    hooked,
    record_of,
    serve,
    serve_hypercorn,
)
from tests.unit.instrumentation.asgi.test_asgi import Seen, Watched, watched

pytestmark = pytest.mark.skipif(
    not hasattr(socket, "TCP_INFO"), reason="the kernel does not report when bytes arrived (Linux only)"
)
__all__ = ["hooked", "serve", "serve_hypercorn", "watched"]

BLOCKED_S, SENT_AFTER_S = 0.4, 0.1
TICK_NS = socket_wait.TICK_NS


class BlockingApp:
    """Blocks its event loop in POST /block."""

    def __init__(self) -> None:
        self.is_blocked = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == "/block":
            self.is_blocked.set()
            time.sleep(BLOCKED_S)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})


def send_while_blocked(port: int, app: BlockingApp, waiting: Connection | None = None) -> float:
    """Sends a request while another one blocks the loop; returns how long it took, ns."""
    Connection(port).send_request("/warm").read_until(b"done")
    blocking = Connection(port).send_request("/block")
    assert app.is_blocked.wait(5)
    time.sleep(SENT_AFTER_S)
    sent_at = time.perf_counter_ns()
    waiting = waiting or Connection(port)
    waiting.send_request("/wait").read_until(b"done")
    took = time.perf_counter_ns() - sent_at
    blocking.read_until(b"done")
    return took


def find_accepts(seen: Seen) -> list[events.StageEnded]:
    return [event for event in seen.every(events.StageEnded) if event.stage == "accept"]


def assert_waited(watched: Watched, took: float) -> None:
    """Asserts that the last request to arrive waited as long as the loop was blocked, and that no other did.

    On a busy machine the others wait a few milliseconds for a core.
    """
    *others, waited = ended(watched, 3)
    expected = (BLOCKED_S - SENT_AFTER_S) * 1e9
    waits = [accept.at - accept.started_at for seen in others for accept in find_accepts(seen)]
    assert all(wait < expected / 4 for wait in waits), waits
    (accept,) = find_accepts(waited)
    assert expected / 2 < accept.at - accept.started_at <= took + TICK_NS
    record = record_of(waited)
    assert record.arrived_at == accept.started_at
    assert [stage.name for stage in record.stages][:1] == ["accept"]
    assert expected / 2 < record.duration_ns <= took + TICK_NS


@pytest.mark.parametrize("http", ["h11", "httptools"])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_uvicorn_request_waited_in_its_socket(
    serve: Callable[..., int], watched: Watched, http: str, loop: str
) -> None:
    pytest.importorskip(http, reason=f"{http} is not installed")
    pytest.importorskip(loop, reason=f"{loop} is not installed")
    app = BlockingApp()
    assert_waited(watched, send_while_blocked(serve(app, http=http, loop=loop), app))


def test_hypercorn_request_waited_in_its_socket(
    serve_hypercorn: Callable[[Any], int], watched: Watched
) -> None:
    app = BlockingApp()
    assert_waited(watched, send_while_blocked(serve_hypercorn(app), app))


def test_kept_connection_waited_in_its_socket(serve: Callable[..., int], watched: Watched) -> None:
    """The bytes of an earlier request on the connection do not count."""
    app = BlockingApp()
    port = serve(app)
    kept = Connection(port).send_request("/first")
    kept.read_until(b"done")
    took = send_while_blocked(port, app, kept)
    (accept,) = find_accepts(ended(watched, 4)[-1])
    assert (BLOCKED_S - SENT_AFTER_S) * 5e8 < accept.at - accept.started_at <= took + TICK_NS


def test_request_of_python_code_waited_in_its_socket(
    serve: Callable[..., int], watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the compiled module, the wait is the same."""
    monkeypatch.setattr(socket_wait, "native", None)
    monkeypatch.setattr("otel_infer.instrumentation.asgi.plain_requests._plain", None)
    app = BlockingApp()
    assert_waited(watched, send_while_blocked(serve(app), app))


def test_unix_socket_has_no_accept_stage(serve: Callable[..., int], watched: Watched, tmp_path: Path) -> None:
    """The kernel reports it for TCP only."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        with socket.socket(socket.AF_UNIX) as client:
            listener.listen()
            client.connect(str(tmp_path / "socket"))
            server, _ = listener.accept()
            with server:
                client.sendall(b"x")
                time.sleep(0.02)
                assert socket_wait.estimate_socket_wait(server, time.monotonic_ns()) == 0


def test_closed_connection_has_no_wait() -> None:
    assert socket_wait.estimate_socket_wait(None, time.monotonic_ns()) == 0


@pytest.fixture(params=["compiled", "python"])
def code(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(socket_wait, "native", None)


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Client and server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as client:
            server, _ = listener.accept()
            with server:
                yield client, server


@pytest.mark.usefixtures("code")
@pytest.mark.parametrize("ticks", [1.5, 2.3, 6, 25])
def test_wait_is_known_to_half_a_tick_of_the_kernel(
    ticks: float, connection: tuple[socket.socket, socket.socket]
) -> None:
    """On a busy machine ticks may be late; the median is right."""
    client, server = connection
    errors = []
    for _ in range(21):
        client.sendall(b"x")
        sent_at = time.monotonic_ns()
        time.sleep(ticks * TICK_NS / 1e9)
        called_at = time.monotonic_ns()
        waited = socket_wait.estimate_socket_wait(server, called_at)
        errors.append(abs(waited - (called_at - sent_at)))
        assert server.recv(1) == b"x"  # the descriptor stays open
    assert sorted(errors)[10] <= TICK_NS / 2


@pytest.mark.usefixtures("code")
def test_no_wait_is_recorded_where_there_may_have_been_none(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    """Bytes that arrived just before a tick are one tick old right after it. On a busy machine a tick may be late."""
    client, server = connection
    until = time.monotonic() + 0.5
    wrong = []
    while time.monotonic() < until:
        earliest = time.monotonic_ns()
        client.sendall(b"x")
        called_at = time.monotonic_ns()
        waited = socket_wait.estimate_socket_wait(server, called_at)
        wrong.append(bool(waited) and called_at - earliest < socket_wait.MIN_WAIT_NS)
        server.recv(1)
    ticks = 0.5e9 / TICK_NS
    assert sum(wrong) <= ticks / 10
