"""HTTP requests over real sockets: uvicorn with FastAPI, Starlette and bare applications, and faulty clients."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="uvicorn is not installed")
pytest.importorskip("fastapi", reason="fastapi is not installed")

import fastapi
import starlette.applications
import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.responses import StreamingResponse
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.responses import StreamingResponse as Streaming
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

import otel_infer
from otel_infer import _clock
from otel_infer.assembly.assembler import Assembler
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.assembly.requests.ended_requests import GRACE_NS
from otel_infer.cli.demo.free_port import find_free_port
from otel_infer.instrumentation import asgi
from otel_infer.instrumentation.asgi import exchange
from otel_infer.ringbuffer import events
from otel_infer.tracing import request_span
from otel_infer.tracing import start as ingress
from tests.unit.instrumentation.asgi.test_asgi import SPAN_ID, TRACE_ID, Seen, Watched, watched

__all__ = ["watched"]

TRACEPARENT = f"traceparent: 00-{TRACE_ID}-{SPAN_ID}-01\r\n"


@pytest.fixture(autouse=True)
def hooked() -> Iterator[None]:
    asgi.instrumentor.install()
    assert asgi.instrumentor.status.drift is None
    yield
    asgi.instrumentor.remove()


@pytest.fixture
def serve() -> Iterator[Callable[..., int]]:
    """Runs an application on uvicorn in a thread; returns its port."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(app: Any, **settings: Any) -> int:
        config = uvicorn.Config(app, port=0, log_level="critical", timeout_graceful_shutdown=1, **settings)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        running.append((server, thread))
        until(lambda: server.started)
        return int(server.servers[0].sockets[0].getsockname()[1])

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(5)


@pytest.fixture
def serve_hypercorn() -> Iterator[Callable[[Any], int]]:
    """Runs an application on hypercorn in a thread; returns its port."""
    pytest.importorskip("hypercorn", reason="hypercorn is not installed")
    from hypercorn.asyncio import serve as run_server
    from hypercorn.config import Config

    running: list[tuple[Callable[[], None], threading.Thread]] = []

    def start(app: Any) -> int:
        port = find_free_port()
        config, loop, stopping = Config(), asyncio.new_event_loop(), asyncio.Event()
        config.bind, config.graceful_timeout = [f"127.0.0.1:{port}"], 0.2
        serving = run_server(app, config, shutdown_trigger=stopping.wait, mode="asgi")  # type: ignore[arg-type]
        thread = threading.Thread(target=loop.run_until_complete, args=(serving,), daemon=True)
        thread.start()
        running.append((lambda: loop.call_soon_threadsafe(stopping.set) and None, thread))
        until(lambda: is_listening(port))
        return port

    yield start
    for stop, thread in running:
        stop()
        thread.join(5)


def is_listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Returns the exporter of the tracer provider set for this process."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return exporter


def until(reached: Callable[[], Any], timeout: float = 5.0) -> None:
    deadline = time.monotonic() + timeout
    while not reached():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.002)


def ended(watched: Watched, count: int = 1) -> list[Seen]:
    """Returns the requests once at least `count` of them have ended."""
    until(lambda: sum(len(seen.every(events.RequestEnded)) for seen in watched.requests) >= count)
    return watched.requests


def record_of(seen: Seen) -> RequestRecord:
    assembler = Assembler()
    assembler.feed_events(events.RecordedEvent(1, 1, event) for event in seen.said)
    (record,) = assembler.drain_records(seen.ended.at + GRACE_NS)
    return record


