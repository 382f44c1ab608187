"""What a client's reader felt: httpx and its successor, waiting and not, against a real server on a real socket."""

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
from otel_infer.instrumentation.httpx import (
    AsyncTracedTransport,
    TracedTransport,
    client_span,
    instrument_client,
)
from otel_infer.instrumentation.httpx.client_span import server_duration_ms
from otel_infer.instrumentation.httpx.sse import SseParser
from otel_infer.testing import Captured, capture

ROOT = Path(__file__).parents[4]
PACE_S = 0.02
SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]
TARGET = {"http.request.method", "server.address", "server.port", "url.full"}
ANSWERED = {*TARGET, "http.response.status_code", semconv.CLIENT_TIME_TO_HEADERS}
TOLD = {semconv.CLIENT_SERVER_DURATION, semconv.CLIENT_NETWORK_DURATION}
READ = {semconv.CLIENT_TIME_TO_FIRST_BYTE, semconv.CLIENT_CHUNKS}
TOKENS = {semconv.CLIENT_TIME_TO_FIRST_TOKEN, semconv.CLIENT_ITL_MAX, semconv.CLIENT_ITL_MEAN}


# ── a server ─────────────────────────────────────────────────────────────────────────────────────────────────────


def event(text: str) -> bytes:
    """As an engine streams it."""
    return delta({"content": text})


def delta(said: dict[str, str]) -> bytes:
    data = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    choice = {"index": 0, "delta": said, "finish_reason": None}
    return f"data: {json.dumps({**data, 'choices': [choice]})}\n\n".encode()


ROLE = delta({"role": "assistant", "content": ""})


