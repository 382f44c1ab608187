"""HTTP requests through the ASGI middleware without a network: hand-written applications, every ending."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import baggage, propagate, trace
from opentelemetry import context as otel_context
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Decision, ParentBased, StaticSampler
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import otel_infer
from otel_infer import _clock, semconv
from otel_infer.config import tenancy
from otel_infer.instrumentation import asgi
from otel_infer.instrumentation.asgi import exchange, response_headers
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.http_server import parent_context
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.arena import MemoryArena
from otel_infer.ringbuffer.reader import RequestReader
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import caller as caller_module
from otel_infer.tracing import request_span, span_ids
from otel_infer.tracing import start as ingress

Message = dict[str, Any]
START: Message = {"type": "http.response.start", "status": 200, "headers": []}
LAST: Message = {"type": "http.response.body", "body": b"", "more_body": False}
DISCONNECT: Message = {"type": "http.disconnect"}
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = (b"traceparent", f"00-{TRACE_ID}-{SPAN_ID}-01".encode())
PARTS = (TRACE_ID, "0" * 32, "A" * 32), (SPAN_ID, "0" * 16, SPAN_ID[1:]), ("01", "00", "01-more", "1")


class IgnoringPropagator(TraceContextTextMapPropagator):
    """A custom propagator that ignores the headers of the caller."""

    def extract(self, carrier: Any, context: Any = None, getter: Any = None) -> Any:
        return context


def chunk(body: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def start(status: int) -> Message:
    return {**START, "status": status}


class Seen:
    """One request with its recorded events."""

    def __init__(self, said: list[Any]) -> None:
        self.said = said
        self.arrived: events.RequestArrived = self.every(events.RequestArrived)[0]
        self.attributes = {event.key: event.value for event in self.every(events.AttributeSet)}
        keys = (semconv.HTTP_REQUEST_METHOD, semconv.URL_SCHEME, semconv.HTTP_ROUTE)
        for described in self.every(events.HttpDescribed):
            self.attributes.update((key, value) for key, value in zip(keys, described[1:]) if value)

    def every(self, kind: type) -> list[Any]:
        return [event for event in self.said if type(event) is kind]

    @property
    def ended(self) -> events.RequestEnded:
        (ended,) = self.every(events.RequestEnded)
        return ended

    @property
    def verdict(self) -> tuple[int, str, int]:
        return self.ended.outcome, self.ended.error_type, self.ended.status_code


class Watched:
    """The requests recorded in this process."""

    def __init__(self, arena: MemoryArena) -> None:
        self.arena = arena
        self._reader: RequestReader | None = None
        self._by_handle: dict[int, list[Any]] = {}
        self._untraced: list[events.HttpServed] = []

    @property
    def untraced(self) -> list[events.HttpServed]:
        """The HTTP requests without a span."""
        self.requests  # noqa: B018  (reads the ring)
        return self._untraced

    @property
    def requests(self) -> list[Seen]:
        if self._reader is None and self.arena.buffers:
            self._reader = RequestReader(self.arena.buffers[0][1], 1)
        for entry in self._reader.poll(_clock.now(), final=True) if self._reader else ():
            if isinstance(entry.event, events.HttpServed):
                self._untraced.append(entry.event)
            elif entry.handle:
                self._by_handle.setdefault(entry.handle, []).append(entry.event)
        return [Seen(said) for said in self._by_handle.values()]

    @property
    def one(self) -> Seen:
        (request,) = self.requests
        return request

    @property
    def bytes(self) -> bytes:
        return b"".join(memory[:] for _, memory in self.arena.buffers)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    arena = MemoryArena()
    opener = span_ids.SdkSpanFactory(ParentBased(ALWAYS_ON), RandomIdGenerator(), span_ids.Limits())
    monkeypatch.setattr(request_span, "span_factory", opener)
    recorder.start(lambda: arena, lambda: None, lambda reason: None)
    yield Watched(arena)
    recorder.stop()
    asgi.configure_asgi("")
    caller_module.caller_settings = tenancy.NO_CALLER_SETTINGS


class Client:
    """One request of a client, and the server's `receive` and `send` for it."""

    def __init__(self, *received: Message, method: str = "POST", headers: Any = (), **scope: Any) -> None:
        self.received = list(received) or [{"type": "http.request", "body": b"{}", "more_body": False}]
        self.sent: list[Message] = []
        self.scope: Message = {
            "type": "http",
            "method": method,
            "scheme": "http",
            "path": "/v1/chat",
            "root_path": "",
            "query_string": b"user=someone",
            "server": ("127.0.0.1", 8000),
            "headers": list(headers),
            **scope,
        }

    async def receive(self) -> Message:
        return self.received.pop(0) if self.received else DISCONNECT

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    async def ask(self, app: Any) -> Any:
        return await app(self.scope, self.receive, self.send)


class Uvicorn(Client):
    """Drops sent messages after a disconnect and reports the disconnect through `receive`."""

    disconnected = False

    async def send(self, message: Message) -> None:
        if not self.disconnected:
            self.sent.append(message)


def sending(*messages: Message) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)

    return app


def raising(exc: BaseException, *before: Message) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in before:
            await send(message)
        raise exc

    return app


async def run_request(app: Any, client: Client | None = None) -> BaseException | None:
    """Runs one request and returns the exception raised by the application, or None."""
    try:
        await (client or Client()).ask(asgi.wrap(app))
    except BaseException as exc:
        return exc
    return None


# ── which requests are recorded ──────────────────────────────────────────────────────────────────────────────────


async def test_request_lasts_from_arrival_to_last_byte(watched: Watched) -> None:
    client = Client()
    before = _clock.now()
    await run_request(sending(START, chunk(b"a"), chunk(b"b", more=False)), client)
    after = _clock.now()
    seen = watched.one
    assert before <= seen.arrived.at <= seen.ended.at <= after
    assert seen.verdict == (events.OK, "", 200)
    assert seen.ended.chunks == 2
    assert seen.arrived.flags & events.OWN_SERVER_SPAN
    assert client.sent == [START, chunk(b"a"), chunk(b"b", more=False)]
    assert asgi.SCOPE_KEY not in client.scope