class Connection:
    """A client's end of a connection; bytes in, bytes out."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.settimeout(5)

    def send_request(
        self, path: str, body: bytes = b"{}", method: str = "POST", headers: str = ""
    ) -> Connection:
        head = f"{method} {path} HTTP/1.1\r\nhost: test\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
        self.socket.sendall(head.encode() + body)
        return self

    def read_until(self, end: bytes) -> bytes:
        got = b""
        while end not in got:
            part = self.socket.recv(65536)
            assert part, got
            got += part
        return got

    def read_all(self) -> bytes:
        got = []
        with contextlib.suppress(ConnectionError):
            while part := self.socket.recv(1 << 20):
                got.append(part)
        return b"".join(got)

    def close(self) -> None:
        self.socket.close()


def posted(port: int, path: str, body: bytes = b"{}", method: str = "POST", headers: str = "") -> bytes:
    """Returns the whole response to one request."""
    connection = Connection(port).send_request(path, body, method, f"connection: close\r\n{headers}")
    try:
        return connection.read_all()
    finally:
        connection.close()


def infer(request: request_span.RequestSpan | None) -> None:
    """Records what an engine would record."""
    assert request is not None
    request.record_submitted("toy")
    request.record_token_reached()


class PassThroughMiddleware(BaseHTTPMiddleware):
    async def dispatch(self, request: Any, call_next: Any) -> Any:
        return await call_next(request)


def make_app(**settings: Any) -> FastAPI:
    app = FastAPI(**settings)
    api = fastapi.APIRouter(prefix="/v1")

    @api.post("/models/{model}/stream")
    async def stream(model: str, chunks: int = 3, pause: float = 0.0, size: int = 8) -> StreamingResponse:
        infer(ingress.current_request())

        async def events() -> AsyncIterator[bytes]:
            for _ in range(chunks):
                yield b"data: " + b"x" * size + b"\n\n"
                await asyncio.sleep(pause)

        return StreamingResponse(events(), media_type="text/event-stream")

    def lookup() -> str:
        assert ingress.current_request() is not None
        return "found"

    @api.post("/json")
    async def answer(request: Request, found: str = Depends(lookup)) -> dict[str, Any]:
        body = await request.body()
        infer(ingress.current_request())
        return {"bytes": len(body), "found": found}

    @api.post("/sync")
    def sync(request: Request) -> dict[str, bool]:
        infer(ingress.current_request())
        return {"main": threading.current_thread() is threading.main_thread()}

    @api.post("/slow")
    async def slow() -> dict[str, bool]:
        await asyncio.sleep(0.1)
        return {}

    @api.post("/fails")
    async def fails(request: Request) -> None:
        raise ZeroDivisionError("canary")

    @app.get("/health")
    async def health() -> dict[str, bool]:
        return {"current": isinstance(ingress.find_request(), request_span.RequestSpan)}

    @app.get("/models/{name}/score")
    def score(name: str) -> dict[str, bool]:
        return {"current": ingress.current_request() is not None}

    app.include_router(api)
    return app


# ── FastAPI ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_streamed_response_records_route_and_first_token(watched: Watched, serve: Callable[..., int]) -> None:
    answer = posted(serve(make_app()), "/v1/models/canary/stream", headers=TRACEPARENT)
    assert answer.count(b"data:") == 3
    (seen,) = ended(watched)
    assert seen.verdict == (events.OK, "", 200)
    assert seen.attributes == {
        "http.request.method": "POST",
        "url.scheme": "http",
        "http.route": "/v1/models/{model}/stream",
    }
    assert seen.arrived.parent_span_id.hex() == SPAN_ID
    (started,), (first,) = seen.every(events.ResponseStarted), seen.every(events.FirstTokenSent)
    assert seen.arrived.at < started.at == first.at < seen.ended.at
    assert b"canary" not in watched.bytes


@pytest.mark.parametrize("path", ["/v1/json", "/v1/sync"])
@pytest.mark.parametrize("middleware", [False, True])
def test_request_is_current_in_endpoints_dependencies_and_threads(
    watched: Watched, serve: Callable[..., int], path: str, middleware: bool
) -> None:
    app = make_app()
    if middleware:
        app.add_middleware(PassThroughMiddleware)
    assert b"200 OK" in posted(serve(app), path)
    (seen,) = ended(watched)
    assert seen.every(events.RequestSubmitted) and seen.attributes["http.route"] == path


def test_a_health_check_is_not_a_request(watched: Watched, serve: Callable[..., int]) -> None:
    port = serve(make_app())
    assert b'{"current":false}' in posted(port, "/health", method="GET")
    posted(port, "/v1/json")
    assert len(ended(watched)) == 1


def test_a_get_that_reaches_a_model_is_a_request(watched: Watched, serve: Callable[..., int]) -> None:
    port = serve(make_app())
    assert b'{"current":true}' in posted(port, "/models/a/score", method="GET")
    (seen,) = ended(watched)
    assert seen.verdict == (events.OK, "", 200)
    assert seen.attributes["http.route"] == "/models/{name}/score"


def test_excluded_urls_are_served_and_not_traced(watched: Watched, serve: Callable[..., int]) -> None:
    asgi.configure_asgi("/fails,/sl.w")
    port = serve(make_app())
    assert b"200 OK" in posted(port, "/v1/slow")
    assert b"200 OK" in posted(port, "/v1/json")
    (seen,) = ended(watched)
    assert seen.attributes["http.route"] == "/v1/json"


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/canary", 404), ("/v1/models/a/stream?chunks=canary", 422)]
)
def test_a_client_error_without_endpoint_is_no_error(
    watched: Watched, serve: Callable[..., int], path: str, status: int
) -> None:
    posted(serve(make_app()), path)
    (seen,) = ended(watched)
    assert seen.verdict == (events.OK, "", status)
    assert seen.attributes.get("http.route") == ("/v1/models/{model}/stream" if status == 422 else None)
    assert b"canary" not in watched.bytes


def test_an_exception_before_the_response_is_a_500(watched: Watched, serve: Callable[..., int]) -> None:
    assert b"500 Internal" in posted(serve(make_app()), "/v1/fails")
    (seen,) = ended(watched)
    assert seen.verdict == (events.ERROR, "ZeroDivisionError", 500)
    assert b"canary" not in watched.bytes


@pytest.mark.parametrize("middleware", [False, True])
@pytest.mark.parametrize(
    ("failure", "verdict"),
    [
        (ZeroDivisionError("canary"), (events.ERROR, "ZeroDivisionError", 200)),
        (TimeoutError(), (events.ABORTED, "timeout", 200)),
    ],
)
@pytest.mark.parametrize("chunks", [0, 2])
def test_exception_in_mid_stream_keeps_the_sent_status(
    watched: Watched,
    serve: Callable[..., int],
    failure: Exception,
    verdict: tuple[int, str, int],
    chunks: int,
    middleware: bool,
) -> None:
    """Starlette's middleware ends such a response normally and raises afterwards."""
    app = make_app()

    @app.post("/fails-later")
    async def fails_later() -> StreamingResponse:
        async def events() -> AsyncIterator[bytes]:
            for _ in range(chunks):
                yield b"data\n\n"
            raise failure

        return StreamingResponse(events())

    if middleware:
        app.add_middleware(PassThroughMiddleware)
    assert b"200 OK" in posted(serve(app), "/fails-later")
    (seen,) = ended(watched)
    assert seen.verdict == verdict
    assert b"canary" not in watched.bytes


