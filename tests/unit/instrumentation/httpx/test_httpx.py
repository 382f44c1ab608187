"""Client spans of httpx and httpx2, synchronous and asynchronous, against a server on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from otel_infer import semconv
from otel_infer.instrumentation import asgi
from otel_infer.instrumentation import httpx as instrumentation
from otel_infer.instrumentation.httpx import (
    AsyncTracedTransport,
    TracedTransport,
    client_span,
    instrument_client,
)
from otel_infer.instrumentation.httpx.client_span import parse_server_duration_ms
from otel_infer.instrumentation.httpx.sse import SseParser
from otel_infer.testing import Captured, capture

ROOT = Path(__file__).parents[4]
PACE_S = 0.02
SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]
TARGET = {"http.request.method", "server.address", "server.port", "url.full"}
RESPONSE = {*TARGET, "http.response.status_code", semconv.CLIENT_TIME_TO_HEADERS}
SERVER_TIMES = {semconv.CLIENT_SERVER_DURATION, semconv.CLIENT_NETWORK_DURATION}
BODY = {semconv.CLIENT_TIME_TO_FIRST_BYTE, semconv.CLIENT_CHUNKS}
TOKENS = {semconv.CLIENT_TIME_TO_FIRST_TOKEN, semconv.CLIENT_ITL_MAX, semconv.CLIENT_ITL_MEAN}


# ── a server ─────────────────────────────────────────────────────────────────────────────────────────────────────


def event(text: str) -> bytes:
    """Returns one server-sent event as an engine streams it."""
    return delta({"content": text})


def delta(fields: dict[str, str]) -> bytes:
    data = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    choice = {"index": 0, "delta": fields, "finish_reason": None}
    return f"data: {json.dumps({**data, 'choices': [choice]})}\n\n".encode()


ROLE = delta({"role": "assistant", "content": ""})


class Server:
    """An ASGI application: the path selects the response; request headers are kept."""

    def __init__(self) -> None:
        self.headers: list[dict[bytes, bytes]] = []
        self.may_continue = threading.Event()
        self.disconnected = threading.Event()
        self.url = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self.headers.append(dict(scope["headers"]))
        while (await receive()).get("more_body"):
            pass
        await getattr(self, "on_" + scope["path"].strip("/").rpartition("/")[2])(receive, send)

    async def answer(self, send: Any, *chunks: bytes, status: int = 200, headers: Any = SSE) -> None:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await asyncio.sleep(PACE_S)
        await send({"type": "http.response.body", "body": b""})

    async def on_completions(self, receive: Any, send: Any) -> None:
        await asyncio.sleep(PACE_S)
        await self.answer(send, ROLE, *map(event, "abcd"), b"data: [DONE]\n\n")

    async def on_stutter(self, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": SSE})
        for text, pause in (("a", 0.2), ("b", PACE_S), ("c", 0)):
            await send({"type": "http.response.body", "body": event(text), "more_body": True})
            await asyncio.sleep(pause)
        await send({"type": "http.response.body", "body": b""})

    async def on_json(self, receive: Any, send: Any) -> None:
        await self.answer(send, b'{"a":', b" 1}", headers=[(b"content-type", b"application/json")])

    async def on_nothing(self, receive: Any, send: Any) -> None:
        await self.answer(send, status=204, headers=[])

    async def on_packed(self, receive: Any, send: Any) -> None:
        await self.answer(send, b"data: no gzip", headers=[*SSE, (b"content-encoding", b"x-other")])

    async def on_refused(self, receive: Any, send: Any) -> None:
        await self.answer(send, b"no such model", status=404, headers=[])

    async def on_redirect(self, receive: Any, send: Any) -> None:
        await self.answer(send, status=307, headers=[(b"location", b"/json?token=canary")])

    async def on_broken(self, receive: Any, send: Any) -> None:
        await self.answer(send, event("a"), headers=[*SSE, (b"content-length", b"100000")])

    async def on_slow(self, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.1)
        await self.answer(send, event("a"))

    async def on_stepwise(self, receive: Any, send: Any) -> None:
        """Sends a chunk only after the client has confirmed the previous one."""
        await send({"type": "http.response.start", "status": 200, "headers": SSE})
        for text in "abc":
            await send({"type": "http.response.body", "body": event(text), "more_body": True})
            assert await asyncio.to_thread(self.may_continue.wait, 10)
            self.may_continue.clear()
        await send({"type": "http.response.body", "body": b""})

    async def on_endless(self, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": SSE})
        await send({"type": "http.response.body", "body": event("a"), "more_body": True})
        await receive()
        self.disconnected.set()

    async def on_silent(self, receive: Any, send: Any) -> None:
        await receive()
        self.disconnected.set()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Runs the application on uvicorn without instrumentation."""
    app = Server()
    running = uvicorn.Server(
        uvicorn.Config(app, port=0, lifespan="off", log_level="critical", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    wait_until(lambda: running.started)
    app.url = f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    yield app
    app.may_continue.set()
    running.should_exit = True
    thread.join(5)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Captured]:
    """Instruments later servers and enables their response headers."""
    monkeypatch.setenv("OTEL_INFER_RESPONSE_HEADERS", "on")
    with capture("asgi") as captured:
        yield captured
    asgi.configure_asgi("")


def wait_until(reached: Callable[[], Any], timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not reached():
        assert time.monotonic() < deadline, "condition was not met in time"
        time.sleep(0.002)


class DelayingProxy:
    """A TCP proxy that delays the data of the client."""

    def __init__(self, to: str, delay_s: float) -> None:
        self._to, self._delay_s = int(to.rpartition(":")[2]), delay_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._to))
                for source, target, delay_s in ((near, far, self._delay_s), (far, near, 0.0)):
                    threading.Thread(target=self._pump, args=(source, target, delay_s), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, delay_s: float) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                time.sleep(delay_s)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()


# ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Spans(InMemorySpanExporter):
    """An exporter with its own tracer provider."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.provider = TracerProvider(**settings)
        self.provider.add_span_processor(SimpleSpanProcessor(self))

    @property
    def only(self) -> ReadableSpan:
        (span,) = self.get_finished_spans()
        return span


@pytest.fixture
def spans() -> Spans:
    return Spans()


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


class Reader:
    """Reads responses with one of the libraries; `on_chunk` gets each chunk and may raise to stop."""

    def __init__(self, library: str, asynchronous: bool, spans: Spans) -> None:
        self.httpx: Any = importlib.import_module(library)
        self.asynchronous, self.provider = asynchronous, spans.provider

    def read(
        self, url: str, on_chunk: Callable[[bytes], Any] = lambda _: None, stream: bool = True, **options: Any
    ) -> Any:
        """Returns the response and its chunks, or None if `on_chunk` raises `StopReading`."""
        if self.asynchronous:
            return asyncio.run(self._wait(url, on_chunk, stream, options))
        with instrument_client(self.httpx.Client(**options), self.provider) as client:
            if not stream:
                response = client.post(url, json={})
                return response, [response.content]
            with contextlib.suppress(StopReading), client.stream("POST", url, json={}) as response:
                chunks = []
                for chunk in response.iter_raw():
                    chunks.append(chunk)
                    on_chunk(chunk)
                return response, chunks

    async def _wait(self, url: str, on_chunk: Any, stream: bool, options: Any) -> Any:
        async with instrument_client(self.httpx.AsyncClient(**options), self.provider) as client:
            if not stream:
                response = await client.post(url, json={})
                return response, [response.content]
            with contextlib.suppress(StopReading):
                async with client.stream("POST", url, json={}) as response:
                    chunks = []
                    async for chunk in response.aiter_raw():
                        chunks.append(chunk)
                        on_chunk(chunk)
                    return response, chunks


class StopReading(Exception):
    """Raised to stop reading."""


def stop_reading(_: bytes) -> None:
    raise StopReading


@pytest.fixture(params=["httpx", "httpx async", "httpx2", "httpx2 async"])
def reader(request: pytest.FixtureRequest, spans: Spans) -> Reader:
    library, _, asynchronous = request.param.partition(" ")
    pytest.importorskip(library, reason=f"{library} is not installed")
    return Reader(library, bool(asynchronous), spans)


# ── whole spans ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_streamed_request_is_one_span_with_client_latencies(
    captured: Captured, server: Server, reader: Reader, spans: Spans
) -> None:
    began = time.time_ns()
    response, chunks = reader.read(f"{server.url}/v1/chat/completions")
    ended = time.time_ns()
    assert b"".join(chunks) == b"".join([ROLE, *map(event, "abcd"), b"data: [DONE]\n\n"])
    span, attributes = spans.only, attributes_of(spans.only)
    assert (span.name, span.kind, span.status.status_code) == (
        "POST",
        trace.SpanKind.CLIENT,
        trace.StatusCode.UNSET,
    )
    assert set(attributes) == RESPONSE | SERVER_TIMES | BODY | TOKENS
    assert attributes["url.full"] == f"{server.url}/v1/chat/completions"
    assert (attributes["server.address"], attributes["server.port"]) == ("127.0.0.1", response.url.port)
    assert attributes["http.response.status_code"] == 200
    assert attributes[semconv.CLIENT_CHUNKS] == len(chunks)
    waited = attributes[semconv.CLIENT_SERVER_DURATION] + attributes[semconv.CLIENT_NETWORK_DURATION]
    assert waited == pytest.approx(attributes[semconv.CLIENT_TIME_TO_HEADERS], abs=1e-6)
    assert attributes[semconv.CLIENT_SERVER_DURATION] >= PACE_S
    first_byte, first_token = (
        attributes[semconv.CLIENT_TIME_TO_FIRST_BYTE],
        attributes[semconv.CLIENT_TIME_TO_FIRST_TOKEN],
    )
    assert attributes[semconv.CLIENT_TIME_TO_HEADERS] <= first_byte <= first_token
    assert 0 < attributes[semconv.CLIENT_ITL_MEAN] <= attributes[semconv.CLIENT_ITL_MAX]
    assert began <= span.start_time <= span.end_time <= ended
    (request,) = captured.requests()
    context = span.get_span_context()
    assert request.trace_id.hex() == f"{context.trace_id:032x}"
    assert request.parent_span_id.hex() == f"{context.span_id:016x}"
    assert response.headers["traceresponse"].split("-")[1] == request.trace_id.hex()


def test_unstreamed_request_has_no_token_attributes(
    captured: Captured, server: Server, reader: Reader, spans: Spans
) -> None:
    response, _ = reader.read(f"{server.url}/json", stream=False)
    assert response.json() == {"a": 1}
    assert set(attributes_of(spans.only)) == RESPONSE | SERVER_TIMES | BODY


def test_network_duration_is_absent_without_server_timing(
    server: Server, reader: Reader, spans: Spans
) -> None:
    reader.read(f"{server.url}/v1/chat/completions")
    assert set(attributes_of(spans.only)) == RESPONSE | BODY | TOKENS


@pytest.mark.parametrize(
    ("path", "attributes"), [("nothing", RESPONSE), ("packed", RESPONSE | BODY)], ids=["no body", "encoded"]
)
def test_attributes_without_a_measurement_are_absent(
    server: Server, reader: Reader, spans: Spans, path: str, attributes: set[str]
) -> None:
    reader.read(f"{server.url}/{path}")
    assert set(attributes_of(spans.only)) == attributes


def test_maximum_inter_token_latency_exceeds_the_mean(server: Server, reader: Reader, spans: Spans) -> None:
    reader.read(f"{server.url}/stutter")
    attributes = attributes_of(spans.only)
    assert attributes[semconv.CLIENT_ITL_MAX] >= 0.1
    assert attributes[semconv.CLIENT_ITL_MEAN] < attributes[semconv.CLIENT_ITL_MAX]


# ── nothing is held back ─────────────────────────────────────────────────────────────────────────────────────────


def test_each_chunk_is_delivered_before_the_next(server: Server, reader: Reader, spans: Spans) -> None:
    _, chunks = reader.read(f"{server.url}/stepwise", lambda _: server.may_continue.set())
    assert chunks == [event(text) for text in "abc"]
    assert attributes_of(spans.only)[semconv.CLIENT_CHUNKS] == 3


def test_stream_closed_early_disconnects_and_is_no_error(
    server: Server, reader: Reader, spans: Spans
) -> None:
    reader.read(f"{server.url}/endless", stop_reading)
    assert server.disconnected.wait(10)
    assert set(attributes_of(spans.only)) == RESPONSE | BODY | {
        semconv.CLIENT_TIME_TO_FIRST_TOKEN,
        semconv.CLIENT_CLOSED_EARLY,
    }
    assert spans.only.status.status_code is trace.StatusCode.UNSET


def test_stopping_after_the_done_event_is_not_early(server: Server, reader: Reader, spans: Spans) -> None:
    def until_done(chunk: bytes) -> None:
        if b"[DONE]" in chunk:
            raise StopReading

    reader.read(f"{server.url}/v1/chat/completions", until_done)
    assert set(attributes_of(spans.only)) == RESPONSE | BODY | TOKENS


# ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "failure", "attributes"),
    [
        ("broken", "RemoteProtocolError", RESPONSE | BODY | {semconv.CLIENT_TIME_TO_FIRST_TOKEN}),
        ("silent", "ReadTimeout", TARGET),
        ("endless", "ReadTimeout", RESPONSE | BODY | {semconv.CLIENT_TIME_TO_FIRST_TOKEN}),
    ],
)
def test_exception_passes_and_its_type_is_recorded(
    server: Server, reader: Reader, spans: Spans, path: str, failure: str, attributes: set[str]
) -> None:
    with pytest.raises(getattr(reader.httpx, failure)):
        reader.read(f"{server.url}/{path}", timeout=0.5)
    assert set(attributes_of(spans.only)) == attributes | {"error.type"}
    assert attributes_of(spans.only)["error.type"] == failure
    assert spans.only.status.status_code is trace.StatusCode.ERROR
    assert not spans.only.status.description
    assert not spans.only.events


@pytest.mark.parametrize("where", ["before the headers", "in the body"])
def test_transport_exception_passes_unchanged(spans: Spans, where: str) -> None:
    failure = ZeroDivisionError("canary")

    class Failing(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield b"a"
            raise failure

    def answer(request: Any) -> Any:
        if where == "in the body":
            return httpx.Response(200, stream=Failing())
        raise failure

    client = httpx.Client(transport=TracedTransport(httpx.MockTransport(answer), spans.provider))
    with pytest.raises(ZeroDivisionError) as raised:
        client.get("http://model.example/")
    assert raised.value is failure
    assert failure.__cause__ is None and failure.__context__ is None
    assert attributes_of(spans.only)["error.type"] == "ZeroDivisionError"
    assert "canary" not in spans.only.to_json()


def test_refused_connection_is_an_error_without_status_code(reader: Reader, spans: Spans) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(reader.httpx.ConnectError):
        reader.read(f"http://127.0.0.1:{port}/v1/chat/completions")
    assert set(attributes_of(spans.only)) == TARGET | {"error.type"}
    assert attributes_of(spans.only)["error.type"] == "ConnectError"


def test_4xx_response_is_an_error_of_the_client(server: Server, reader: Reader, spans: Spans) -> None:
    response, _ = reader.read(f"{server.url}/refused", stream=False)
    assert response.status_code == 404
    assert attributes_of(spans.only)["error.type"] == "404"
    assert spans.only.status.status_code is trace.StatusCode.ERROR
    assert "no such model" not in spans.only.to_json()


@pytest.mark.parametrize("path", ["silent", "endless"])
async def test_cancelled_request_has_error_type_cancelled(server: Server, spans: Spans, path: str) -> None:
    async def read() -> None:
        async with instrument_client(httpx.AsyncClient(), spans.provider) as client:
            async with client.stream("POST", f"{server.url}/{path}") as response:
                async for _ in response.aiter_raw():
                    pass

    task = asyncio.create_task(read())
    while not server.headers:
        await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert attributes_of(spans.only)["error.type"] == semconv.ERROR_CANCELLED
    assert await asyncio.to_thread(server.disconnected.wait, 10)


def test_each_hop_of_a_redirect_is_a_span(server: Server, reader: Reader, spans: Spans) -> None:
    reader.read(f"{server.url}/redirect", follow_redirects=True)
    first, second = spans.get_finished_spans()
    assert [attributes_of(span)["http.response.status_code"] for span in (first, second)] == [307, 200]
    assert first.end_time <= second.start_time
    sent = [headers[b"traceparent"].decode().split("-")[2] for headers in server.headers]
    assert sent == [f"{span.get_span_context().span_id:016x}" for span in (first, second)]


# ── parent span and recorded content ─────────────────────────────────────────────────────────────────────────────


def test_span_is_a_child_of_the_current_span(server: Server, reader: Reader, spans: Spans) -> None:
    current: list[Any] = []
    with spans.provider.get_tracer("test").start_as_current_span("parent") as parent:
        reader.read(f"{server.url}/json", lambda _: current.append(trace.get_current_span()))
        assert trace.get_current_span() is parent
    request, _ = spans.get_finished_spans()
    assert request.parent == parent.get_span_context()
    assert set(current) == {parent}


def test_span_is_current_in_the_wrapped_transport(spans: Spans) -> None:
    current: list[Any] = []

    def answer(request: Any) -> Any:
        current.append(trace.get_current_span())
        return httpx.Response(200, text="read already")

    client = httpx.Client(transport=TracedTransport(httpx.MockTransport(answer), spans.provider))
    assert client.get("http://model.example/v1/models").text == "read already"
    assert current[0].get_span_context() == spans.only.get_span_context()
    assert attributes_of(spans.only)["server.port"] == 80
    assert set(attributes_of(spans.only)) == RESPONSE


def test_unsampled_request_propagates_and_keeps_its_response(server: Server) -> None:
    unsampled = Spans(sampler=ALWAYS_OFF)
    with instrument_client(httpx.Client(), unsampled.provider) as client:
        with client.stream("POST", f"{server.url}/json") as response:
            kinds = {type(response.stream._stream).__name__}
            response.read()
    assert kinds == {"ResponseStream"}
    assert not int(server.headers[0][b"traceparent"][-2:], 16) & trace.TraceFlags.SAMPLED
    assert unsampled.get_finished_spans() == ()


def test_url_is_recorded_without_credentials_and_query(server: Server, reader: Reader, spans: Spans) -> None:
    url = server.url.replace("//", "//canary-user:canary-password@") + "/refused?key=canary-query#canary"
    reader.read(url, headers={"authorization": "canary-header"}, cookies={"a": "canary-cookie"}, stream=False)
    assert attributes_of(spans.only)["url.full"] == f"{server.url}/refused"
    assert "canary" not in spans.only.to_json()


def test_unknown_method_is_recorded_as_other(spans: Spans) -> None:
    mock = httpx.MockTransport(lambda request: httpx.Response(200))
    httpx.Client(transport=TracedTransport(mock, spans.provider)).request("BREW", "https://pot.example/")
    assert spans.only.name == "HTTP"
    assert attributes_of(spans.only)["http.request.method"] == "_OTHER"
    assert attributes_of(spans.only)["server.port"] == 443
    assert "BREW" not in spans.only.to_json()


# ── which clients ────────────────────────────────────────────────────────────────────────────────────────────────


def test_second_instrumentation_of_a_client_is_ignored(server: Server, spans: Spans) -> None:
    client = httpx.Client()
    assert instrument_client(instrument_client(client, spans.provider), spans.provider) is client
    client.post(f"{server.url}/json")
    client.close()
    assert len(spans.get_finished_spans()) == 1


def test_requests_through_mounted_transports_are_traced(server: Server, spans: Spans) -> None:
    mounts = {"http://": httpx.HTTPTransport(), "all://*.local": None}
    with instrument_client(httpx.Client(mounts=mounts), spans.provider) as client:
        client.post(f"{server.url}/json")
    assert spans.only.name == "POST"


def test_import_loads_neither_httpx_nor_the_sdk() -> None:
    modules = "{'httpx', 'httpx2', 'numpy', 'opentelemetry.sdk'}"
    code = f"import sys, otel_infer.instrumentation.httpx; print(sorted({modules} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("argument", [object(), "http://", httpx.HTTPTransport()])
def test_non_client_argument_is_rejected(argument: Any) -> None:
    with pytest.raises(TypeError, match=r"takes a Client or an AsyncClient .*otel-infer\[client\]"):
        instrument_client(argument)


@pytest.mark.parametrize("changed", ["_mounts", "_transport"])
def test_client_with_unknown_internals_is_rejected_unchanged(changed: str) -> None:
    client = httpx.Client()
    setattr(client, changed, None)
    before = dict(vars(client))
    with pytest.raises(TypeError, match="transport=TracedTransport"):
        instrument_client(client)
    assert vars(client) == before


async def test_transport_is_closed_with_its_client(spans: Spans) -> None:
    seen: list[str] = []

    class RecordingTransport(httpx.HTTPTransport):
        def close(self) -> None:
            seen.append("closed")
            super().close()

    class AsyncRecordingTransport(httpx.AsyncHTTPTransport):
        async def aclose(self) -> None:
            seen.append("closed async")
            await super().aclose()

    httpx.Client(transport=TracedTransport(RecordingTransport())).close()
    await httpx.AsyncClient(transport=AsyncTracedTransport(AsyncRecordingTransport())).aclose()
    assert seen == ["closed", "closed async"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_openai_sdk_requests_are_traced(
    captured: Captured, server: Server, spans: Spans, asynchronous: bool
) -> None:
    openai = pytest.importorskip("openai", reason="openai is not installed")
    settings = {"api_key": "canary", "base_url": f"{server.url}/v1", "max_retries": 0}
    arguments: Any = {"model": "m", "messages": [{"role": "user", "content": "canary"}], "stream": True}

    async def ask() -> str:
        http_client = instrument_client(openai.DefaultAsyncHttpxClient(), spans.provider)
        async with openai.AsyncOpenAI(http_client=http_client, **settings) as client:
            stream: AsyncIterator[Any] = await client.chat.completions.create(**arguments)
            return "".join([part.choices[0].delta.content async for part in stream])

    if asynchronous:
        assert asyncio.run(ask()) == "abcd"
    else:
        http_client = instrument_client(openai.DefaultHttpxClient(), spans.provider)
        with openai.OpenAI(http_client=http_client, **settings) as client:
            parts = client.chat.completions.create(**arguments)
            assert "".join(part.choices[0].delta.content for part in parts) == "abcd"
    assert set(attributes_of(spans.only)) == RESPONSE | SERVER_TIMES | BODY | TOKENS
    assert "canary" not in spans.only.to_json()
    assert captured.requests()[0].trace_id.hex() == f"{spans.only.get_span_context().trace_id:032x}"


# ── network ──────────────────────────────────────────────────────────────────────────────────────────────────────


def measure_minimum(url: str, times: int = 4) -> tuple[float, float]:
    """Returns the minimum network and server seconds of several requests, which other load affects least."""
    spans = Spans()
    with instrument_client(httpx.Client(), spans.provider) as client:
        for _ in range(times):
            client.post(url)
    recorded = [attributes_of(span) for span in spans.get_finished_spans()]
    return tuple(
        min(attributes[name] for attributes in recorded)
        for name in (semconv.CLIENT_NETWORK_DURATION, semconv.CLIENT_SERVER_DURATION)
    )  # type: ignore[return-value]


def test_network_and_server_delays_are_separated(captured: Captured, server: Server) -> None:
    proxy = DelayingProxy(server.url, 0.1)
    try:
        network, in_server = measure_minimum(f"{proxy.url}/json")
    finally:
        proxy.close()
    assert 0.095 <= network < 1
    assert in_server < 0.05
    network, in_server = measure_minimum(f"{server.url}/slow")
    assert network < 0.05
    assert 0.095 <= in_server < 1


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], None),
        (["infer;dur=12.345"], 12.345),
        (['infer;dur=12.345;desc="arrival to response start"'], 12.345),
        (['db;dur=3, infer;desc="a, infer;dur=99" ; dur=5'], 5),
        (["db;dur=3", "cache", "infer; DUR = 0"], 0),
        (["infer;dur=7, infer;dur=40, infer;dur=nonsense"], 40),
        (["inference;dur=7", "infer", "infer;dur", "infer;dur=", "infer;dur=-1", "infer;dur=inf"], None),
        (["infer;dur=nan", ",;,", '"', "infer;dur"], None),
    ],
)
def test_server_timing_header_is_parsed(headers: list[str], expected: float | None) -> None:
    assert parse_server_duration_ms(headers) == expected


@pytest.mark.parametrize("header", ["infer;dur=60000", "infer;dur=x"])
def test_implausible_server_timing_is_ignored(spans: Spans, header: str) -> None:
    mock = httpx.MockTransport(lambda request: httpx.Response(200, headers={"server-timing": header}))
    httpx.Client(transport=TracedTransport(mock, spans.provider)).get("http://cache.example/")
    assert set(attributes_of(spans.only)) == RESPONSE


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("chunk", "brings"),
    [
        (b"data: {}\n\n", True),
        (b"data:x", True),
        (b"event: delta\r\ndata: {}\r\n\r\n", True),
        (b"data: [DONE]\n\ndata: {}\n\n", True),
        (b'data: {"choices": [{"text": ""}]}\n\n', True),
        (b'data: {"choices": [{"delta": {"role": "assistant", "content": "a"}}]}\n\n', True),
        (b'data: {"choices": [{"delta": {"tool_calls": [{}]}}]}\n\n', True),
        (b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n', False),
        (b'data: {"choices": [{"delta": {"role": "assistant", "content": null}}]}\r\n\r\n', False),
        (b'data: {"choices": [], "prompt_filter_results": [{}]}\n\n', False),
        (b'event: response.created\ndata: {"type": "response.created", "response": {}}\n\n', False),
        (b'data: {"type": "response.output_item.added", "item": {}}\n\n', False),
        (b'data: {"type": "response.output_text.delta", "delta": "a"}\n\n', True),
        (b'data: {"type": "response.reasoning_text.delta", "delta": "a"}\n\n', True),
        (b'event: message_start\ndata: {"type": "message_start", "message": {}}\n\n', False),
        (b'data: {"type": "content_block_start", "index": 0, "content_block": {"type": "text"}}\n\n', False),
        (b'event: ping\ndata: {"type": "ping"}\n\n', False),
        (b'data: {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}\n\n', True),
        (b'data: {"type": "mine"}\n\n', True),
        (b'data: {"choices": [{"delta": ', False),
        (b"data: [DONE]\n\n", False),
        (b"data:\n\ndata:   \n\n", False),
        (b": data: {}\n\nevent: data: x\nid: 1\nretry: 10\n\n", False),
        (b"", False),
    ],
)
def test_empty_and_control_events_are_no_tokens(chunk: bytes, brings: bool) -> None:
    assert SseParser().scan_for_token(chunk) is brings


LINES = st.sampled_from(
    ["data: {}", "data:x", "data:", "data: [DONE]", "data: [DONE", ": ping", "", "event: a", "data", "da"]
)


@given(lines=st.lists(LINES), end=st.sampled_from(["\n", "\r\n"]), size=st.integers(1, 20))
def test_token_is_counted_once_for_any_chunking(lines: list[str], end: str, size: int) -> None:
    text = "".join(line + end for line in lines).encode()
    tokens = sum(line[:5] == "data:" and line[5:].strip() not in ("", "[DONE]") for line in lines)
    singly, cut = SseParser(), SseParser()
    assert sum(singly.scan_for_token(text[at : at + 1]) for at in range(len(text))) == tokens
    pieces = [cut.scan_for_token(text[at : at + size]) for at in range(0, len(text), size)]
    assert min(tokens, 1) <= sum(pieces) <= tokens
    assert singly.ended and cut.ended if "data: [DONE]" in lines else not singly.ended


def test_role_event_before_the_content_is_no_token() -> None:
    events, role = SseParser(), b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    pieces = [role[:20], role[20:], event("a"), role, b"data: [DONE]\n\n"]
    assert [events.scan_for_token(piece) for piece in pieces] == [False, False, True, True, False]


@pytest.mark.parametrize("begun", [b"data: {", b"data: x", b"data:  ", b"event: ", b""])
def test_unterminated_line_is_not_buffered(begun: bytes) -> None:
    events = SseParser()
    brought = [events.scan_for_token(begun), *(events.scan_for_token(b" x" * 1000) for _ in range(100))]
    assert len(events._partial_line) <= 4096
    assert sum(brought) == begun.startswith(b"data:")


# ── instrumentation errors ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("broken", ["begin", "answered", "received", "end"])
def test_instrumentation_error_is_logged_once_and_hidden(
    server: Server,
    reader: Reader,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broken: str,
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ArithmeticError("canary")

    target: tuple[Any, str] = {
        "begin": (client_span.propagate, "inject"),
        "answered": (client_span, "parse_server_duration_ms"),
        "received": (SseParser, "scan_for_token"),
        "end": (client_span.ClientRequestSpan, "_collect_attributes"),
    }[broken]
    monkeypatch.setattr(client_span, "_logged_types", set())
    with caplog.at_level(logging.WARNING), monkeypatch.context() as broken_code:
        broken_code.setattr(*target, fail)
        for _ in range(2):
            _, chunks = reader.read(f"{server.url}/v1/chat/completions")
            assert len(b"".join(chunks).split(b"\n\n")) == 7
    logged = [
        record for record in caplog.records if record.name == "otel_infer.instrumentation.httpx.client_span"
    ]
    assert len(logged) == 1 and "ArithmeticError" in logged[0].message
    assert "canary" not in caplog.text


# ── docs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_example_of_the_client_page_runs(captured: Captured, server: Server, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "engines" / "httpx-client.md").read_text()
    (example, *_) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert "http://localhost:8000/v1" in example
    example = example.replace("http://localhost:8000/v1", f"{server.url}/v1")
    ran = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr
    (written,) = tmp_path.iterdir()
    assert f"--client {written.name}" in page
    for name in (semconv.CLIENT_NETWORK_DURATION, semconv.CLIENT_TIME_TO_FIRST_TOKEN, semconv.CLIENT_ITL_MAX):
        assert name in written.read_text()


def test_client_page_explains_every_attribute() -> None:
    page = (ROOT / "docs" / "engines" / "httpx-client.md").read_text()
    defined = {value for name, value in vars(semconv).items() if name.startswith("CLIENT_")}
    assert defined == set(re.findall(r"`(infer\.client\.[a-z_.]+)`", page))


def test_each_request_may_have_a_class_of_streams_of_its_own() -> None:
    """As transports in tests have; nothing is kept for each of them."""
    classes = {
        instrumentation._make_body_class(
            type("Body", (httpx.SyncByteStream,), {}), instrumentation._TracedBody, "SyncByteStream"
        )
        for _ in range(10)
    }
    assert len(classes) == 1