async def test_a_websocket_is_passed_through(watched: Watched) -> None:
    client = Client(type="websocket")
    given: list[Any] = []

    async def app(*args: Any) -> str:
        given.extend(args)
        return "whatever"

    assert await client.ask(asgi.wrap(app)) == "whatever"
    assert given == [client.scope, client.receive, client.send]
    assert watched.requests == []


async def search_by_hand(*args: Any) -> None:
    with otel_infer.stage("before"):
        pass
    with otel_infer.request("search"), otel_infer.stage("rerank"):
        pass


async def test_a_websocket_may_open_a_manual_request(watched: Watched) -> None:
    await Client(type="websocket").ask(asgi.wrap(search_by_hand))
    assert [stage.stage for stage in watched.one.every(events.StageEnded)] == ["rerank"]


async def test_a_get_with_a_stage_has_a_span(watched: Watched) -> None:
    await Client(method="GET").ask(asgi.wrap(search_by_hand))
    assert [stage.stage for stage in watched.one.every(events.StageEnded)] == ["before", "rerank"]
    assert watched.one.attributes[semconv.HTTP_REQUEST_METHOD] == "GET"


async def test_nothing_is_recorded_while_the_recorder_is_stopped(watched: Watched) -> None:
    recorder.stop()
    client = Client()
    await run_request(sending(START, LAST), client)
    assert client.sent == [START, LAST]
    assert watched.requests == []


@pytest.mark.parametrize("pattern", ["/v1/chat", "health, chat$", r"https?://inference\.example"])
async def test_excluded_urls_are_passed_through(watched: Watched, pattern: str) -> None:
    asgi.configure_asgi(pattern)
    await run_request(asgi.wrap(sending(START, LAST)), Client(headers=[(b"host", b"inference.example")]))
    assert watched.requests == []


@pytest.mark.parametrize("pattern", ["", ",", "/v2", "user=someone"])
async def test_url_exclusion_ignores_the_query(watched: Watched, pattern: str) -> None:
    asgi.configure_asgi(pattern)
    await run_request(sending(START, LAST))
    assert len(watched.requests) == 1