def test_an_exception_mapped_to_4xx_is_no_error(watched: Watched, serve: Callable[..., int]) -> None:
    async def refuses(scope: Any, receive: Any, send: Any) -> None:
        raise fastapi.HTTPException(409)

    app = starlette.applications.Starlette(routes=[Mount("/", app=refuses)])
    assert b"409" in posted(serve(app), "/taken")
    (seen,) = ended(watched)
    assert seen.verdict == (events.OK, "", 409)


def test_a_failure_after_the_last_byte_is_ignored(watched: Watched, serve: Callable[..., int]) -> None:
    app = make_app()

    @app.post("/later")
    async def later(tasks: fastapi.BackgroundTasks) -> dict[str, bool]:
        tasks.add_task(lambda: 1 / 0)
        return {}

    app.add_middleware(PassThroughMiddleware)
    assert b"200 OK" in posted(serve(app), "/later")
    (seen,) = ended(watched)
    assert seen.verdict == (events.OK, "", 200)


def test_a_504_response_is_a_timeout(watched: Watched, serve: Callable[..., int]) -> None:
    app = make_app()

    @app.post("/late")
    async def late() -> dict[str, bool]:
        try:
            await asyncio.wait_for(asyncio.sleep(10), 0.02)
        except TimeoutError:
            raise fastapi.HTTPException(504) from None
        return {}

    assert b"504" in posted(serve(app), "/late")
    (seen,) = ended(watched)
    assert seen.verdict == (events.ABORTED, "timeout", 504)


@pytest.mark.parametrize("middleware", [False, True])
def test_client_disconnect_in_mid_stream_aborts_at_once(
    watched: Watched, serve: Callable[..., int], middleware: bool
) -> None:
    app = make_app()
    if middleware:
        app.add_middleware(PassThroughMiddleware)
    connection = Connection(serve(app)).send_request("/v1/models/a/stream?chunks=50&pause=0.02")
    connection.read_until(b"data:")
    left_at = _clock.now()
    connection.close()
    (seen,) = ended(watched)
    assert seen.verdict == (events.ABORTED, "client_disconnect", 200)
    assert 0 < seen.ended.at - left_at < 100_000_000


def test_a_disconnect_before_the_body_is_complete_aborts(watched: Watched, serve: Callable[..., int]) -> None:
    connection = Connection(serve(make_app()))
    connection.socket.sendall(b"POST /v1/json HTTP/1.1\r\nhost: test\r\ncontent-length: 10\r\n\r\n{")
    until(lambda: watched.requests)
    connection.close()
    (seen,) = ended(watched)
    assert seen.verdict == (events.ABORTED, "client_disconnect", 0)


def test_a_disconnect_before_an_unstreamed_response_aborts(
    watched: Watched, serve: Callable[..., int]
) -> None:
    connection = Connection(serve(make_app())).send_request("/v1/slow")
    until(lambda: watched.requests)
    connection.close()
    (seen,) = ended(watched)
    assert seen.verdict == (events.ABORTED, "client_disconnect", 0)


def test_a_slow_request_body_is_part_of_ingress(watched: Watched, serve: Callable[..., int]) -> None:
    port = serve(make_app())
    posted(port, "/v1/json")  # keeps imports and compilation at the first request out of the measurement
    connection = Connection(port)
    connection.socket.sendall(b"POST /v1/json HTTP/1.1\r\nhost: test\r\ncontent-length: 4\r\n\r\n{")
    until(lambda: len(watched.requests) == 2)
    time.sleep(0.05)
    connection.socket.sendall(b"}  ")
    connection.read_until(b"found")
    record = record_of(ended(watched, 2)[1])
    ingress_stage = record.find_stage("ingress")
    assert ingress_stage is not None
    assert 45e6 < ingress_stage.ended_at - ingress_stage.started_at < 60e6
    assert record.ended_at - ingress_stage.ended_at < 5e6