class Server:
    """An application that does what the path says, and what came to it."""

    def __init__(self) -> None:
        self.headers: list[dict[bytes, bytes]] = []
        self.may_go_on = threading.Event()
        self.left = threading.Event()
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
        """Goes on when the reader says that it has what was sent, and not before."""
        await send({"type": "http.response.start", "status": 200, "headers": SSE})
        for text in "abc":
            await send({"type": "http.response.body", "body": event(text), "more_body": True})
            assert await asyncio.to_thread(self.may_go_on.wait, 10)
            self.may_go_on.clear()
        await send({"type": "http.response.body", "body": b""})

    async def on_endless(self, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": SSE})
        await send({"type": "http.response.body", "body": event("a"), "more_body": True})
        await receive()
        self.left.set()

    async def on_silent(self, receive: Any, send: Any) -> None:
        await receive()
        self.left.set()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """On uvicorn, not instrumented."""
    app = Server()
    running = uvicorn.Server(
        uvicorn.Config(app, port=0, lifespan="off", log_level="critical", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    until(lambda: running.started)
    app.url = f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    yield app
    app.may_go_on.set()
    running.should_exit = True
    thread.join(5)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Captured]:
    """Instruments servers that start after it, which tell their clients what they have measured."""
    monkeypatch.setenv("OTEL_INFER_RESPONSE_HEADERS", "on")
    with capture("asgi") as captured:
        yield captured
    asgi.configure_asgi("")


def until(reached: Callable[[], Any], timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not reached():
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.002)


class Delaying:
    """A TCP proxy that keeps for a while what the client sends."""

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
                for source, sink, delay_s in ((near, far, self._delay_s), (far, near, 0.0)):
                    threading.Thread(target=self._pump, args=(source, sink, delay_s), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, delay_s: float) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                time.sleep(delay_s)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()


# ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Spans(InMemorySpanExporter):
    """Of a provider of the test's own."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.provider = TracerProvider(**settings)
        self.provider.add_span_processor(SimpleSpanProcessor(self))

    @property
    def one(self) -> ReadableSpan:
        (span,) = self.get_finished_spans()
        return span


@pytest.fixture
def spans() -> Spans:
    return Spans()


def said(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


class Reader:
    """A person who reads with one of the libraries; `seen` is called with each chunk, and may end it by raising."""

    def __init__(self, library: str, asynchronous: bool, spans: Spans) -> None:
        self.httpx: Any = importlib.import_module(library)
        self.asynchronous, self.provider = asynchronous, spans.provider

    def read(
        self, url: str, seen: Callable[[bytes], Any] = lambda _: None, stream: bool = True, **options: Any
    ) -> Any:
        """The response and its chunks; None if the reader `Enough`s before."""
        if self.asynchronous:
            return asyncio.run(self._wait(url, seen, stream, options))
        with instrument_client(self.httpx.Client(**options), self.provider) as client:
            if not stream:
                response = client.post(url, json={})
                return response, [response.content]
            with contextlib.suppress(Enough), client.stream("POST", url, json={}) as response:
                chunks = []
                for chunk in response.iter_raw():
                    chunks.append(chunk)
                    seen(chunk)
                return response, chunks

    async def _wait(self, url: str, seen: Any, stream: bool, options: Any) -> Any:
        async with instrument_client(self.httpx.AsyncClient(**options), self.provider) as client:
            if not stream:
                response = await client.post(url, json={})
                return response, [response.content]
            with contextlib.suppress(Enough):
                async with client.stream("POST", url, json={}) as response:
                    chunks = []
                    async for chunk in response.aiter_raw():
                        chunks.append(chunk)
                        seen(chunk)
                    return response, chunks


class Enough(Exception):
    """The reader wants no more."""


def enough(_: bytes) -> None:
    raise Enough


@pytest.fixture(params=["httpx", "httpx async", "httpx2", "httpx2 async"])
def reader(request: pytest.FixtureRequest, spans: Spans) -> Reader:
    library, _, asynchronous = request.param.partition(" ")
    pytest.importorskip(library, reason=f"{library} is not installed")
    return Reader(library, bool(asynchronous), spans)


# ── whole spans ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_streamed_request_is_one_span_above_the_servers_with_what_its_reader_felt(
    captured: Captured, server: Server, reader: Reader, spans: Spans
) -> None:
    began = time.time_ns()
    response, chunks = reader.read(f"{server.url}/v1/chat/completions")
    ended = time.time_ns()
    assert b"".join(chunks) == b"".join([ROLE, *map(event, "abcd"), b"data: [DONE]\n\n"])
    span, felt = spans.one, said(spans.one)
    assert (span.name, span.kind, span.status.status_code) == (
        "POST",
        trace.SpanKind.CLIENT,
        trace.StatusCode.UNSET,
    )
    assert set(felt) == ANSWERED | TOLD | READ | TOKENS
    assert felt["url.full"] == f"{server.url}/v1/chat/completions"
    assert (felt["server.address"], felt["server.port"]) == ("127.0.0.1", response.url.port)
    assert felt["http.response.status_code"] == 200
    assert felt[semconv.CLIENT_CHUNKS] == len(chunks)
    waited = felt[semconv.CLIENT_SERVER_DURATION] + felt[semconv.CLIENT_NETWORK_DURATION]
    assert waited == pytest.approx(felt[semconv.CLIENT_TIME_TO_HEADERS], abs=1e-6)
    assert felt[semconv.CLIENT_SERVER_DURATION] >= PACE_S
    first_byte, first_token = (
        felt[semconv.CLIENT_TIME_TO_FIRST_BYTE],
        felt[semconv.CLIENT_TIME_TO_FIRST_TOKEN],
    )
    assert felt[semconv.CLIENT_TIME_TO_HEADERS] <= first_byte <= first_token
    assert 0 < felt[semconv.CLIENT_ITL_MEAN] <= felt[semconv.CLIENT_ITL_MAX]
    assert began <= span.start_time <= span.end_time <= ended
    (request,) = captured.requests()
    context = span.get_span_context()
    assert request.trace_id.hex() == f"{context.trace_id:032x}"
    assert request.parent_span_id.hex() == f"{context.span_id:016x}"
    assert response.headers["traceresponse"].split("-")[1] == request.trace_id.hex()


def test_a_request_that_is_not_streamed_has_no_tokens_to_tell_of(
    captured: Captured, server: Server, reader: Reader, spans: Spans
) -> None:
    response, _ = reader.read(f"{server.url}/json", stream=False)
    assert response.json() == {"a": 1}
    assert set(said(spans.one)) == ANSWERED | TOLD | READ


def test_a_server_that_does_not_say_how_long_it_took_leaves_the_network_unknown(
    server: Server, reader: Reader, spans: Spans
) -> None:
    reader.read(f"{server.url}/v1/chat/completions")
    assert set(said(spans.one)) == ANSWERED | READ | TOKENS


@pytest.mark.parametrize(
    ("path", "attributes"), [("nothing", ANSWERED), ("packed", ANSWERED | READ)], ids=["no body", "encoded"]
)
def test_what_the_reader_did_not_see_is_absent(
    server: Server, reader: Reader, spans: Spans, path: str, attributes: set[str]
) -> None:
    reader.read(f"{server.url}/{path}")
    assert set(said(spans.one)) == attributes


def test_the_longest_wait_between_two_tokens_is_told_beside_the_mean(
    server: Server, reader: Reader, spans: Spans
) -> None:
    reader.read(f"{server.url}/stutter")
    felt = said(spans.one)
    assert felt[semconv.CLIENT_ITL_MAX] >= 0.1
    assert felt[semconv.CLIENT_ITL_MEAN] < felt[semconv.CLIENT_ITL_MAX]


# ── nothing is held back ─────────────────────────────────────────────────────────────────────────────────────────


def test_each_chunk_is_handed_over_before_the_next_one_is_sent(
    server: Server, reader: Reader, spans: Spans
) -> None:
    _, chunks = reader.read(f"{server.url}/stepwise", lambda _: server.may_go_on.set())
    assert chunks == [event(text) for text in "abc"]
    assert said(spans.one)[semconv.CLIENT_CHUNKS] == 3


def test_a_stream_closed_early_is_closed_at_once_and_is_no_error(
    server: Server, reader: Reader, spans: Spans
) -> None:
    reader.read(f"{server.url}/endless", enough)
    assert server.left.wait(10)
    assert set(said(spans.one)) == ANSWERED | READ | {
        semconv.CLIENT_TIME_TO_FIRST_TOKEN,
        semconv.CLIENT_CLOSED_EARLY,
    }
    assert spans.one.status.status_code is trace.StatusCode.UNSET


def test_a_reader_who_stops_at_the_end_of_the_events_has_not_closed_early(
    server: Server, reader: Reader, spans: Spans
) -> None:
    def until_done(chunk: bytes) -> None:
        if b"[DONE]" in chunk:
            raise Enough

    reader.read(f"{server.url}/v1/chat/completions", until_done)
    assert set(said(spans.one)) == ANSWERED | READ | TOKENS


# ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "failure", "attributes"),
    [
        ("broken", "RemoteProtocolError", ANSWERED | READ | {semconv.CLIENT_TIME_TO_FIRST_TOKEN}),
        ("silent", "ReadTimeout", TARGET),
        ("endless", "ReadTimeout", ANSWERED | READ | {semconv.CLIENT_TIME_TO_FIRST_TOKEN}),
    ],
)
def test_an_exception_passes_and_is_told_by_its_type(
    server: Server, reader: Reader, spans: Spans, path: str, failure: str, attributes: set[str]
) -> None:
    with pytest.raises(getattr(reader.httpx, failure)):
        reader.read(f"{server.url}/{path}", timeout=0.5)
    assert set(said(spans.one)) == attributes | {"error.type"}
    assert said(spans.one)["error.type"] == failure
    assert spans.one.status.status_code is trace.StatusCode.ERROR
    assert not spans.one.status.description
    assert not spans.one.events


@pytest.mark.parametrize("where", ["before the headers", "in the body"])
def test_the_exception_that_comes_out_is_the_one_that_went_in(spans: Spans, where: str) -> None:
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
    assert said(spans.one)["error.type"] == "ZeroDivisionError"
    assert "canary" not in spans.one.to_json()


def test_nobody_at_the_other_end_is_a_failure_without_a_status(reader: Reader, spans: Spans) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(reader.httpx.ConnectError):
        reader.read(f"http://127.0.0.1:{port}/v1/chat/completions")
    assert set(said(spans.one)) == TARGET | {"error.type"}
    assert said(spans.one)["error.type"] == "ConnectError"


def test_an_answer_of_4xx_is_an_error_of_the_client(server: Server, reader: Reader, spans: Spans) -> None:
    response, _ = reader.read(f"{server.url}/refused", stream=False)
    assert response.status_code == 404
    assert said(spans.one)["error.type"] == "404"
    assert spans.one.status.status_code is trace.StatusCode.ERROR
    assert "no such model" not in spans.one.to_json()


@pytest.mark.parametrize("path", ["silent", "endless"])
async def test_a_cancelled_request_is_told_as_that(server: Server, spans: Spans, path: str) -> None:
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
    assert said(spans.one)["error.type"] == semconv.ERROR_CANCELLED
    assert await asyncio.to_thread(server.left.wait, 10)


def test_the_hops_of_a_redirect_are_spans_of_their_own(server: Server, reader: Reader, spans: Spans) -> None:
    reader.read(f"{server.url}/redirect", follow_redirects=True)
    first, second = spans.get_finished_spans()
    assert [said(span)["http.response.status_code"] for span in (first, second)] == [307, 200]
    assert first.end_time <= second.start_time
    sent = [headers[b"traceparent"].decode().split("-")[2] for headers in server.headers]
    assert sent == [f"{span.get_span_context().span_id:016x}" for span in (first, second)]


# ── whose trace, and what is in it ───────────────────────────────────────────────────────────────────────────────


def test_the_span_is_a_child_of_what_is_current_which_stays_current(
    server: Server, reader: Reader, spans: Spans
) -> None:
    current: list[Any] = []
    with spans.provider.get_tracer("test").start_as_current_span("mine") as mine:
        reader.read(f"{server.url}/json", lambda _: current.append(trace.get_current_span()))
        assert trace.get_current_span() is mine
    request, _ = spans.get_finished_spans()
    assert request.parent == mine.get_span_context()
    assert set(current) == {mine}


def test_the_span_is_current_for_the_transport_within(spans: Spans) -> None:
    current: list[Any] = []

    def answer(request: Any) -> Any:
        current.append(trace.get_current_span())
        return httpx.Response(200, text="read already")

    client = httpx.Client(transport=TracedTransport(httpx.MockTransport(answer), spans.provider))
    assert client.get("http://model.example/v1/models").text == "read already"
    assert current[0].get_span_context() == spans.one.get_span_context()
    assert said(spans.one)["server.port"] == 80
    assert set(said(spans.one)) == ANSWERED


def test_a_request_that_is_not_sampled_carries_that_on_and_its_response_is_left_alone(server: Server) -> None:
    unsampled = Spans(sampler=ALWAYS_OFF)
    with instrument_client(httpx.Client(), unsampled.provider) as client:
        with client.stream("POST", f"{server.url}/json") as response:
            kinds = {type(response.stream._stream).__name__}
            response.read()
    assert kinds == {"ResponseStream"}
    assert not int(server.headers[0][b"traceparent"][-2:], 16) & trace.TraceFlags.SAMPLED
    assert unsampled.get_finished_spans() == ()


def test_nothing_of_a_request_but_where_it_went_is_told(server: Server, reader: Reader, spans: Spans) -> None:
    url = server.url.replace("//", "//canary-user:canary-password@") + "/refused?key=canary-query#canary"
    reader.read(url, headers={"authorization": "canary-header"}, cookies={"a": "canary-cookie"}, stream=False)
    assert said(spans.one)["url.full"] == f"{server.url}/refused"
    assert "canary" not in spans.one.to_json()


def test_a_method_that_nobody_knows_is_not_told(spans: Spans) -> None:
    mock = httpx.MockTransport(lambda request: httpx.Response(200))
    httpx.Client(transport=TracedTransport(mock, spans.provider)).request("BREW", "https://pot.example/")
    assert spans.one.name == "HTTP"
    assert said(spans.one)["http.request.method"] == "_OTHER"
    assert said(spans.one)["server.port"] == 443
    assert "BREW" not in spans.one.to_json()


# ── which clients ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_client_instrumented_twice_is_instrumented_once(server: Server, spans: Spans) -> None:
    client = httpx.Client()
    assert instrument_client(instrument_client(client, spans.provider), spans.provider) is client
    client.post(f"{server.url}/json")
    client.close()
    assert len(spans.get_finished_spans()) == 1


def test_requests_through_a_proxy_of_the_client_are_traced_too(server: Server, spans: Spans) -> None:
    mounts = {"http://": httpx.HTTPTransport(), "all://*.local": None}
    with instrument_client(httpx.Client(mounts=mounts), spans.provider) as client:
        client.post(f"{server.url}/json")
    assert spans.one.name == "POST"


def test_importing_it_loads_neither_library_nor_sdk() -> None:
    modules = "{'httpx', 'httpx2', 'numpy', 'opentelemetry.sdk'}"
    code = f"import sys, otel_infer.instrumentation.httpx; print(sorted({modules} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("what", [object(), "http://", httpx.HTTPTransport()])
def test_what_is_no_client_is_refused(what: Any) -> None:
    with pytest.raises(TypeError, match=r"takes a Client or an AsyncClient .*otel-infer\[client\]"):
        instrument_client(what)


@pytest.mark.parametrize("changed", ["_mounts", "_transport"])
def test_a_release_that_keeps_its_transports_elsewhere_is_refused_and_left_as_it_is(changed: str) -> None:
    client = httpx.Client()
    setattr(client, changed, None)
    before = dict(vars(client))
    with pytest.raises(TypeError, match="transport=TracedTransport"):
        instrument_client(client)
    assert vars(client) == before


async def test_a_transport_is_opened_and_closed_with_its_client(spans: Spans) -> None:
    seen: list[str] = []

    class Noting(httpx.HTTPTransport):
        def close(self) -> None:
            seen.append("closed")
            super().close()

    class AsyncNoting(httpx.AsyncHTTPTransport):
        async def aclose(self) -> None:
            seen.append("closed async")
            await super().aclose()

    httpx.Client(transport=TracedTransport(Noting())).close()
    await httpx.AsyncClient(transport=AsyncTracedTransport(AsyncNoting())).aclose()
    assert seen == ["closed", "closed async"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_openai_sdk_is_a_client_like_any_other(
    captured: Captured, server: Server, spans: Spans, asynchronous: bool
) -> None:
    openai = pytest.importorskip("openai", reason="openai is not installed")
    settings = {"api_key": "canary", "base_url": f"{server.url}/v1", "max_retries": 0}
    asked: Any = {"model": "m", "messages": [{"role": "user", "content": "canary"}], "stream": True}

    async def ask() -> str:
        http_client = instrument_client(openai.DefaultAsyncHttpxClient(), spans.provider)
        async with openai.AsyncOpenAI(http_client=http_client, **settings) as client:
            stream: AsyncIterator[Any] = await client.chat.completions.create(**asked)
            return "".join([part.choices[0].delta.content async for part in stream])

    if asynchronous:
        assert asyncio.run(ask()) == "abcd"
    else:
        http_client = instrument_client(openai.DefaultHttpxClient(), spans.provider)
        with openai.OpenAI(http_client=http_client, **settings) as client:
            parts = client.chat.completions.create(**asked)
            assert "".join(part.choices[0].delta.content for part in parts) == "abcd"
    assert set(said(spans.one)) == ANSWERED | TOLD | READ | TOKENS
    assert "canary" not in spans.one.to_json()
    assert captured.requests()[0].trace_id.hex() == f"{spans.one.get_span_context().trace_id:032x}"


# ── network ──────────────────────────────────────────────────────────────────────────────────────────────────────


def felt_by(url: str, times: int = 4) -> tuple[float, float]:
    """The least network and the least server time of some requests: what nobody else's load has added to."""
    spans = Spans()
    with instrument_client(httpx.Client(), spans.provider) as client:
        for _ in range(times):
            client.post(url)
    told = [said(span) for span in spans.get_finished_spans()]
    return tuple(
        min(one[name] for one in told)
        for name in (semconv.CLIENT_NETWORK_DURATION, semconv.CLIENT_SERVER_DURATION)
    )  # type: ignore[return-value]


def test_a_delay_on_the_way_is_network_and_a_delay_in_the_server_is_not(
    captured: Captured, server: Server
) -> None:
    proxy = Delaying(server.url, 0.1)
    try:
        network, in_server = felt_by(f"{proxy.url}/json")
    finally:
        proxy.close()
    assert 0.095 <= network < 1
    assert in_server < 0.05
    network, in_server = felt_by(f"{server.url}/slow")
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
def test_what_a_server_says_of_its_time_is_read_as_the_header_is_written(
    headers: list[str], expected: float | None
) -> None:
    assert server_duration_ms(headers) == expected


@pytest.mark.parametrize("told", ["infer;dur=60000", "infer;dur=x"])
def test_what_cannot_be_of_this_response_is_not_believed(spans: Spans, told: str) -> None:
    mock = httpx.MockTransport(lambda request: httpx.Response(200, headers={"server-timing": told}))
    httpx.Client(transport=TracedTransport(mock, spans.provider)).get("http://cache.example/")
    assert set(said(spans.one)) == ANSWERED


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
def test_a_token_comes_with_data_that_is_neither_empty_nor_the_end(chunk: bytes, brings: bool) -> None:
    assert SseParser().scan_for_token(chunk) is brings


LINES = st.sampled_from(
    ["data: {}", "data:x", "data:", "data: [DONE]", "data: [DONE", ": ping", "", "event: a", "data", "da"]
)


@given(lines=st.lists(LINES), end=st.sampled_from(["\n", "\r\n"]), size=st.integers(1, 20))
def test_a_token_is_seen_once_wherever_the_stream_is_cut(lines: list[str], end: str, size: int) -> None:
    text = "".join(line + end for line in lines).encode()
    tokens = sum(line[:5] == "data:" and line[5:].strip() not in ("", "[DONE]") for line in lines)
    singly, cut = SseParser(), SseParser()
    assert sum(singly.scan_for_token(text[at : at + 1]) for at in range(len(text))) == tokens
    pieces = [cut.scan_for_token(text[at : at + size]) for at in range(0, len(text), size)]
    assert min(tokens, 1) <= sum(pieces) <= tokens
    assert singly.ended and cut.ended if "data: [DONE]" in lines else not singly.ended


def test_an_event_that_only_opens_the_answer_is_no_token_until_there_was_one() -> None:
    events, role = SseParser(), b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    pieces = [role[:20], role[20:], event("a"), role, b"data: [DONE]\n\n"]
    assert [events.scan_for_token(piece) for piece in pieces] == [False, False, True, True, False]


@pytest.mark.parametrize("begun", [b"data: {", b"data: x", b"data:  ", b"event: ", b""])
def test_a_line_without_an_end_is_not_kept(begun: bytes) -> None:
    events = SseParser()
    brought = [events.scan_for_token(begun), *(events.scan_for_token(b" x" * 1000) for _ in range(100))]
    assert len(events._partial_line) <= 4096
    assert sum(brought) == begun.startswith(b"data:")


# ── code of ours that raises ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("broken", ["begin", "answered", "received", "end"])
def test_what_goes_wrong_in_our_code_is_said_once_and_the_reader_reads_on(
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
        "answered": (client_span, "server_duration_ms"),
        "received": (SseParser, "scan_for_token"),
        "end": (client_span.ClientRequestSpan, "_collect_attributes"),
    }[broken]
    monkeypatch.setattr(client_span, "_logged_types", set())
    with caplog.at_level(logging.WARNING), monkeypatch.context() as broken_code:
        broken_code.setattr(*target, fail)
        for _ in range(2):
            _, chunks = reader.read(f"{server.url}/v1/chat/completions")
            assert len(b"".join(chunks).split(b"\n\n")) == 7
    ours = [
        record for record in caplog.records if record.name == "otel_infer.instrumentation.httpx.client_span"
    ]
    assert len(ours) == 1 and "ArithmeticError" in ours[0].message
    assert "canary" not in caplog.text


# ── docs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_example_of_the_page_runs(captured: Captured, server: Server, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "client.md").read_text()
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


def test_every_attribute_is_explained() -> None:
    page = (ROOT / "docs" / "client.md").read_text()
    ours = {value for name, value in vars(semconv).items() if name.startswith("CLIENT_")}
    assert ours == set(re.findall(r"`(infer\.client\.[a-z_.]+)`", page))