async def test_invalid_exclusion_pattern_is_ignored_and_logged(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    asgi.configure_asgi("([, chat")
    await run_request(sending(START, LAST))
    assert watched.requests == []
    assert "'(['" in caplog.text


async def test_doubly_wrapped_application_records_one_request(watched: Watched) -> None:
    app = sending(START, chunk(b"a"), LAST)
    await run_request(asgi.wrap(asgi.wrap(app)))
    assert watched.one.ended.chunks == 1


async def test_unknown_method_is_recorded_as_other(watched: Watched) -> None:
    await run_request(sending(START, LAST), Client(method="BREW"))
    assert watched.one.arrived.name == events.OTHER
    assert watched.one.attributes["http.request.method"] == events.OTHER
    assert b"BREW" not in watched.bytes


async def test_request_attributes_are_only_method_and_scheme(
    watched: Watched,
) -> None:
    client = Client(headers=[(b"authorization", b"canary")], path="/v1/canary", client=("203.0.113.7", 1))
    await run_request(sending(START, LAST), client)
    assert watched.one.attributes == {"http.request.method": "POST", "url.scheme": "http"}
    assert watched.one.arrived.name == "POST"
    for outside in (b"canary", b"someone", b"203.0.113.7"):
        assert outside not in watched.bytes


def test_names_match_the_conventions() -> None:
    assert semconv.HTTP_REQUEST_METHOD == "http.request.method"
    assert semconv.URL_SCHEME == "url.scheme"
    assert semconv.HTTP_ROUTE == "http.route"


# ── requests without a span ──────────────────────────────────────────────────────────────────────────────────────


async def served_by(app: Any, client: Client) -> BaseException | None:
    """Runs a request behind the rings of an earlier POST. Returns the exception raised by the application."""
    await run_request(sending(START, LAST))
    return await run_request(app, client)


@pytest.mark.parametrize("method", events.UNTRACED_METHODS)
async def test_a_request_without_a_span_is_counted(watched: Watched, method: str) -> None:
    client = Client(method=method, headers=[(b"authorization", b"canary")], path="/canary")
    before = _clock.now()
    assert await served_by(sending(start(404), chunk(b"a"), LAST), client) is None
    (served,) = watched.untraced
    assert before <= served.started_at <= served.at <= _clock.now()
    assert served[2:] == (404, "", method, "http", "")
    assert client.sent == [start(404), chunk(b"a"), LAST]
    assert asgi.SCOPE_KEY not in client.scope
    assert len(watched.requests) == 1 and b"canary" not in watched.bytes


def reaching_a_model(app: Any, in_thread: bool = False) -> Any:
    """An application that calls a model, perhaps in a thread, and then does what `app` does."""

    async def reach_model(scope: Any, receive: Any, send: Any) -> None:
        if in_thread:
            await asyncio.to_thread(ingress.current_request)
        else:
            ingress.current_request()
        await app(scope, receive, send)

    return reach_model


@pytest.mark.parametrize("in_thread", [False, True])
async def test_a_get_that_reaches_a_model_has_a_span_from_its_arrival(
    watched: Watched, in_thread: bool
) -> None:
    client = Client(method="GET", path="/items/7", headers=[TRACEPARENT])
    before = _clock.now()
    await run_request(reaching_a_model(sending(START, chunk(b"a"), LAST), in_thread), client)
    seen = watched.one
    assert seen.verdict == (events.OK, "", 200)
    assert seen.attributes[semconv.HTTP_REQUEST_METHOD] == "GET"
    assert before <= seen.arrived.at <= seen.ended.at and seen.ended.chunks == 1
    assert seen.arrived.trace_id.hex() == TRACE_ID
    assert watched.untraced == [] and asgi.SCOPE_KEY not in client.scope
    assert client.sent == [START, chunk(b"a"), LAST]


async def test_a_get_that_reaches_a_model_and_raises_is_an_error(watched: Watched) -> None:
    app = reaching_a_model(raising(KeyError("canary")))
    assert isinstance(await run_request(app, Client(method="GET")), KeyError)
    assert watched.one.verdict == (events.ERROR, "KeyError", 500)


async def test_a_wait_does_not_give_a_get_a_span(watched: Watched) -> None:
    async def look_only(scope: Any, receive: Any, send: Any) -> None:
        assert ingress.find_request() is not None
        await asyncio.to_thread(ingress.find_request)
        await sending(START, LAST)(scope, receive, send)

    await served_by(look_only, Client(method="GET"))
    assert len(watched.untraced) == 1 and len(watched.requests) == 1


async def test_a_request_without_a_span_creates_no_rings(watched: Watched) -> None:
    await run_request(sending(START, LAST), Client(method="GET"))
    assert watched.arena.buffers == []


@pytest.mark.parametrize(
    ("app", "expected"),
    [
        (sending(start(503), LAST), (503, "503")),
        (raising(KeyError("canary")), (500, "KeyError")),
        (raising(KeyError("canary"), START), (200, "KeyError")),
        (raising(asyncio.CancelledError()), (0, "cancelled")),
        (sending(), (500, "500")),
    ],
    ids=["status", "raises", "raises late", "cancelled", "sends nothing"],
)
async def test_a_failed_request_without_a_span_names_its_error(
    watched: Watched, app: Any, expected: tuple[int, str]
) -> None:
    await served_by(app, Client(method="GET"))
    (served,) = watched.untraced
    assert (served.status_code, served.error_type) == expected


async def test_an_excluded_request_without_a_span_is_not_counted(watched: Watched) -> None:
    asgi.configure_asgi("health")
    await served_by(sending(START, LAST), Client(method="GET", path="/health"))
    assert watched.untraced == []


async def test_an_odd_message_of_a_request_without_a_span_is_passed_on(watched: Watched) -> None:
    client = Client(method="GET")
    odd: Message = {"type": "http.response.start", "status": "two hundred"}
    await served_by(sending(odd, {}, LAST), client)
    assert client.sent == [odd, {}, LAST]
    assert watched.untraced[0].status_code == 0


# ── first byte, first token, backpressure ────────────────────────────────────────────────────────────────────────


async def test_response_starts_just_before_its_first_byte(watched: Watched) -> None:
    handed: list[int] = []

    class Slow(Client):
        async def send(self, message: Message) -> None:
            handed.append(_clock.now())
            await asyncio.sleep(0.01)

    await run_request(sending(START, chunk(b""), chunk(b"a"), chunk(b"b"), LAST), Slow())
    (started,) = watched.one.every(events.ResponseStarted)
    assert 0 <= handed[2] - started.at < 5_000_000


async def test_first_token_is_sent_with_the_next_chunk(watched: Watched) -> None:
    instants: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await send(chunk(b"role"))
        instants.append(_clock.now())
        request = ingress.current_request()
        assert request is not None
        request.record_token_reached()
        await send(chunk(b"first"))
        instants.append(_clock.now())
        await send(chunk(b"second"))
        await send(LAST)

    await run_request(app)
    (sent,) = watched.one.every(events.FirstTokenSent)
    assert instants[0] <= sent.at <= instants[1]
    assert len(watched.one.every(events.ResponseStarted)) == 1
    assert watched.one.ended.chunks == 3


async def test_no_first_token_without_reported_tokens(watched: Watched) -> None:
    await run_request(sending(START, chunk(b"a"), chunk(b"b"), LAST))
    assert watched.one.every(events.FirstTokenSent) == []


async def test_slow_client_is_counted_as_send_wait(watched: Watched) -> None:
    class Stuck(Client):
        async def send(self, message: Message) -> None:
            await asyncio.sleep(0.02)

    await run_request(sending(START, chunk(b"a"), chunk(b"b"), LAST), Stuck())
    assert 60e6 <= watched.one.ended.send_wait_ns < 80e6


async def test_send_wait_before_a_disconnect_is_counted(watched: Watched) -> None:
    class Leaving(Client):
        async def send(self, message: Message) -> None:
            if message["type"] == "http.response.body":
                await asyncio.sleep(0.02)
                raise BrokenPipeError

    await run_request(sending(START, chunk(b"a")), Leaving())
    assert watched.one.ended.send_wait_ns >= 20e6


async def test_work_after_the_last_byte_is_not_included(watched: Watched) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await send(chunk(b"a", more=False))
        assert ingress.current_request() is None
        await asyncio.sleep(0.02)
        assert await receive() != DISCONNECT
        assert await receive() == DISCONNECT
        raise ValueError("in a background task")

    assert isinstance(await run_request(app), ValueError)
    assert watched.one.verdict == (events.OK, "", 200)
    assert watched.one.ended.at - watched.one.arrived.at < 20_000_000


# ── how it ends ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("status", "outcome", "error_type"),
    [(404, events.OK, ""), (429, events.OK, ""), (503, events.ERROR, "503")],
)
async def test_status_codes_from_500_are_errors(
    watched: Watched, status: int, outcome: int, error_type: str
) -> None:
    await run_request(sending(start(status), chunk(b"no", more=False)))
    assert watched.one.verdict == (outcome, error_type, status)


async def test_exception_before_the_response_is_status_500(watched: Watched) -> None:
    failure = ValueError("canary prompt")
    assert await run_request(raising(failure)) is failure
    assert failure.__context__ is None and failure.__cause__ is None
    assert watched.one.verdict == (events.ERROR, "ValueError", 500)
    assert b"canary" not in watched.bytes