def test_a_slow_reader_counts_as_send_wait_only(watched: Watched, serve: Callable[..., int]) -> None:
    path = "/v1/models/a/stream?chunks=32&size=1000000"
    connection = Connection(serve(make_app())).send_request(path, headers="connection: close\r\n")
    until(lambda: watched.requests and watched.one.every(events.FirstTokenSent))
    time.sleep(0.3)
    connection.read_all()
    (seen,) = ended(watched)
    assert seen.verdict == (events.OK, "", 200)
    (first,) = seen.every(events.FirstTokenSent)
    assert first.at - seen.arrived.at < 100e6
    assert 250e6 < seen.ended.send_wait_ns < seen.ended.at - first.at


def test_a_uvicorn_that_reports_no_last_byte_is_timed_per_chunk(
    watched: Watched, serve: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from uvicorn.protocols.http import h11_impl

    class Cycle(h11_impl.RequestResponseCycle):
        """Has its callback under another name, and takes no attributes of ours."""

        __slots__ = ("callback",)

        def __setattr__(self, name: str, value: Any) -> None:
            assert not name.startswith("otel_infer")
            super().__setattr__("callback" if name == "on_response" else name, value)

        def __getattribute__(self, name: str) -> Any:
            if name == "on_response" and sys._getframe(1).f_globals["__name__"].startswith("otel_infer"):
                raise AttributeError(name)
            return super().__getattribute__("callback" if name == "on_response" else name)

    Cycle.__module__ = h11_impl.__name__
    monkeypatch.setattr(h11_impl, "RequestResponseCycle", Cycle)
    answer = posted(serve(make_app(), http="h11"), "/v1/models/canary/stream")
    assert answer.count(b"data:") == 3
    (seen,) = ended(watched)
    assert seen.verdict == (events.OK, "", 200)
    assert seen.ended.chunks == 3


async def bulk(scope: Any, receive: Any, send: Any) -> None:
    """Streams 8 MB."""
    if scope["type"] != "http":
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(80):
        await send({"type": "http.response.body", "body": bytes(100_000), "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def test_a_slow_reader_of_hypercorn_is_known_from_the_transport(
    watched: Watched, serve_hypercorn: Callable[[Any], int]
) -> None:
    connection = Connection(serve_hypercorn(bulk)).send_request("/")
    time.sleep(0.3)
    connection.read_until(b"\r\n0\r\n\r\n")
    (seen,) = ended(watched)
    assert seen.verdict == (events.OK, "", 200)
    assert seen.ended.chunks == 0
    assert 200e6 < seen.ended.send_wait_ns < seen.ended.at - seen.arrived.at


@pytest.mark.parametrize("path", ["/v1/models/a/stream?pause=0.02", "/v1/json", "/v1/slow"])
def test_hypercorn_that_closes_the_connection_after_the_response_is_no_disconnect(
    watched: Watched, serve_hypercorn: Callable[[Any], int], path: str
) -> None:
    """It sends `http.disconnect` after the last byte, while the application is still in its last `send`."""
    assert b"200" in posted(serve_hypercorn(make_app()), path)
    (seen,) = ended(watched)
    assert seen.verdict == (events.OK, "", 200)


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/slow", 0), ("/v1/models/a/stream?chunks=50&pause=0.02", 200)]
)
def test_a_client_that_leaves_hypercorn_aborts_at_once(
    watched: Watched, serve_hypercorn: Callable[[Any], int], path: str, status: int
) -> None:
    connection = Connection(serve_hypercorn(make_app())).send_request(path)
    if status:
        connection.read_until(b"data:")
    until(lambda: watched.requests)
    left_at = _clock.now()
    connection.close()
    (seen,) = ended(watched)
    assert seen.verdict == (events.ABORTED, "client_disconnect", status)
    assert 0 < seen.ended.at - left_at < 60_000_000


@pytest.mark.parametrize("late", [False, True])
def test_large_bodies_on_one_connection_make_separate_traces(
    watched: Watched, serve: Callable[..., int], late: bool
) -> None:
    if late:  # the server starts before the hooks are installed
        asgi.instrumentor.remove()
    port = serve(make_app())
    asgi.instrumentor.install()
    connection = Connection(port)
    for _ in range(3):
        connection.send_request("/v1/json", body=b"x" * 1_000_000).read_until(b"found")
    requests = ended(watched, 3)
    assert len({seen.arrived.trace_id for seen in requests}) == 3
    assert all(seen.arrived.flags & events.OWN_SERVER_SPAN for seen in requests)


def test_pipelined_requests_have_separate_traces(watched: Watched, serve: Callable[..., int]) -> None:
    connection = Connection(serve(make_app()))
    connection.send_request("/v1/json").send_request("/v1/json")
    until(lambda: len(watched.requests) == 2)
    first, second = ended(watched, 2)
    assert first.arrived.trace_id != second.arrived.trace_id
    assert not any(second.arrived.parent_span_id)


def test_an_application_loaded_before_install_is_traced(watched: Watched, serve: Callable[..., int]) -> None:
    asgi.instrumentor.remove()
    port = serve(make_app())
    asgi.instrumentor.install()
    assert b"200 OK" in posted(port, "/v1/json", headers=TRACEPARENT)
    (seen,) = ended(watched)
    assert seen.arrived.parent_span_id.hex() == SPAN_ID
    assert seen.attributes["http.route"] == "/v1/json"


def test_a_loaded_application_is_not_traced_after_remove(watched: Watched, serve: Callable[..., int]) -> None:
    port = serve(make_app())
    asgi.instrumentor.remove()
    assert b"200 OK" in posted(port, "/v1/slow")
    assert watched.requests == []


# ── routes ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/items/canary", "/items/{item}"),
        ("/tenants/canary/v2/chat/canary", "/tenants/{tenant}/v2/chat/{number}"),
        ("/tenants/canary/elsewhere", "/tenants/{tenant}/{path}"),
        ("/files/canary", "/files/{path}"),
        ("/mounted/nested/canary", "/mounted/nested/{name}"),
        ("/mounted/plain", "/mounted/plain"),
        ("/canary", None),
    ],
)
@pytest.mark.parametrize("root", ["", "/api"])
def test_a_route_is_recorded_with_its_parameter_names(
    watched: Watched, serve: Callable[..., int], path: str, route: str | None, root: str
) -> None:
    async def answer(request: Any) -> PlainTextResponse:
        return PlainTextResponse("")

    sub = FastAPI()
    nested = fastapi.APIRouter()

    @nested.post("/{name}")
    async def named(name: str) -> None: ...

    sub.include_router(nested, prefix="/nested")
    sub.router.routes.append(Route("/plain", answer, methods=["POST"]))
    chat = Route("/chat/{number:path}", answer, methods=["POST"])
    app = starlette.applications.Starlette(
        routes=[
            Route("/items/{item}", answer, methods=["POST"]),
            Mount("/tenants/{tenant}", routes=[Mount("/v2", routes=[chat])]),
            Mount("/files", StaticFiles(directory="/")),
            Mount("/mounted", sub),
        ]
    )
    # The server adds its root path itself, so the client does not send it.
    posted(serve(app, root_path=root), path)
    (seen,) = ended(watched)
    assert seen.attributes.get("http.route") == (route and root + route)
    assert b"canary" not in watched.bytes


