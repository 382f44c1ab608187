"""HTTP requests as a server without a network sees them: hand-written applications, every way to end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
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
from otel_infer.instrumentation.asgi import exchange, parent_context, response_headers
from otel_infer.instrumentation.asgi.outcome import TIMEOUT
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.ringbuffer import events, writer
from otel_infer.ringbuffer.reader import RequestReader
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import caller as asking
from otel_infer.tracing import request_span, span_ids
from otel_infer.tracing import start as ingress

Message = dict[str, Any]
START: Message = {"type": "http.response.start", "status": 200, "headers": []}
LAST: Message = {"type": "http.response.body", "body": b"", "more_body": False}
DISCONNECT: Message = {"type": "http.disconnect"}
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = (b"traceparent", f"00-{TRACE_ID}-{SPAN_ID}-01".encode())
PARTS = (TRACE_ID, "0" * 32, "A" * 32), (SPAN_ID, "0" * 16, SPAN_ID[1:]), ("01", "00", "01-more", "1")


class Own(TraceContextTextMapPropagator):
    """Somebody's own, that believes no caller."""

    def extract(self, carrier: Any, context: Any = None, getter: Any = None) -> Any:
        return context


def chunk(body: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def start(status: int) -> Message:
    return {**START, "status": status}


class Seen:
    """One request, as its facts tell it."""

    def __init__(self, said: list[Any]) -> None:
        self.said = said
        self.arrived: events.RequestArrived = self.every(events.RequestArrived)[0]
        self.attributes = {fact.key: fact.value for fact in self.every(events.AttributeSet)}
        keys = (semconv.HTTP_REQUEST_METHOD, semconv.URL_SCHEME, semconv.HTTP_ROUTE)
        for described in self.every(events.HttpDescribed):
            self.attributes.update((key, value) for key, value in zip(keys, described[1:]) if value)

    def every(self, kind: type) -> list[Any]:
        return [fact for fact in self.said if type(fact) is kind]

    @property
    def ended(self) -> events.RequestEnded:
        (ended,) = self.every(events.RequestEnded)
        return ended

    @property
    def verdict(self) -> tuple[int, str, int]:
        return self.ended.outcome, self.ended.error_type, self.ended.status_code


class Watched:
    """What was said of requests in this process."""

    def __init__(self, arena: writer.MemoryArena) -> None:
        self.arena = arena
        self._reader: RequestReader | None = None
        self._by_handle: dict[int, list[Any]] = {}

    @property
    def requests(self) -> list[Seen]:
        if self._reader is None and self.arena.buffers:
            self._reader = RequestReader(self.arena.buffers[0][1], 1)
        for said in self._reader.poll(_clock.now(), final=True) if self._reader else ():
            if said.handle:
                self._by_handle.setdefault(said.handle, []).append(said.event)
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
    arena = writer.MemoryArena()
    opener = span_ids.SdkSpanFactory(ParentBased(ALWAYS_ON), RandomIdGenerator(), span_ids.Limits())
    monkeypatch.setattr(request_span, "span_factory", opener)
    recorder.start(lambda: arena, lambda: None, lambda reason: None)
    yield Watched(arena)
    recorder.stop()
    asgi.configure_asgi("")
    asking.caller_settings = tenancy.NO_CALLER_SETTINGS


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
    """Drops what it is given once the client has left, and says so to those who ask `receive`."""

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


async def asked(app: Any, client: Client | None = None) -> BaseException | None:
    """Runs one request; returns what left the application."""
    try:
        await (client or Client()).ask(asgi.wrap(app))
    except BaseException as exc:
        return exc
    return None


# ── what is watched ──────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_request_lasts_from_its_arrival_to_its_last_byte(watched: Watched) -> None:
    client = Client()
    before = _clock.now()
    await asked(sending(START, chunk(b"a"), chunk(b"b", more=False)), client)
    after = _clock.now()
    seen = watched.one
    assert before <= seen.arrived.at <= seen.ended.at <= after
    assert seen.verdict == (events.OK, "", 200)
    assert seen.ended.chunks == 2
    assert seen.arrived.flags & events.OWN_SERVER_SPAN
    assert client.sent == [START, chunk(b"a"), chunk(b"b", more=False)]
    assert asgi.SCOPE_KEY not in client.scope


@pytest.mark.parametrize(
    "scope",
    [
        {"method": "GET"},
        {"method": "HEAD"},
        {"method": "OPTIONS"},
        {"method": "DELETE"},
        {"type": "websocket"},
    ],
    ids=lambda scope: next(iter(scope.values())),
)
async def test_what_asks_for_no_inference_is_passed_through(watched: Watched, scope: Message) -> None:
    client = Client(**scope)
    given: list[Any] = []

    async def app(*args: Any) -> str:
        given.extend(args)
        return "whatever"

    assert await client.ask(asgi.wrap(app)) == "whatever"
    assert given == [client.scope, client.receive, client.send]
    assert watched.requests == []


@pytest.mark.parametrize("scope", [{"method": "GET"}, {"type": "websocket"}])
async def test_what_is_passed_through_may_be_a_request_by_hand(watched: Watched, scope: Message) -> None:
    async def app(*args: Any) -> None:
        with otel_infer.stage("before"):
            pass
        with otel_infer.request("search"), otel_infer.stage("rerank"):
            pass

    await Client(**scope).ask(asgi.wrap(app))
    assert [stage.stage for stage in watched.one.every(events.StageEnded)] == ["rerank"]


async def test_nothing_is_watched_while_nothing_records(watched: Watched) -> None:
    recorder.stop()
    client = Client()
    await asked(sending(START, LAST), client)
    assert client.sent == [START, LAST]
    assert watched.requests == []


@pytest.mark.parametrize("pattern", ["/v1/chat", "health, chat$", r"https?://inference\.example"])
async def test_excluded_urls_are_passed_through(watched: Watched, pattern: str) -> None:
    asgi.configure_asgi(pattern)
    await asked(asgi.wrap(sending(START, LAST)), Client(headers=[(b"host", b"inference.example")]))
    assert watched.requests == []


@pytest.mark.parametrize("pattern", ["", ",", "/v2", "user=someone"])
async def test_a_url_is_excluded_by_what_is_found_in_it_but_for_its_query(
    watched: Watched, pattern: str
) -> None:
    asgi.configure_asgi(pattern)
    await asked(sending(START, LAST))
    assert len(watched.requests) == 1


async def test_an_excluded_url_that_is_no_pattern_is_ignored_and_named(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    asgi.configure_asgi("([, chat")
    await asked(sending(START, LAST))
    assert watched.requests == []
    assert "'(['" in caplog.text


async def test_one_request_is_one_request_however_many_wrappers(watched: Watched) -> None:
    app = sending(START, chunk(b"a"), LAST)
    await asked(asgi.wrap(asgi.wrap(app)))
    assert watched.one.ended.chunks == 1


async def test_an_unknown_method_is_not_told(watched: Watched) -> None:
    await asked(sending(START, LAST), Client(method="BREW"))
    assert watched.one.arrived.name == events.OTHER
    assert watched.one.attributes["http.request.method"] == events.OTHER
    assert b"BREW" not in watched.bytes


async def test_what_is_said_of_a_request_is_method_and_scheme_and_nothing_of_its_client(
    watched: Watched,
) -> None:
    client = Client(headers=[(b"authorization", b"canary")], path="/v1/canary", client=("203.0.113.7", 1))
    await asked(sending(START, LAST), client)
    assert watched.one.attributes == {"http.request.method": "POST", "url.scheme": "http"}
    assert watched.one.arrived.name == "POST"
    for outside in (b"canary", b"someone", b"203.0.113.7"):
        assert outside not in watched.bytes


def test_every_name_and_error_type_is_in_the_conventions() -> None:
    assert semconv.HTTP_REQUEST_METHOD == "http.request.method"
    assert semconv.URL_SCHEME == "url.scheme"
    assert semconv.HTTP_ROUTE == "http.route"
    assert exchange.CLIENT_DISCONNECT == semconv.ERROR_CLIENT_DISCONNECT
    assert TIMEOUT == semconv.ERROR_TIMEOUT
    assert exchange.CANCELLED == semconv.ERROR_CANCELLED


# ── first byte, first token, backpressure ────────────────────────────────────────────────────────────────────────


async def test_the_response_starts_just_before_its_first_byte_is_handed_over(watched: Watched) -> None:
    handed: list[int] = []

    class Slow(Client):
        async def send(self, message: Message) -> None:
            handed.append(_clock.now())
            await asyncio.sleep(0.01)

    await asked(sending(START, chunk(b""), chunk(b"a"), chunk(b"b"), LAST), Slow())
    (started,) = watched.one.every(events.ResponseStarted)
    assert 0 <= handed[2] - started.at < 5_000_000


async def test_the_first_token_is_sent_with_the_first_chunk_after_it_was_reached(watched: Watched) -> None:
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

    await asked(app)
    (sent,) = watched.one.every(events.FirstTokenSent)
    assert instants[0] <= sent.at <= instants[1]
    assert len(watched.one.every(events.ResponseStarted)) == 1
    assert watched.one.ended.chunks == 3


async def test_no_first_token_is_sent_where_nobody_speaks_of_tokens(watched: Watched) -> None:
    await asked(sending(START, chunk(b"a"), chunk(b"b"), LAST))
    assert watched.one.every(events.FirstTokenSent) == []


async def test_a_client_that_does_not_read_shows_as_send_wait(watched: Watched) -> None:
    class Stuck(Client):
        async def send(self, message: Message) -> None:
            await asyncio.sleep(0.02)

    await asked(sending(START, chunk(b"a"), chunk(b"b"), LAST), Stuck())
    assert 60e6 <= watched.one.ended.send_wait_ns < 80e6


async def test_the_wait_for_a_client_that_then_leaves_is_counted(watched: Watched) -> None:
    class Leaving(Client):
        async def send(self, message: Message) -> None:
            if message["type"] == "http.response.body":
                await asyncio.sleep(0.02)
                raise BrokenPipeError

    await asked(sending(START, chunk(b"a")), Leaving())
    assert watched.one.ended.send_wait_ns >= 20e6


async def test_what_is_done_after_the_last_byte_is_no_part_of_the_request(watched: Watched) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await send(chunk(b"a", more=False))
        assert ingress.current_request() is None
        await asyncio.sleep(0.02)
        assert await receive() != DISCONNECT
        assert await receive() == DISCONNECT
        raise ValueError("in a background task")

    assert isinstance(await asked(app), ValueError)
    assert watched.one.verdict == (events.OK, "", 200)
    assert watched.one.ended.at - watched.one.arrived.at < 20_000_000


# ── how it ends ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("status", "outcome", "error_type"),
    [(404, events.OK, ""), (429, events.OK, ""), (503, events.ERROR, "503")],
)
async def test_an_error_is_the_servers_from_500_on(
    watched: Watched, status: int, outcome: int, error_type: str
) -> None:
    await asked(sending(start(status), chunk(b"no", more=False)))
    assert watched.one.verdict == (outcome, error_type, status)


async def test_an_exception_before_the_response_is_a_500_by_its_type(watched: Watched) -> None:
    failure = ValueError("canary prompt")
    assert await asked(raising(failure)) is failure
    assert failure.__context__ is None and failure.__cause__ is None
    assert watched.one.verdict == (events.ERROR, "ValueError", 500)
    assert b"canary" not in watched.bytes


async def test_an_exception_in_mid_stream_keeps_the_status_that_was_sent(watched: Watched) -> None:
    failure = ValueError()
    assert await asked(raising(failure, START, chunk(b"a"))) is failure
    assert watched.one.verdict == (events.ERROR, "ValueError", 200)


async def test_an_exception_that_middleware_answered_with_500_is_told_by_its_type(watched: Watched) -> None:
    failure = ZeroDivisionError()
    instants: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(start(500))
        await send(chunk(b"oops", more=False))
        instants.append(_clock.now())
        await asyncio.sleep(0.01)
        raise failure

    assert await asked(app) is failure
    assert watched.one.verdict == (events.ERROR, "ZeroDivisionError", 500)
    assert watched.one.ended.at <= instants[0]


@pytest.mark.parametrize("failure", [TimeoutError(), asyncio.TimeoutError()])
async def test_a_timeout_is_an_abort(watched: Watched, failure: BaseException) -> None:
    assert await asked(raising(failure)) is failure
    assert watched.one.verdict == (events.ABORTED, "timeout", 500)


async def test_a_failure_is_told_as_itself_when_a_task_group_wraps_it(watched: Watched) -> None:
    class Group(Exception):
        def __init__(self, *inner: BaseException) -> None:
            self.exceptions = inner

    await asked(raising(Group(Group(KeyError())), START))
    assert watched.one.verdict == (events.ERROR, "KeyError", 200)


async def test_a_cancelled_request_is_aborted(watched: Watched) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        await asyncio.Event().wait()

    task = asyncio.create_task(Client().ask(asgi.wrap(app)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert watched.one.verdict == (events.ABORTED, "client_disconnect", 200)


async def test_a_server_that_would_say_so_has_not_lost_the_client_whose_request_it_cancels(
    watched: Watched,
) -> None:
    await asked(raising(asyncio.CancelledError()), Uvicorn())
    assert watched.one.verdict == (events.ABORTED, "cancelled", 0)


async def test_a_client_that_leaves_before_its_body_is_complete_is_an_abort(watched: Watched) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        await send(start(400))
        await send(LAST)

    part: Message = {"type": "http.request", "body": b"{", "more_body": True}
    await asked(app, Client(part))
    assert watched.one.verdict == (events.ABORTED, "client_disconnect", 0)


async def test_a_stream_closed_early_is_aborted_even_if_the_application_swallows_it(watched: Watched) -> None:
    left: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(START)
        await send(chunk(b"a"))
        await receive()
        left.append(_clock.now())
        await asyncio.sleep(0.01)
        await send(chunk(b"b", more=False))

    await asked(app)
    assert watched.one.verdict == (events.ABORTED, "client_disconnect", 200)
    assert watched.one.ended.at <= left[0]


@pytest.mark.parametrize("name", ["BrokenPipeError", "ClientDisconnect"])
async def test_a_send_that_fails_for_want_of_a_client_is_an_abort(watched: Watched, name: str) -> None:
    failure = BrokenPipeError() if name == "BrokenPipeError" else type(name, (Exception,), {})()

    class Gone(Client):
        async def send(self, message: Message) -> None:
            if message.get("body") == b"b":
                raise failure

    async def swallowing(scope: Any, receive: Any, send: Any) -> None:
        with contextlib.suppress(type(failure)):
            await sending(START, chunk(b"a"), chunk(b"b"), chunk(b"c"), LAST)(scope, receive, send)

    await asked(swallowing, Gone())
    assert watched.one.verdict == (events.ABORTED, "client_disconnect", 200)


async def test_a_client_that_leaves_unnoticed_by_the_application_is_an_abort(watched: Watched) -> None:
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

    await asked(app, client)
    assert watched.one.verdict == (events.ABORTED, "client_disconnect", 200)
    assert watched.one.ended.at <= left[0]
    assert watched.one.ended.chunks == 1


async def test_a_client_that_left_before_an_unstreamed_answer_is_an_abort(watched: Watched) -> None:
    client = Uvicorn()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        client.disconnected = True
        await send(START)
        await send(chunk(b"answer", more=False))

    await asked(app, client)
    assert watched.one.verdict == (events.ABORTED, "client_disconnect", 0)


@pytest.mark.parametrize(
    ("sent", "verdict"), [([], ("500", 500)), ([START, chunk(b"a")], (events.OTHER, 200))]
)
async def test_an_answer_that_is_not_finished_is_an_error(
    watched: Watched, sent: list[Message], verdict: tuple[str, int]
) -> None:
    await asked(sending(*sent))
    assert watched.one.verdict == (events.ERROR, *verdict)


async def test_a_client_that_leaves_while_the_last_byte_waits_for_it_is_an_abort(watched: Watched) -> None:
    class Leaving(Uvicorn):
        async def send(self, message: Message) -> None:
            await asyncio.sleep(0)
            self.disconnected = message is LAST

    await asked(sending(START, chunk(b"a"), LAST), Leaving())
    assert watched.one.verdict == (events.ABORTED, "client_disconnect", 200)


async def test_a_server_that_says_disconnect_when_all_is_sent_has_lost_nobody(watched: Watched) -> None:
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

    await asked(app, Finished())
    assert watched.one.verdict == (events.OK, "", 200)


async def test_an_application_that_says_that_its_client_left_is_believed(watched: Watched) -> None:
    await asked(raising(type("ClientDisconnect", (Exception,), {})()))
    assert watched.one.verdict == (events.ABORTED, "client_disconnect", 0)


async def test_a_file_that_the_server_sends_ends_the_request(watched: Watched) -> None:
    await asked(sending(START, {"type": "http.response.pathsend", "path": "/somewhere"}))
    assert watched.one.verdict == (events.OK, "", 200)


async def test_the_slot_of_a_request_is_free_again_however_it_ended(watched: Watched) -> None:
    for app in (sending(START, LAST), sending(), raising(ValueError()), raising(asyncio.CancelledError())):
        await asked(app)
    await asyncio.gather(*(asked(sending(START, LAST)) for _ in range(20)))
    assert len(watched.requests) == 24
    assert list(RequestReader(watched.arena.buffers[0][1], 2).read_live_requests()) == []


# ── the application notices nothing ──────────────────────────────────────────────────────────────────────────────


async def test_the_application_is_called_once_and_what_it_returns_comes_back(watched: Watched) -> None:
    calls: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> str:
        calls.append(scope)
        return "not None"

    client = Client()
    assert await client.ask(asgi.wrap(app)) == "not None"
    assert calls == [client.scope]


@pytest.mark.parametrize("broken", ["record_event", "close", "attach"])
async def test_code_of_ours_that_raises_is_logged_once_and_disabled(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("canary")

    monkeypatch.setattr(request_span.RequestSpan, broken, fail)
    app = asgi.wrap(sending(START, chunk(b"a"), chunk(b"b"), LAST))
    clients = [Client() for _ in range(3)]
    with caplog.at_level(logging.ERROR):
        for client in clients:
            await client.ask(app)
    assert all(client.sent == [START, chunk(b"a"), chunk(b"b"), LAST] for client in clients)
    assert (
        len([record for record in caplog.records if record.name == "otel_infer.instrumentation.hooks.probe"])
        == 1
    )
    assert "canary" not in caplog.text
    assert len(watched.requests) == 1


async def test_a_request_that_our_code_cannot_finish_is_not_in_flight_for_ever(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A route of the application's own, say, whose path cannot be read."""

    def fail(*_: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(exchange, "encode_method_and_route", fail)
    client = Client()
    await client.ask(asgi.wrap(sending(START, LAST)))
    assert client.sent == [START, LAST]
    assert watched.one.ended.outcome == events.ABORTED


async def test_messages_that_are_none_are_the_servers_business(watched: Watched) -> None:
    class Strict(Client):
        async def send(self, message: Message) -> None:
            raise TypeError("what is this?")

    with pytest.raises(TypeError, match="what is this"):
        await Strict().ask(asgi.wrap(sending({"no": "type"})))


@pytest.mark.parametrize("message", [{"type": "http.response.start", "status": None}, {}, None, "text"])
async def test_a_message_that_makes_no_sense_costs_its_own_request_alone(
    watched: Watched, message: Any
) -> None:
    told: list[Any] = [message]

    class Strict(Client):
        async def send(self, message: Message) -> None:
            if message in told:
                raise TypeError("what is this?")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        with contextlib.suppress(TypeError):
            await send(told.pop() if told else START)
        for one in (START, LAST):
            await send(one)

    front = asgi.wrap(app)
    for _ in range(2):
        await Strict().ask(front)
    assert len(watched.requests) == 2
    assert watched.requests[-1].verdict == (events.OK, "", 200)


async def test_an_application_that_is_no_longer_watched_is_only_called(watched: Watched) -> None:
    hook = Hook("test")
    app = asgi._wrap_app(sending(START, LAST), hook)
    hook.alive = False
    await Client().ask(app)
    assert watched.requests == []


# ── whose child it is ────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_request_is_the_child_of_the_span_in_its_headers(watched: Watched) -> None:
    carried: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        carried.append(baggage.get_baggage("tenant"))

    await asked(app, Client(headers=[TRACEPARENT, (b"baggage", b"tenant=a"), (b"baggage", b"tier=b")]))
    seen = watched.one
    assert seen.arrived.trace_id.hex() == TRACE_ID
    assert seen.arrived.parent_span_id.hex() == SPAN_ID
    assert seen.arrived.flags & events.REMOTE_PARENT and seen.arrived.flags & events.OWN_SERVER_SPAN
    assert carried == ["a"]


@pytest.mark.parametrize("headers", [[], [(b"traceparent", b"nonsense")], [TRACEPARENT, TRACEPARENT]])
async def test_headers_that_name_no_parent_begin_a_trace(watched: Watched, headers: Any) -> None:
    await asked(sending(START, LAST), Client(headers=headers))
    assert watched.one.arrived.trace_id.hex() != TRACE_ID
    assert not any(watched.one.arrived.parent_span_id)


@pytest.mark.parametrize(("headers", "parent"), [([], "0" * 16), ([TRACEPARENT], SPAN_ID)])
async def test_what_is_current_around_the_server_is_no_parent(
    watched: Watched, headers: Any, parent: str
) -> None:
    with TracerProvider().get_tracer("test").start_as_current_span("main"):
        await asked(sending(START, LAST), Client(headers=headers))
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
    # As long as they should be, with dashes where some are and elsewhere.
    st.builds("00-{}-{}-{}".format, *(st.text("4f-", min_size=size, max_size=size) for size in (32, 16, 2))),
    st.text(max_size=60),
)


def told_by(headers: Any) -> otel_context.Context:
    """What a request with these headers is opened in."""
    caller = parent_context.parse_caller(headers)
    if caller is None:
        return parent_context.extract_context(headers, otel_context.Context())
    span = trace.NonRecordingSpan(span_ids.caller_to_span_context(caller) or trace.INVALID_SPAN_CONTEXT)
    return trace.set_span_in_context(span, otel_context.Context())


@given(said=traceparents, beside=st.sampled_from((None, (b"tracestate", b"a=b"), (b"baggage", b"a=b"))))
def test_a_caller_is_who_the_propagators_say_however_the_headers_are_read(said: str, beside: Any) -> None:
    headers = [(b"x-other", b"1"), (b"traceparent", said.encode("latin-1", "replace"))]
    headers += [beside] if beside else []
    carrier = {name.decode(): value.decode("latin-1") for name, value in headers}
    told, extracted = told_by(headers), propagate.extract(carrier, otel_context.Context())
    spans = [trace.get_current_span(context).get_span_context() for context in (told, extracted)]
    assert spans[0] == spans[1]
    assert baggage.get_all(told) == baggage.get_all(extracted)


def test_a_caller_with_dashes_in_its_ids_is_nobody() -> None:
    said = b"00-4bf92f3577b34da6a3ce929d0e0e4-3--00f067aa0ba902b7-01"
    assert not trace.get_current_span(told_by([(b"traceparent", said)])).get_span_context().is_valid


def test_the_propagators_of_the_default_are_known_to_be_those_of_the_w3c() -> None:
    """Else each request asks them for what one expression tells."""
    assert parent_context.parse_caller([TRACEPARENT]) == bytes.fromhex(f"00{TRACE_ID}{SPAN_ID}01")
    assert parent_context.parse_caller([]) is span_ids.NO_CALLER


@pytest.mark.parametrize(
    "theirs", [CompositePropagator([W3CBaggagePropagator()]), CompositePropagator([]), Own()]
)
def test_other_propagators_are_asked_for_every_request(theirs: Any) -> None:
    before = propagate.get_global_textmap()
    propagate.set_global_textmap(theirs)
    try:
        told = told_by([TRACEPARENT])
    finally:
        propagate.set_global_textmap(before)
    assert trace.get_current_span(told).get_span_context() == trace.INVALID_SPAN_CONTEXT


class Breaking(TraceContextTextMapPropagator):
    """As one that reads a number where a client has written none."""

    def extract(self, *_: Any, **__: Any) -> otel_context.Context:
        raise ValueError("SECRET")


async def test_headers_that_a_propagator_breaks_on_cost_the_parent_and_nothing_else(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    before = propagate.get_global_textmap()
    propagate.set_global_textmap(CompositePropagator([Breaking()]))
    try:
        for _ in range(2):
            await asked(sending(START, LAST), Client(headers=[TRACEPARENT]))
    finally:
        propagate.set_global_textmap(before)
    assert [seen.arrived.trace_id.hex() == TRACE_ID for seen in watched.requests] == [False, False]
    assert [record.message.count("ValueError") for record in caplog.records] == [1]
    assert "SECRET" not in caplog.text


async def test_values_that_others_put_into_the_context_stay_there(watched: Watched) -> None:
    key = otel_context.create_key("theirs")
    kept: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        kept.append(otel_context.get_value(key))

    token = otel_context.attach(otel_context.set_value(key, "kept"))
    await asked(app, Client(headers=[TRACEPARENT]))
    otel_context.detach(token)
    assert kept == ["kept"]


async def test_the_request_is_current_in_the_application_its_tasks_and_its_threads(watched: Watched) -> None:
    found: list[Any] = []
    threads: list[int] = []

    async def look() -> None:
        found.append(ingress.current_request())

    def look_from_thread() -> None:
        threads.append(threading.get_ident())
        found.append(ingress.current_request())

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await look()
        await asyncio.create_task(look())
        await asyncio.to_thread(look_from_thread)
        found.append(trace.get_current_span())

    before = otel_context.get_current()
    await asked(app)
    assert threads != [threading.get_ident()]
    assert found[0] is not None and all(each is found[0] for each in found)
    assert otel_context.get_current() == before


@pytest.mark.parametrize("ending", [asyncio.CancelledError(), ValueError()])
async def test_nothing_stays_current_after_a_failure(watched: Watched, ending: BaseException) -> None:
    before = otel_context.get_current()
    await asked(raising(ending))
    assert otel_context.get_current() == before


async def test_requests_at_the_same_time_keep_to_themselves(watched: Watched) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.001 * scope["number"])
        request = ingress.current_request()
        assert request is not None
        request.record_attribute("number", scope["number"])
        await send(START)
        await send(chunk(b"x" * scope["number"], more=False))

    async def one(number: int) -> None:
        await Client(number=number).ask(wrapped)

    wrapped = asgi.wrap(app)
    await asyncio.gather(*(one(number) for number in range(1, 20)))
    assert sorted(seen.attributes["number"] for seen in watched.requests) == list(range(1, 20))
    assert all(seen.verdict == (events.OK, "", 200) for seen in watched.requests)


# ── what the client is told ──────────────────────────────────────────────────────────────────────────────────────

TIMING = re.compile(rb'infer;dur=(\d+\.\d{3});desc="arrival to response start"')


@pytest.fixture
def telling(watched: Watched) -> Watched:
    asgi.configure_asgi("", tell_client=True)
    return watched


def told(client: Client) -> list[tuple[bytes, bytes]]:
    return list(client.sent[0]["headers"])


def starting(*headers: tuple[bytes, bytes]) -> Message:
    return {**START, "headers": list(headers)}


async def test_a_client_is_told_nothing_unless_that_was_asked_for(watched: Watched) -> None:
    client = Client(headers=[TRACEPARENT])
    await asked(sending(START, chunk(b"a"), LAST), client)
    assert client.sent[0] is START


async def test_a_client_is_told_whose_span_it_was_and_how_long_the_response_took_to_start(
    telling: Watched,
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.02)
        await sending(starting((b"content-type", b"text/plain")), chunk(b"a"), LAST)(scope, receive, send)

    client, before = Client(headers=[TRACEPARENT]), _clock.now()
    await asked(app, client)
    after = _clock.now()
    (kind, context, timing) = told(client)
    server = telling.one.arrived.server_span_id.hex()
    assert kind == (b"content-type", b"text/plain")
    assert context == (b"traceresponse", f"00-{TRACE_ID}-{server}-01".encode())
    assert timing[0] == b"server-timing"
    spent = TIMING.fullmatch(timing[1])
    assert spent is not None
    assert 20 <= float(spent[1]) <= (after - before) / 1e6
    assert client.sent[1:] == [chunk(b"a"), LAST]
    assert telling.one.verdict == (events.OK, "", 200)


async def test_below_somebody_elses_server_span_the_client_is_told_of_the_request(telling: Watched) -> None:
    client = Client()
    seen = exchange.Exchange(client.scope, client.receive, client.send, Hook("test"), None)
    with TracerProvider().get_tracer("test").start_as_current_span("theirs") as span:
        seen.ambient = True
        with seen:
            await sending(START, LAST)(client.scope, seen.receive, seen.send)
    trace_id, request = f"{span.get_span_context().trace_id:032x}", telling.one.arrived.span_id.hex()
    assert dict(told(client))[b"traceresponse"].decode() == f"00-{trace_id}-{request}-01"


async def test_a_request_that_is_not_sampled_says_so(telling: Watched) -> None:
    client = Client(headers=[(b"traceparent", f"00-{TRACE_ID}-{SPAN_ID}-00".encode())])
    await asked(sending(START, LAST), client)
    assert dict(told(client))[b"traceresponse"].endswith(b"-00")


async def test_what_the_application_tells_is_neither_overwritten_nor_told_twice(telling: Watched) -> None:
    own = starting((b"TraceResponse", b"theirs"), (b"x", b"1"), (b"Server-Timing", b'db;dur=3, q;desc="a,b"'))
    client = Client()
    await asked(sending(own, LAST), client)
    context, other, timing = told(client)
    assert (context, other) == ((b"TraceResponse", b"theirs"), (b"x", b"1"))
    assert timing[0] == b"Server-Timing"
    kept, _, ours = timing[1].rpartition(b", ")
    assert kept == b'db;dur=3, q;desc="a,b"'
    assert TIMING.fullmatch(ours)


async def test_a_message_that_is_sent_for_every_request_stays_as_it_is(telling: Watched) -> None:
    own, clients = starting((b"server-timing", b"db")), [Client() for _ in range(3)]
    for client in clients:
        await asked(sending(own, LAST), client)
    assert own == starting((b"server-timing", b"db"))
    assert len({dict(told(client))[b"traceresponse"] for client in clients}) == 3


@pytest.mark.parametrize("client", [Client(method="GET"), Client(type="websocket")])
async def test_clients_of_what_is_not_watched_are_told_nothing(telling: Watched, client: Client) -> None:
    await asked(sending(START, LAST), client)
    assert client.sent[0] is START


async def test_a_response_without_headers_gets_ours(telling: Watched) -> None:
    client = Client()
    await asked(sending({"type": "http.response.start", "status": 204}, LAST), client)
    assert [name for name, _ in told(client)] == [b"traceresponse", b"server-timing"]


async def test_telling_that_fails_leaves_the_response_as_it_was(
    telling: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("canary")

    monkeypatch.setattr(response_headers, "add_headers", fail)
    client = Client()
    assert await asked(sending(START, chunk(b"a"), LAST), client) is None
    assert client.sent == [START, chunk(b"a"), LAST]
    assert (
        len([record for record in caplog.records if record.name == "otel_infer.instrumentation.hooks.probe"])
        == 1
    )
    assert "canary" not in caplog.text


# ── who asks ─────────────────────────────────────────────────────────────────────────────────────────────────────

ASKED = ((b"X-Tenant", b" canary-tenant "), (b"baggage", b"tenant=canary-baggage,other=canary-other"))


def wanting(tenant: str = "", key: str = "", traffic: str = "") -> None:
    asking.caller_settings = tenancy.parse_caller_settings(tenant, key, traffic)


async def test_nobody_is_asked_who_asks_unless_that_is_configured(watched: Watched) -> None:
    await asked(sending(START, LAST), Client(headers=ASKED))
    assert not {semconv.TENANT, semconv.TRAFFIC_CLASS} & watched.one.attributes.keys()
    assert b"canary" not in watched.bytes + repr(watched.one.said).encode()


@pytest.mark.parametrize(
    ("tenant", "said"), [("header:x-TENANT", "canary-tenant"), ("baggage:tenant", "canary-baggage")]
)
async def test_the_tenant_is_what_the_one_header_or_baggage_entry_says(
    watched: Watched, tenant: str, said: str
) -> None:
    wanting(tenant)
    await asked(sending(START, LAST), Client(headers=ASKED))
    assert watched.one.attributes[semconv.TENANT] == said
    assert repr(watched.one.said).count("canary") == 1


@pytest.mark.parametrize("tenant", ["header:x-tenant", "baggage:tenant"])
async def test_with_a_key_only_a_hash_of_the_tenant_is_stated(watched: Watched, tenant: str) -> None:
    wanting(tenant, "secret")
    await asked(sending(START, LAST), Client(headers=ASKED))
    assert re.fullmatch("[0-9a-f]{16}", str(watched.one.attributes[semconv.TENANT]))
    said = watched.bytes + repr(watched.one.said).encode()  # in a ring, text may be in pieces
    assert b"canary" not in said and b"secret" not in said


@pytest.mark.parametrize("tenant", ["header:x-tenant", "baggage:tenant", "lora"])
async def test_a_request_of_nobody_has_no_tenant(watched: Watched, tenant: str) -> None:
    wanting(tenant, "secret")
    await asked(sending(START, LAST), Client(headers=[(b"x-tenant", b" "), (b"baggage", b"tenant= ")]))
    assert semconv.TENANT not in watched.one.attributes


async def test_a_tenant_of_any_length_and_any_bytes_is_bounded(watched: Watched) -> None:
    wanting("header:x-tenant")
    await asked(sending(START, LAST), Client(headers=[(b"x-tenant", b"\xff" + b"a" * 60_000)]))
    assert watched.one.attributes[semconv.TENANT] == "\ufffd" + "a" * 63


async def test_the_baggage_of_an_earlier_request_is_not_this_ones(watched: Watched) -> None:
    """asyncio may leak the context of a request into the next one on its connection, which need not be its client's."""
    wanting("baggage:tenant")
    await asked(sending(START, LAST), Client(headers=ASKED))
    leaked = trace.set_span_in_context(
        request_span.RequestSpan(_opened(), 0, 0, "asgi", otel_context.get_current())
    )
    token = otel_context.attach(baggage.set_baggage("tenant", "of another", leaked))
    try:
        await asked(sending(START, LAST), Client(headers=[TRACEPARENT]))
    finally:
        otel_context.detach(token)
    assert [seen.attributes.get(semconv.TENANT) for seen in watched.requests] == ["canary-baggage", None]


def _opened() -> span_ids.SpanIds:
    assert request_span.span_factory is not None
    return request_span.span_factory.create_span(
        "POST", otel_context.get_current(), trace.INVALID_SPAN_CONTEXT, False, 0
    )


@pytest.mark.parametrize(
    ("headers", "path", "named"),
    [
        ((), "/v1/chat", "interactive"),
        ((), "/v1/batches/7", "batch"),
        ([(b"x-class", b"batch")], "/v1/chat", "batch"),
        ([(b"x-class", b"canary")], "/v1/batches", "interactive"),
    ],
)
async def test_the_traffic_class_is_one_of_two_whatever_a_client_says(
    watched: Watched, headers: Any, path: str, named: str
) -> None:
    wanting(traffic="header:X-Class,route:/v1/batches=batch")
    await asked(sending(START, LAST), Client(headers=headers, path=path))
    assert watched.one.attributes[semconv.TRAFFIC_CLASS] == named
    assert b"canary" not in watched.bytes + repr(watched.one.said).encode()


class Counting(RandomIdGenerator):
    """Somebody's own ids."""

    def generate_span_id(self) -> int:
        return 7

    def generate_trace_id(self) -> int:
        return 9


@pytest.mark.parametrize(("headers", "trace_id"), [([], f"{9:032x}"), ([TRACEPARENT], TRACE_ID)])
async def test_a_generator_of_somebodys_own_is_asked_for_every_id(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, headers: Any, trace_id: str
) -> None:
    opener = span_ids.SdkSpanFactory(ParentBased(ALWAYS_ON), Counting(), span_ids.Limits())
    monkeypatch.setattr(request_span, "span_factory", opener)
    await asked(sending(START, LAST), Client(headers=headers))
    arrived = watched.one.arrived
    assert arrived.trace_id.hex() == trace_id
    assert {arrived.span_id.hex(), arrived.server_span_id.hex()} == {f"{7:016x}"}


@pytest.mark.parametrize("headers", [[], [TRACEPARENT]])
async def test_a_sampler_of_somebodys_own_is_asked_for_every_request(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, headers: Any
) -> None:
    opener = span_ids.SdkSpanFactory(StaticSampler(Decision.DROP), RandomIdGenerator(), span_ids.Limits())
    monkeypatch.setattr(request_span, "span_factory", opener)
    await asked(sending(START, LAST), Client(headers=headers))
    assert not watched.one.arrived.flags & events.SAMPLED


@pytest.mark.parametrize("headers", [[], [TRACEPARENT]])
async def test_the_spans_that_are_current_have_the_ids_that_were_stated(
    watched: Watched, headers: Any
) -> None:
    contexts: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = ingress.current_request()
        assert request is not None and request.server is not None
        contexts.extend((trace.get_current_span().get_span_context(), request.server))

    await asked(app, Client(headers=headers))
    arrived = watched.one.arrived
    assert [one.trace_id.to_bytes(16, "big") for one in contexts] == [arrived.trace_id] * 2
    assert [one.span_id.to_bytes(8, "big") for one in contexts] == [arrived.span_id, arrived.server_span_id]
    assert all(one.trace_flags.sampled and not one.is_remote for one in contexts)


@pytest.mark.parametrize("body", [[chunk(b"a", more=False)], [chunk(b""), chunk(b"a", more=False)]])
async def test_a_response_of_one_piece_was_started_before_the_client_took_it(
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