async def test_exception_in_mid_stream_keeps_the_sent_status(watched: Watched) -> None:
    failure = ValueError()
    assert await run_request(raising(failure, START, chunk(b"a"))) is failure
    assert watched.one.verdict == (events.ERROR, "ValueError", 200)


async def test_exception_behind_a_500_response_records_its_type(watched: Watched) -> None:
    failure = ZeroDivisionError()
    instants: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start(500))
        await send(chunk(b"oops", more=False))
        instants.append(_clock.now())
        await asyncio.sleep(0.01)
        raise failure

    assert await run_request(app) is failure
    assert watched.one.verdict == (events.ERROR, "ZeroDivisionError", 500)
    assert watched.one.ended.at <= instants[0]


async def test_timeout_is_an_abort(watched: Watched) -> None:
    failure = TimeoutError()
    assert await run_request(raising(failure)) is failure
    assert watched.one.verdict == (events.ABORTED, "timeout", 500)


async def test_exception_group_records_its_inner_exception(watched: Watched) -> None:
    class Group(Exception):
        def __init__(self, *inner: BaseException) -> None:
            self.exceptions = inner

    await run_request(raising(Group(Group(KeyError())), START))
    assert watched.one.verdict == (events.ERROR, "KeyError", 200)


async def test_cancelled_request_is_aborted(watched: Watched) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await asyncio.Event().wait()

    task = asyncio.create_task(Client().ask(asgi.wrap(app)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert watched.one.verdict == (events.ABORTED, "client_disconnect", 200)


async def test_cancellation_by_a_connected_server_is_no_disconnect(
    watched: Watched,
) -> None:
    await run_request(raising(asyncio.CancelledError()), Uvicorn())
    assert watched.one.verdict == (events.ABORTED, "cancelled", 0)


async def test_disconnect_before_the_complete_body_is_an_abort(watched: Watched) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        await send(start(400))
        await send(LAST)

    part: Message = {"type": "http.request", "body": b"{", "more_body": True}
    await run_request(app, Client(part))
    assert watched.one.verdict == (events.ABORTED, "client_disconnect", 0)


async def test_stream_closed_early_is_an_abort_despite_completion(watched: Watched) -> None:
    left: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(START)
        await send(chunk(b"a"))
        await receive()
        left.append(_clock.now())
        await asyncio.sleep(0.01)
        await send(chunk(b"b", more=False))

    await run_request(app)
    assert watched.one.verdict == (events.ABORTED, "client_disconnect", 200)
    assert watched.one.ended.at <= left[0]


@pytest.mark.parametrize("name", ["BrokenPipeError", "ClientDisconnect"])
async def test_send_failing_after_a_disconnect_is_an_abort(watched: Watched, name: str) -> None:
    failure = BrokenPipeError() if name == "BrokenPipeError" else type(name, (Exception,), {})()

    class Gone(Client):
        async def send(self, message: Message) -> None:
            if message.get("body") == b"b":
                raise failure

    async def swallowing(scope: Any, receive: Any, send: Any) -> None:
        with contextlib.suppress(type(failure)):
            await sending(START, chunk(b"a"), chunk(b"b"), chunk(b"c"), LAST)(scope, receive, send)

    await run_request(swallowing, Gone())
    assert watched.one.verdict == (events.ABORTED, "client_disconnect", 200)


async def test_disconnect_unnoticed_by_the_application_is_an_abort(watched: Watched) -> None:
    client = Uvicorn()
    left: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await send(chunk(b"a"))
        client.disconnected = True
        await send(chunk(b"b"))
        left.append(_clock.now())
        await asyncio.sleep(0.01)
        await send(chunk(b"c"))
        await send(LAST)

    await run_request(app, client)
    assert watched.one.verdict == (events.ABORTED, "client_disconnect", 200)
    assert watched.one.ended.at <= left[0]
    assert watched.one.ended.chunks == 1


async def test_disconnect_before_an_unstreamed_response_is_an_abort(watched: Watched) -> None:
    client = Uvicorn()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        client.disconnected = True
        await send(START)
        await send(chunk(b"answer", more=False))

    await run_request(app, client)
    assert watched.one.verdict == (events.ABORTED, "client_disconnect", 0)


@pytest.mark.parametrize(
    ("sent", "verdict"), [([], ("500", 500)), ([START, chunk(b"a")], (events.OTHER, 200))]
)
async def test_unfinished_response_is_an_error(
    watched: Watched, sent: list[Message], verdict: tuple[str, int]
) -> None:
    await run_request(sending(*sent))
    assert watched.one.verdict == (events.ERROR, *verdict)


async def test_disconnect_while_sending_the_last_byte_is_abort(watched: Watched) -> None:
    class Leaving(Uvicorn):
        async def send(self, message: Message) -> None:
            await asyncio.sleep(0)
            self.disconnected = message is LAST

    await run_request(sending(START, chunk(b"a"), LAST), Leaving())
    assert watched.one.verdict == (events.ABORTED, "client_disconnect", 200)


async def test_disconnect_message_after_the_last_byte_is_ok(watched: Watched) -> None:
    class Finished(Client):
        async def send(self, message: Message) -> None:
            if message is LAST:
                await asyncio.create_task(self.listen())

        async def listen(self) -> None:
            assert await given[0]() == DISCONNECT

    given: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        given.append(receive)
        await receive()
        await sending(START, chunk(b"a"), LAST)(scope, receive, send)

    await run_request(app, Finished())
    assert watched.one.verdict == (events.OK, "", 200)


async def test_client_disconnect_raised_by_the_application_is_abort(watched: Watched) -> None:
    await run_request(raising(type("ClientDisconnect", (Exception,), {})()))
    assert watched.one.verdict == (events.ABORTED, "client_disconnect", 0)


async def test_pathsend_message_ends_the_request(watched: Watched) -> None:
    await run_request(sending(START, {"type": "http.response.pathsend", "path": "/somewhere"}))
    assert watched.one.verdict == (events.OK, "", 200)


async def test_every_ending_frees_the_slot_of_the_request(watched: Watched) -> None:
    for app in (sending(START, LAST), sending(), raising(ValueError()), raising(asyncio.CancelledError())):
        await run_request(app)
    await asyncio.gather(*(run_request(sending(START, LAST)) for _ in range(20)))
    assert len(watched.requests) == 24
    assert list(RequestReader(watched.arena.buffers[0][1], 2).read_live_requests()) == []


# ── no effect on the application ─────────────────────────────────────────────────────────────────────────────────


async def test_application_is_called_once_and_its_result_returned(watched: Watched) -> None:
    calls: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> str:
        calls.append(scope)
        return "not None"

    client = Client()
    assert await client.ask(asgi.wrap(app)) == "not None"
    assert calls == [client.scope]


@pytest.mark.parametrize("broken", ["record_event", "close", "attach"])
async def test_instrumentation_errors_are_logged_once_and_end_with_their_request(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("canary")

    app = asgi.wrap(sending(START, chunk(b"a"), chunk(b"b"), LAST))
    clients = [Client() for _ in range(3)]
    with monkeypatch.context() as context, caplog.at_level(logging.ERROR):
        context.setattr(request_span.RequestSpan, broken, fail)
        for client in clients:
            await client.ask(app)
    assert all(client.sent == [START, chunk(b"a"), chunk(b"b"), LAST] for client in clients)
    assert (
        len([record for record in caplog.records if record.name == "otel_infer.instrumentation.hooks.probe"])
        == 1
    )
    assert "canary" not in caplog.text
    before = len(watched.requests)
    await Client().ask(app)
    assert len(watched.requests) == before + 1


async def test_failing_finish_does_not_leave_requests_open(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, a custom route whose path cannot be read."""

    def fail(*_: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(exchange, "encode_method_and_route", fail)
    client = Client()
    await client.ask(asgi.wrap(sending(START, LAST)))
    assert client.sent == [START, LAST]
    assert watched.one.ended.outcome == events.ABORTED


async def test_malformed_message_is_left_to_the_server(watched: Watched) -> None:
    class Strict(Client):
        async def send(self, message: Message) -> None:
            raise TypeError("what is this?")

    with pytest.raises(TypeError, match="what is this"):
        await Strict().ask(asgi.wrap(sending({"no": "type"})))


@pytest.mark.parametrize("message", [{"type": "http.response.start", "status": None}, {}, None, "text"])
async def test_malformed_message_does_not_affect_the_next_request(watched: Watched, message: Any) -> None:
    malformed: list[Any] = [message]

    class Strict(Client):
        async def send(self, message: Message) -> None:
            if message in malformed:
                raise TypeError("what is this?")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        with contextlib.suppress(TypeError):
            await send(malformed.pop() if malformed else START)
        for valid in (START, LAST):
            await send(valid)

    front = asgi.wrap(app)
    for _ in range(2):
        await Strict().ask(front)
    assert len(watched.requests) == 2
    assert watched.requests[-1].verdict == (events.OK, "", 200)


async def test_removed_hook_only_calls_the_application(watched: Watched) -> None:
    hook = Hook("test")
    app = asgi._make_entry_point(sending(START, LAST), hook)
    hook.alive = False
    await Client().ask(app)
    assert watched.requests == []


# ── parent span ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_request_is_a_child_of_the_header_span(watched: Watched) -> None:
    carried: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        carried.append(baggage.get_baggage("tenant"))

    await run_request(app, Client(headers=[TRACEPARENT, (b"baggage", b"tenant=a"), (b"baggage", b"tier=b")]))
    seen = watched.one
    assert seen.arrived.trace_id.hex() == TRACE_ID
    assert seen.arrived.parent_span_id.hex() == SPAN_ID
    assert seen.arrived.flags & events.REMOTE_PARENT and seen.arrived.flags & events.OWN_SERVER_SPAN
    assert carried == ["a"]


@pytest.mark.parametrize("headers", [[], [(b"traceparent", b"nonsense")], [TRACEPARENT, TRACEPARENT]])
async def test_headers_without_a_parent_start_a_trace(watched: Watched, headers: Any) -> None:
    await run_request(sending(START, LAST), Client(headers=headers))
    assert watched.one.arrived.trace_id.hex() != TRACE_ID
    assert not any(watched.one.arrived.parent_span_id)


@pytest.mark.parametrize(("headers", "parent"), [([], "0" * 16), ([TRACEPARENT], SPAN_ID)])
async def test_span_current_around_the_server_is_no_parent(
    watched: Watched, headers: Any, parent: str
) -> None:
    with TracerProvider().get_tracer("test").start_as_current_span("main"):
        await run_request(sending(START, LAST), Client(headers=headers))
    assert watched.one.arrived.parent_span_id.hex() == parent
    assert watched.one.arrived.flags & events.OWN_SERVER_SPAN


hexadecimal = st.text("0123456789abcdef", min_size=2, max_size=2)
traceparents = st.one_of(
    st.builds("00-{}-{}-{}".format, *(st.sampled_from(ids) for ids in PARTS[:2]), hexadecimal),
    st.builds(
        "{}-{}-{}-{}".format,
        hexadecimal,
        *(st.sampled_from(ids) for ids in PARTS),
    ),
    # Correct length, with dashes at expected and unexpected positions.
    st.builds("00-{}-{}-{}".format, *(st.text("4f-", min_size=size, max_size=size) for size in (32, 16, 2))),
    st.text(max_size=60),
)


def open_context(headers: Any) -> otel_context.Context:
    """Returns the context in which a request with these headers is opened."""
    caller = parent_context.parse_remote_parent(headers)
    if caller is None:
        return parent_context.extract_context(headers, otel_context.Context())
    span = trace.NonRecordingSpan(span_ids.to_span_context(caller) or trace.INVALID_SPAN_CONTEXT)
    return trace.set_span_in_context(span, otel_context.Context())


@given(traceparent=traceparents, other=st.sampled_from((None, (b"tracestate", b"a=b"), (b"baggage", b"a=b"))))
def test_parsed_caller_equals_the_propagated_context(traceparent: str, other: Any) -> None:
    headers = [(b"x-other", b"1"), (b"traceparent", traceparent.encode("latin-1", "replace"))]
    headers += [other] if other else []
    carrier = {name.decode(): value.decode("latin-1") for name, value in headers}
    parsed, extracted = open_context(headers), propagate.extract(carrier, otel_context.Context())
    spans = [trace.get_current_span(context).get_span_context() for context in (parsed, extracted)]
    assert spans[0] == spans[1]
    assert baggage.get_all(parsed) == baggage.get_all(extracted)


def test_caller_ids_with_dashes_are_invalid() -> None:
    traceparent = b"00-4bf92f3577b34da6a3ce929d0e0e4-3--00f067aa0ba902b7-01"
    assert (
        not trace.get_current_span(open_context([(b"traceparent", traceparent)])).get_span_context().is_valid
    )


def test_default_propagators_use_the_fast_header_parser() -> None:
    """Other propagators must be called for each request; the default header is parsed directly."""
    assert parent_context.parse_remote_parent([TRACEPARENT]) == bytes.fromhex(f"00{TRACE_ID}{SPAN_ID}01")
    assert parent_context.parse_remote_parent([]) is span_ids.NO_REMOTE_PARENT


@pytest.mark.parametrize(
    "propagator",
    [CompositePropagator([W3CBaggagePropagator()]), CompositePropagator([]), IgnoringPropagator()],
)
def test_custom_propagators_replace_the_fast_header_parser(propagator: Any) -> None:
    before = propagate.get_global_textmap()
    propagate.set_global_textmap(propagator)
    try:
        context = open_context([TRACEPARENT])
    finally:
        propagate.set_global_textmap(before)
    assert trace.get_current_span(context).get_span_context() == trace.INVALID_SPAN_CONTEXT


class Breaking(TraceContextTextMapPropagator):
    """A propagator that raises on invalid headers."""

    def extract(self, *_: Any, **__: Any) -> otel_context.Context:
        raise ValueError("SECRET")


async def test_failing_propagator_loses_only_the_parent(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    before = propagate.get_global_textmap()
    propagate.set_global_textmap(CompositePropagator([Breaking()]))
    try:
        for _ in range(2):
            await run_request(sending(START, LAST), Client(headers=[TRACEPARENT]))
    finally:
        propagate.set_global_textmap(before)
    assert [seen.arrived.trace_id.hex() == TRACE_ID for seen in watched.requests] == [False, False]
    assert [record.message.count("ValueError") for record in caplog.records] == [1]
    assert "SECRET" not in caplog.text


async def test_existing_context_values_are_kept(watched: Watched) -> None:
    key = otel_context.create_key("library")
    kept: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        kept.append(otel_context.get_value(key))

    token = otel_context.attach(otel_context.set_value(key, "kept"))
    await run_request(app, Client(headers=[TRACEPARENT]))
    otel_context.detach(token)
    assert kept == ["kept"]


async def test_request_is_current_in_tasks_and_threads(watched: Watched) -> None:
    found: list[Any] = []
    threads: list[int] = []

    async def find_request() -> None:
        found.append(ingress.current_request())

    def find_request_from_thread() -> None:
        threads.append(threading.get_ident())
        found.append(ingress.current_request())

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await find_request()
        await asyncio.create_task(find_request())
        await asyncio.to_thread(find_request_from_thread)
        found.append(trace.get_current_span())

    before = otel_context.get_current()
    await run_request(app)
    assert threads != [threading.get_ident()]
    assert found[0] is not None and all(request is found[0] for request in found)
    assert otel_context.get_current() == before


@pytest.mark.parametrize("ending", [asyncio.CancelledError(), ValueError()])
async def test_context_is_restored_after_a_failure(watched: Watched, ending: BaseException) -> None:
    before = otel_context.get_current()
    await run_request(raising(ending))
    assert otel_context.get_current() == before


async def test_concurrent_requests_keep_separate_records(watched: Watched) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.001 * scope["number"])
        request = ingress.current_request()
        assert request is not None
        request.record_attribute("number", scope["number"])
        await send(START)
        await send(chunk(b"x" * scope["number"], more=False))

    async def run_numbered(number: int) -> None:
        await Client(number=number).ask(wrapped)

    wrapped = asgi.wrap(app)
    await asyncio.gather(*(run_numbered(number) for number in range(1, 20)))
    assert sorted(seen.attributes["number"] for seen in watched.requests) == list(range(1, 20))
    assert all(seen.verdict == (events.OK, "", 200) for seen in watched.requests)


# ── response headers ─────────────────────────────────────────────────────────────────────────────────────────────

TIMING = re.compile(rb'infer;dur=(\d+\.\d{3});desc="arrival to response start"')


@pytest.fixture
def with_response_headers(watched: Watched) -> Watched:
    asgi.configure_asgi("", add_headers=True)
    return watched


def sent_headers(client: Client) -> list[tuple[bytes, bytes]]:
    return list(client.sent[0]["headers"])


def starting(*headers: tuple[bytes, bytes]) -> Message:
    return {**START, "headers": list(headers)}


async def test_no_response_headers_by_default(watched: Watched) -> None:
    client = Client(headers=[TRACEPARENT])
    await run_request(sending(START, chunk(b"a"), LAST), client)
    assert client.sent[0] is START


async def test_response_headers_carry_trace_context_and_duration(
    with_response_headers: Watched,
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.02)
        await sending(starting((b"content-type", b"text/plain")), chunk(b"a"), LAST)(scope, receive, send)

    client, before = Client(headers=[TRACEPARENT]), _clock.now()
    await run_request(app, client)
    after = _clock.now()
    (kind, context, timing) = sent_headers(client)
    server = with_response_headers.one.arrived.server_span_id.hex()
    assert kind == (b"content-type", b"text/plain")
    assert context == (b"traceresponse", f"00-{TRACE_ID}-{server}-01".encode())
    assert timing[0] == b"server-timing"
    spent = TIMING.fullmatch(timing[1])
    assert spent is not None
    assert 20 <= float(spent[1]) <= (after - before) / 1e6
    assert client.sent[1:] == [chunk(b"a"), LAST]
    assert with_response_headers.one.verdict == (events.OK, "", 200)


async def test_traceresponse_names_the_request_under_another_server_span(
    with_response_headers: Watched,
) -> None:
    client = Client()
    seen = exchange.Exchange(client.scope, client.receive, client.send, Hook("test"), None)
    with TracerProvider().get_tracer("test").start_as_current_span("other") as span:
        seen.tokens = seen.open_request(ambient=True)
        await sending(START, LAST)(client.scope, seen.receive, seen.send)
        seen.end(None)
    trace_id, request = (
        f"{span.get_span_context().trace_id:032x}",
        with_response_headers.one.arrived.span_id.hex(),
    )
    assert dict(sent_headers(client))[b"traceresponse"].decode() == f"00-{trace_id}-{request}-01"


async def test_traceresponse_of_an_unsampled_request_is_unsampled(
    with_response_headers: Watched,
) -> None:
    client = Client(headers=[(b"traceparent", f"00-{TRACE_ID}-{SPAN_ID}-00".encode())])
    await run_request(sending(START, LAST), client)
    assert dict(sent_headers(client))[b"traceresponse"].endswith(b"-00")


async def test_existing_response_headers_are_kept_and_extended(
    with_response_headers: Watched,
) -> None:
    message = starting(
        (b"TraceResponse", b"existing"), (b"x", b"1"), (b"Server-Timing", b'db;dur=3, q;desc="a,b"')
    )
    client = Client()
    await run_request(sending(message, LAST), client)
    context, other, timing = sent_headers(client)
    assert (context, other) == ((b"TraceResponse", b"existing"), (b"x", b"1"))
    assert timing[0] == b"Server-Timing"
    kept, _, added = timing[1].rpartition(b", ")
    assert kept == b'db;dur=3, q;desc="a,b"'
    assert TIMING.fullmatch(added)


async def test_shared_start_message_is_not_modified(with_response_headers: Watched) -> None:
    message, clients = starting((b"server-timing", b"db")), [Client() for _ in range(3)]
    for client in clients:
        await run_request(sending(message, LAST), client)
    assert message == starting((b"server-timing", b"db"))
    assert len({dict(sent_headers(client))[b"traceresponse"] for client in clients}) == 3


@pytest.mark.parametrize("client", [Client(method="GET"), Client(type="websocket")])
async def test_unrecorded_requests_get_no_response_headers(
    with_response_headers: Watched, client: Client
) -> None:
    await run_request(sending(START, LAST), client)
    assert client.sent[0] is START


async def test_response_without_headers_gets_both(with_response_headers: Watched) -> None:
    client = Client()
    await run_request(sending({"type": "http.response.start", "status": 204}, LAST), client)
    assert [name for name, _ in sent_headers(client)] == [b"traceresponse", b"server-timing"]


async def test_failing_response_headers_leave_the_response_unchanged(
    with_response_headers: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("canary")

    monkeypatch.setattr(response_headers, "add_headers", fail)
    client = Client()
    assert await run_request(sending(START, chunk(b"a"), LAST), client) is None
    assert client.sent == [START, chunk(b"a"), LAST]
    assert (
        len([record for record in caplog.records if record.name == "otel_infer.instrumentation.hooks.probe"])
        == 1
    )
    assert "canary" not in caplog.text


# ── tenant and traffic class ─────────────────────────────────────────────────────────────────────────────────────

CALLER_HEADERS = (
    (b"X-Tenant", b" canary-tenant "),
    (b"baggage", b"tenant=canary-baggage,other=canary-other"),
)


def configure_caller(tenant: str = "", key: str = "", traffic: str = "") -> None:
    caller_module.caller_settings = tenancy.parse_caller_settings(tenant, key, traffic)


async def test_no_tenant_or_traffic_class_by_default(watched: Watched) -> None:
    await run_request(sending(START, LAST), Client(headers=CALLER_HEADERS))
    assert not {semconv.TENANT, semconv.TRAFFIC_CLASS} & watched.one.attributes.keys()
    assert b"canary" not in watched.bytes + repr(watched.one.said).encode()


@pytest.mark.parametrize(
    ("tenant", "expected"), [("header:x-TENANT", "canary-tenant"), ("baggage:tenant", "canary-baggage")]
)
async def test_tenant_is_read_from_the_configured_source(
    watched: Watched, tenant: str, expected: str
) -> None:
    configure_caller(tenant)
    await run_request(sending(START, LAST), Client(headers=CALLER_HEADERS))
    assert watched.one.attributes[semconv.TENANT] == expected
    assert repr(watched.one.said).count("canary") == 1


@pytest.mark.parametrize("tenant", ["header:x-tenant", "baggage:tenant"])
async def test_tenant_key_records_only_a_hash(watched: Watched, tenant: str) -> None:
    configure_caller(tenant, "secret")
    await run_request(sending(START, LAST), Client(headers=CALLER_HEADERS))
    assert re.fullmatch("[0-9a-f]{16}", str(watched.one.attributes[semconv.TENANT]))
    recorded_data = watched.bytes + repr(watched.one.said).encode()  # text may be split in a ring
    assert b"canary" not in recorded_data and b"secret" not in recorded_data


@pytest.mark.parametrize("tenant", ["header:x-tenant", "baggage:tenant", "lora"])
async def test_blank_or_missing_tenant_is_not_recorded(watched: Watched, tenant: str) -> None:
    configure_caller(tenant, "secret")
    await run_request(sending(START, LAST), Client(headers=[(b"x-tenant", b" "), (b"baggage", b"tenant= ")]))
    assert semconv.TENANT not in watched.one.attributes


async def test_tenant_is_decoded_and_truncated(watched: Watched) -> None:
    configure_caller("header:x-tenant")
    await run_request(sending(START, LAST), Client(headers=[(b"x-tenant", b"\xff" + b"a" * 60_000)]))
    assert watched.one.attributes[semconv.TENANT] == "\ufffd" + "a" * 63


async def test_baggage_leaked_from_an_earlier_request_is_ignored(watched: Watched) -> None:
    """asyncio may leak the context of a request into the next request on its connection."""
    configure_caller("baggage:tenant")
    await run_request(sending(START, LAST), Client(headers=CALLER_HEADERS))
    leaked = trace.set_span_in_context(
        request_span.RequestSpan(_create_span_ids(), 0, 0, "asgi", otel_context.get_current())
    )
    token = otel_context.attach(baggage.set_baggage("tenant", "of another", leaked))
    try:
        await run_request(sending(START, LAST), Client(headers=[TRACEPARENT]))
    finally:
        otel_context.detach(token)
    assert [seen.attributes.get(semconv.TENANT) for seen in watched.requests] == ["canary-baggage", None]


def _create_span_ids() -> span_ids.SpanIds:
    assert request_span.span_factory is not None
    return request_span.span_factory.create_span(
        "POST", otel_context.get_current(), trace.INVALID_SPAN_CONTEXT, False, 0
    )


@pytest.mark.parametrize(
    ("headers", "path", "expected"),
    [
        ((), "/v1/chat", "interactive"),
        ((), "/v1/batches/7", "batch"),
        ([(b"x-class", b"batch")], "/v1/chat", "batch"),
        ([(b"x-class", b"canary")], "/v1/batches", "interactive"),
    ],
)
async def test_traffic_class_is_interactive_or_batch(
    watched: Watched, headers: Any, path: str, expected: str
) -> None:
    configure_caller(traffic="header:X-Class,route:/v1/batches=batch")
    await run_request(sending(START, LAST), Client(headers=headers, path=path))
    assert watched.one.attributes[semconv.TRAFFIC_CLASS] == expected
    assert b"canary" not in watched.bytes + repr(watched.one.said).encode()


class ConstantIdGenerator(RandomIdGenerator):
    """A custom generator with constant ids."""

    def generate_span_id(self) -> int:
        return 7

    def generate_trace_id(self) -> int:
        return 9


@pytest.mark.parametrize(("headers", "trace_id"), [([], f"{9:032x}"), ([TRACEPARENT], TRACE_ID)])
async def test_custom_id_generator_creates_every_id(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, headers: Any, trace_id: str
) -> None:
    opener = span_ids.SdkSpanFactory(ParentBased(ALWAYS_ON), ConstantIdGenerator(), span_ids.Limits())
    monkeypatch.setattr(request_span, "span_factory", opener)
    await run_request(sending(START, LAST), Client(headers=headers))
    arrived = watched.one.arrived
    assert arrived.trace_id.hex() == trace_id
    assert {arrived.span_id.hex(), arrived.server_span_id.hex()} == {f"{7:016x}"}


@pytest.mark.parametrize("headers", [[], [TRACEPARENT]])
async def test_custom_sampler_decides_every_request(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, headers: Any
) -> None:
    opener = span_ids.SdkSpanFactory(StaticSampler(Decision.DROP), RandomIdGenerator(), span_ids.Limits())
    monkeypatch.setattr(request_span, "span_factory", opener)
    await run_request(sending(START, LAST), Client(headers=headers))
    assert not watched.one.arrived.flags & events.SAMPLED


@pytest.mark.parametrize("headers", [[], [TRACEPARENT]])
async def test_current_spans_have_the_recorded_ids(watched: Watched, headers: Any) -> None:
    contexts: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = ingress.current_request()
        assert request is not None and request.server is not None
        contexts.extend((trace.get_current_span().get_span_context(), request.server))

    await run_request(app, Client(headers=headers))
    arrived = watched.one.arrived
    assert [context.trace_id.to_bytes(16, "big") for context in contexts] == [arrived.trace_id] * 2
    assert [context.span_id.to_bytes(8, "big") for context in contexts] == [
        arrived.span_id,
        arrived.server_span_id,
    ]
    assert all(context.trace_flags.sampled and not context.is_remote for context in contexts)


@pytest.mark.parametrize("body", [[chunk(b"a", more=False)], [chunk(b""), chunk(b"a", more=False)]])
async def test_single_chunk_response_starts_before_the_send_completes(
    watched: Watched, body: list[Message]
) -> None:
    began: list[int] = []

    class Slow(Client):
        async def send(self, message: Message) -> None:
            began.append(_clock.now())
            await asyncio.sleep(0.002)

    await Slow().ask(asgi.wrap(sending(START, *body)))
    (started,) = watched.one.every(events.ResponseStarted)
    assert began[-2] < started.at <= began[-1]
    assert watched.one.ended.at - started.at >= 1_000_000


# ── a scope that goes to another process ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_a_pickled_scope_is_recorded_only_here(watched: Watched, method: str) -> None:
    async def hand_over(scope: Any, receive: Any, send: Any) -> None:
        there = pickle.loads(pickle.dumps(scope))
        await asgi.wrap(sending(START, LAST))(there, receive, send)

    client = Client(method=method)
    await client.ask(asgi.wrap(hand_over))
    assert client.sent == [START, LAST]
    assert len(watched.requests) == (method == "POST")