def test_routes_include_the_root_path_of_the_application(watched: Watched, serve: Callable[..., int]) -> None:
    posted(serve(make_app(root_path="/api")), "/v1/slow")
    (seen,) = ended(watched)
    assert seen.attributes["http.route"] == "/api/v1/slow"


# ── Starlette and others ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_starlette_application_is_traced(watched: Watched, serve: Callable[..., int]) -> None:
    async def answer(request: Any) -> JSONResponse:
        assert ingress.current_request() is not None
        return JSONResponse({"bytes": len(await request.body())})

    async def stream(request: Any) -> Streaming:
        return Streaming(iter([b"a", b"b"]))

    routes = [Route("/answer", answer, methods=["POST"]), Route("/stream", stream, methods=["PUT"])]
    port = serve(starlette.applications.Starlette(routes=routes))
    assert b"200 OK" in posted(port, "/answer")
    assert b"200 OK" in posted(port, "/stream", method="PUT")
    first, second = ended(watched, 2)
    assert (first.attributes["http.route"], second.attributes["http.route"]) == ("/answer", "/stream")
    assert (first.ended.chunks, second.ended.chunks) == (1, 0)  # a stream's are not counted


async def bare(scope: Any, receive: Any, send: Any) -> None:
    """Streams without ever checking for a disconnect."""
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(50):
        await send({"type": "http.response.body", "body": b"data\n\n", "more_body": True})
        await asyncio.sleep(0.01)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def test_a_bare_application_is_traced(watched: Watched, serve: Callable[..., int]) -> None:
    posted(serve(bare), "/", headers=TRACEPARENT)
    (seen,) = ended(watched)
    assert seen.verdict == (events.OK, "", 200)
    assert seen.arrived.parent_span_id.hex() == SPAN_ID


@pytest.mark.parametrize("implementation", ["h11", "httptools"])
def test_chunks_of_a_stream_pass_without_a_frame_of_ours(
    watched: Watched, serve: Callable[..., int], implementation: str
) -> None:
    pytest.importorskip(implementation, reason=f"{implementation} is not installed")
    passed: list[bool] = []

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(6):
            if number == 3:  # in the thread of an engine
                await asyncio.to_thread(ingress.current_request().record_token_reached)  # type: ignore[union-attr]
            passed.append(scope[exchange.SCOPE_KEY].passes)
            await send({"type": "http.response.body", "body": b"data", "more_body": number < 5})

    posted(serve(stream, http=implementation), "/", headers=TRACEPARENT)
    (seen,) = ended(watched)
    assert passed == [False, True, True, False, True, True]
    assert seen.verdict == (events.OK, "", 200)
    (started,), (first,) = seen.every(events.ResponseStarted), seen.every(events.FirstTokenSent)
    assert seen.arrived.at < started.at < first.at < seen.ended.at


def test_a_bare_application_aborts_when_its_client_leaves(
    watched: Watched, serve: Callable[..., int]
) -> None:
    connection = Connection(serve(bare)).send_request("/")
    connection.read_until(b"data")
    left_at = _clock.now()
    connection.close()
    (seen,) = ended(watched)
    assert seen.verdict == (events.ABORTED, "client_disconnect", 200)
    assert seen.ended.at - left_at < 100_000_000


# ── with other instrumentations ──────────────────────────────────────────────────────────────────────────────────


def server_span_above(seen: Seen, spans: InMemorySpanExporter) -> ReadableSpan:
    """Returns the only SERVER span; checks that our request is its child, in the client's trace."""
    until(lambda: [span for span in spans.get_finished_spans() if span.kind is trace.SpanKind.SERVER])
    (server,) = [span for span in spans.get_finished_spans() if span.kind is trace.SpanKind.SERVER]
    assert not seen.arrived.flags & events.OWN_SERVER_SPAN
    assert not any(seen.arrived.server_span_id)
    assert seen.arrived.parent_span_id == server.context.span_id.to_bytes(8, "big")
    assert seen.arrived.trace_id.hex() == TRACE_ID == f"{server.context.trace_id:032x}"
    assert server.parent is not None and f"{server.parent.span_id:016x}" == SPAN_ID
    assert server.start_time is not None
    assert seen.attributes == {}
    return server


def instrumented(app: FastAPI, **options: Any) -> FastAPI:
    instrumentation = pytest.importorskip(
        "opentelemetry.instrumentation.fastapi",
        reason="opentelemetry-instrumentation-fastapi is not installed",
    )
    instrumentation.FastAPIInstrumentor.instrument_app(app, **options)
    return app


@pytest.mark.parametrize("middleware", [False, True])
@pytest.mark.parametrize("path", ["/v1/models/a/stream", "/v1/json", "/v1/sync"])
def test_requests_are_children_of_the_fastapi_instrumentations_span(
    watched: Watched, serve: Callable[..., int], spans: InMemorySpanExporter, path: str, middleware: bool
) -> None:
    app = instrumented(make_app())
    if middleware:
        app.add_middleware(PassThroughMiddleware)
    before = _clock.now()
    assert b"200 OK" in posted(serve(app), path, headers=TRACEPARENT)
    (seen,) = ended(watched)
    assert seen.verdict == (events.OK, "", 200)
    assert seen.every(events.RequestSubmitted)
    server = server_span_above(seen, spans)
    assert server.instrumentation_scope is not None
    assert server.instrumentation_scope.name == "opentelemetry.instrumentation.fastapi"
    assert seen.arrived.wall_at < (server.start_time or 0)  # we saw the request before the other library
    assert before < seen.arrived.at


QUIET: dict[str, Any] = {"exclude_spans": ["send", "receive"]}


def test_request_without_engine_below_another_span_is_redundant(
    watched: Watched, serve: Callable[..., int], spans: InMemorySpanExporter
) -> None:
    """A task that outlives the request parents its spans to the other library's span."""
    app = instrumented(make_app(), **QUIET)
    request_ended = threading.Event()

    async def later() -> None:
        await asyncio.to_thread(request_ended.wait, 5)
        trace.get_tracer("database").start_span("late").end()

    @app.post("/refresh")
    async def refresh() -> dict[str, bool]:
        app.state.task = asyncio.create_task(later())
        return {}

    posted(serve(app), "/refresh", headers=TRACEPARENT)
    (seen,) = ended(watched)
    assert record_of(seen).redundant
    request_ended.set()
    until(lambda: len(spans.get_finished_spans()) == 2)
    server = server_span_above(seen, spans)
    late = next(span for span in spans.get_finished_spans() if span.name == "late")
    assert late.parent == server.context


async def _start_child_span() -> None:
    trace.get_tracer("database").start_span("select").end()


async def _set_attribute() -> None:
    trace.get_current_span().set_attribute("cache", "cold")


async def _open_stage() -> None:
    with otel_infer.stage("rerank"):
        pass


async def _raise_error() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("action", [_start_child_span, _set_attribute, _open_stage, _raise_error])
def test_request_with_own_data_below_another_span_stays(
    watched: Watched, serve: Callable[..., int], spans: InMemorySpanExporter, action: Callable[[], Any]
) -> None:
    app = instrumented(make_app(), **QUIET)

    @app.post("/refresh")
    async def refresh() -> dict[str, bool]:
        await action()
        return {}

    posted(serve(app), "/refresh", headers=TRACEPARENT)
    (seen,) = ended(watched)
    assert not record_of(seen).redundant
    for span in spans.get_finished_spans():
        if span.name == "select":
            assert span.parent is not None
            assert span.parent.span_id.to_bytes(8, "big") == seen.arrived.span_id


HAS_OWN_TELEMETRY = tuple(int(part) for part in fastapi.__version__.split(".")[:2]) >= (0, 142)


@pytest.mark.skipif(not HAS_OWN_TELEMETRY, reason="this FastAPI release has no built-in telemetry")
@pytest.mark.parametrize("path", ["/v1/models/a/stream", "/v1/json", "/v1/sync", "/v1/fails"])
def test_requests_are_children_of_fastapis_own_telemetry_span(
    watched: Watched, serve: Callable[..., int], spans: InMemorySpanExporter, path: str
) -> None:
    posted(serve(make_app()), path, headers=TRACEPARENT)
    (seen,) = ended(watched)
    server = server_span_above(seen, spans)
    assert server.instrumentation_scope is not None and server.instrumentation_scope.name == "fastapi"
    outcome = (events.ERROR, "ZeroDivisionError", 500) if path == "/v1/fails" else (events.OK, "", 200)
    assert seen.verdict == outcome


@pytest.mark.skipif(not HAS_OWN_TELEMETRY, reason="this FastAPI release has no built-in telemetry")
def test_telemetry_with_its_own_provider_is_the_parent(watched: Watched, serve: Callable[..., int]) -> None:
    """This holds from the second request on."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    port = serve(make_app(telemetry={"tracer_provider": provider}))
    posted(port, "/v1/slow")
    ended(watched)
    exporter.clear()
    posted(port, "/v1/slow", headers=TRACEPARENT)
    server_span_above(ended(watched, 2)[1], exporter)


def test_provider_without_http_instrumentation_leaves_our_server_span(
    watched: Watched, serve: Callable[..., int], spans: InMemorySpanExporter
) -> None:
    async def answer(request: Any) -> PlainTextResponse:
        with trace.get_tracer("application").start_as_current_span("lookup"):
            return PlainTextResponse("")

    port = serve(starlette.applications.Starlette(routes=[Route("/answer", answer, methods=["POST"])]))
    before = _clock.now()
    posted(port, "/answer", headers=TRACEPARENT)
    (seen,) = ended(watched)
    assert seen.arrived.flags & events.OWN_SERVER_SPAN
    assert seen.arrived.parent_span_id.hex() == SPAN_ID
    assert seen.attributes["http.route"] == "/answer"
    (lookup,) = spans.get_finished_spans()
    assert lookup.parent is not None and lookup.parent.span_id.to_bytes(8, "big") == seen.arrived.span_id
    assert before < seen.arrived.at


def test_a_middleware_span_keeps_the_callers_trace(
    watched: Watched, serve: Callable[..., int], spans: InMemorySpanExporter
) -> None:
    """The middleware reads no trace headers."""

    class Authenticating(BaseHTTPMiddleware):
        async def dispatch(self, request: Any, call_next: Any) -> Any:
            with trace.get_tracer("application").start_as_current_span("auth"):
                return await call_next(request)

    async def answer(request: Any) -> PlainTextResponse:
        return PlainTextResponse("")

    app = starlette.applications.Starlette(routes=[Route("/answer", answer, methods=["POST"])])
    app.add_middleware(Authenticating)
    port = serve(app)
    for _ in range(3):
        posted(port, "/answer", headers=TRACEPARENT)
    for seen in ended(watched, 3):
        assert seen.arrived.parent_span_id.hex() == SPAN_ID
        assert seen.arrived.flags & events.OWN_SERVER_SPAN


@pytest.mark.parametrize("status", [200, 503])
def test_response_from_middleware_is_traced_without_other_instrumentation(
    watched: Watched, serve: Callable[..., int], spans: InMemorySpanExporter, status: int
) -> None:
    class Refusing(BaseHTTPMiddleware):
        async def dispatch(self, request: Any, call_next: Any) -> Any:
            return PlainTextResponse("", status)

    app = starlette.applications.Starlette()
    app.add_middleware(Refusing)
    posted(serve(app), "/answer", headers=TRACEPARENT)
    (seen,) = ended(watched)
    assert seen.ended.status_code == status
    assert seen.arrived.parent_span_id.hex() == SPAN_ID


def test_a_middleware_response_inside_another_instrumentation_is_skipped(
    watched: Watched, serve: Callable[..., int], spans: InMemorySpanExporter
) -> None:
    class Refusing(BaseHTTPMiddleware):
        async def dispatch(self, request: Any, call_next: Any) -> Any:
            return PlainTextResponse("", 403)

    app = instrumented(make_app())
    app.add_middleware(Refusing)
    assert b"403" in posted(serve(app), "/v1/json")
    until(spans.get_finished_spans)
    assert watched.requests == []


def test_application_inside_asgi_instrumentation_has_one_server_span(
    watched: Watched, serve: Callable[..., int], spans: InMemorySpanExporter
) -> None:
    instrumentation = pytest.importorskip(
        "opentelemetry.instrumentation.asgi", reason="opentelemetry-instrumentation-asgi is not installed"
    )
    posted(serve(instrumentation.OpenTelemetryMiddleware(bare)), "/", headers=TRACEPARENT)
    (seen,) = ended(watched)
    assert seen.arrived.flags & events.OWN_SERVER_SPAN
    assert {span.kind for span in spans.get_finished_spans()} == {trace.SpanKind.INTERNAL}
    assert {span.context.trace_id for span in spans.get_finished_spans()} == {int(TRACE_ID, 16)}


def test_call_to_another_application_in_process_is_child(watched: Watched, serve: Callable[..., int]) -> None:
    httpx = pytest.importorskip("httpx", reason="httpx is not installed")
    inner = make_app()
    app = FastAPI()

    @app.post("/proxy")
    async def proxy() -> dict[str, int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(inner), base_url="http://inner") as client:
            return {"status": (await client.post("/v1/json", json={})).status_code}

    assert b'{"status":200}' in posted(serve(app), "/proxy")
    requests = ended(watched, 2)
    outer = next(seen for seen in requests if seen.attributes.get("http.route") == "/proxy")
    other = next(seen for seen in requests if seen is not outer)
    assert other.arrived.parent_span_id == outer.arrived.span_id
    assert not other.arrived.flags & events.OWN_SERVER_SPAN


def test_requests_leave_no_reference_cycles(watched: Watched, serve: Callable[..., int]) -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]})
        await send({"type": "http.response.body", "body": b"yes", "more_body": False})

    connection = Connection(serve(answer, lifespan="off"))
    connection.send_request("/").read_until(b"yes")
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            connection.send_request("/").read_until(b"yes")
        time.sleep(0.05)
        assert gc.collect() < 20
    finally:
        gc.enable()
    assert len(ended(watched, 21)) == 21


@pytest.mark.parametrize("handled", [False, True])
def test_the_failed_stage_is_the_one_that_raised(
    watched: Watched, serve: Callable[..., int], handled: bool
) -> None:
    """Also where the application answers 500 itself."""
    app = FastAPI()

    @app.post("/rerank")
    async def rerank() -> Any:
        try:
            with otel_infer.stage("prepare"):
                pass
            with otel_infer.stage("rerank"), otel_infer.stage("model"):
                raise MemoryError
        except MemoryError:
            if not handled:
                raise
            return JSONResponse({"error": "memory"}, 500)

    assert b"500" in posted(serve(app), "/rerank")
    (seen,) = ended(watched)
    assert record_of(seen).failed_stage == "model"


# ── requests without a span ──────────────────────────────────────────────────────────────────────────────────────


def items_app() -> FastAPI:
    app, items = FastAPI(), fastapi.APIRouter(prefix="/items")

    @items.get("/{name}")
    async def get_item(name: str) -> str:
        return name

    @app.post("/chat")
    async def chat() -> None:
        infer(ingress.current_request())

    app.include_router(items, prefix="/v1")
    return app


def test_a_get_is_counted_by_its_route(watched: Watched, serve: Callable[..., int]) -> None:
    port = serve(items_app())
    posted(port, "/chat")
    for path in ("/v1/items/canary", "/nowhere"):
        posted(port, path, method="GET")
    until(lambda: len(watched.untraced) == 2)
    assert [(served.status_code, served.method, served.route) for served in watched.untraced] == [
        (200, "GET", "/v1/items/{name}"), (404, "GET", "")
    ]  # fmt: skip
    assert b"canary" not in watched.bytes


@pytest.mark.usefixtures("spans")
@pytest.mark.parametrize("outside", [True, False], ids=["around the application", "inside of it"])
def test_a_get_of_another_instrumentation_is_not_counted(
    watched: Watched, serve: Callable[..., int], outside: bool
) -> None:
    """That instrumentation counts it, also where a middleware answers."""
    app: Any = items_app()
    app.add_middleware(CORSMiddleware, allow_origins=["https://a"], allow_methods=["POST"])
    if outside:
        instrumentation = pytest.importorskip(
            "opentelemetry.instrumentation.asgi", reason="the ASGI instrumentation is not installed"
        )
        app = instrumentation.OpenTelemetryMiddleware(app)
    else:
        instrumentation = pytest.importorskip(
            "opentelemetry.instrumentation.fastapi", reason="the FastAPI instrumentation is not installed"
        )
        instrumentation.FastAPIInstrumentor.instrument_app(app)
    port = serve(app)
    posted(port, "/chat")
    posted(port, "/v1/items/a", method="GET")
    preflight = "origin: https://a\r\naccess-control-request-method: POST\r\n"
    assert b"200 OK" in posted(port, "/chat", method="OPTIONS", headers=preflight)
    posted(port, "/chat")
    assert len(ended(watched, 2)) == 2
    assert watched.untraced == []
