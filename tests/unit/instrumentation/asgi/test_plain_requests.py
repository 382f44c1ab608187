"""Compiled code records a plain request of uvicorn as the Python code does, whatever the application does."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import gc
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import DEFAULT_ON
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.applications import Starlette

from otel_infer import _clock, semconv
from otel_infer.instrumentation import asgi
from otel_infer.instrumentation.asgi import exchange, plain_requests, server_connection
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.http_server import event_loop_lag
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.arena import MemoryArena
from otel_infer.ringbuffer.native import native
from otel_infer.ringbuffer.reader import RequestReader
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import request_span, span_ids
from otel_infer.tracing.start import current_request

pytestmark = pytest.mark.skipif(native is None, reason="the compiled module is not built")

Action = tuple[Any, ...]
TRACEPARENT = (b"traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
JSON: list[Action] = [("start", 200), ("chunk", b"{}", False)]


class Cycle:
    """What our hooks see of uvicorn's cycle of one request and its response."""

    def __init__(self) -> None:
        self.scope: dict[str, Any] = {}
        self.disconnected = self.response_complete = False
        self.sent: list[Any] = []
        self.completions = 0
        self.on_response: Callable[[], None] = self.complete
        self.otel_infer_response: Any = None

    def complete(self) -> None:
        self.completions += 1

    async def receive(self) -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(self, message: Any) -> None:
        if self.disconnected:
            return
        self.sent.append(message)
        if (
            message["type"] == "http.response.body"
            and not message.get("more_body")
            and not self.response_complete
        ):
            self.response_complete = True
            self.on_response()

    def lose_connection(self) -> None:
        """As the hook on `connection_lost` does."""
        self.disconnected = True
        if not self.response_complete and self.otel_infer_response is not None:
            self.otel_infer_response.record_disconnect(_clock.now())


class Layer:
    """An application, a router or a route, whose call is patched."""

    root_path = ""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    async def call(self, scope: Any, receive: Any, send: Any) -> None:
        await self.inner(scope, receive, send)


class Endpoint:
    """Does the actions of one request."""

    def __init__(self, cycle: Cycle, actions: list[Action]) -> None:
        self.cycle, self.actions = cycle, actions

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        for name, *values in self.actions:
            await getattr(self, f"do_{name}")(scope, send, *values)

    async def do_start(self, scope: Any, send: Any, status: int) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})

    async def do_chunk(self, scope: Any, send: Any, body: bytes, more: bool) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": more})

    async def do_leave(self, scope: Any, send: Any) -> None:
        self.cycle.lose_connection()

    async def do_pause(self, scope: Any, send: Any) -> None:
        await asyncio.sleep(0)

    async def do_raise(self, scope: Any, send: Any, exc: type[BaseException]) -> None:
        raise exc("reason")

    async def do_reach_token(self, scope: Any, send: Any) -> None:
        if (request := current_request()) is not None:
            request.record_token_reached()

    async def do_fail_engine(self, scope: Any, send: Any) -> None:
        if (request := current_request()) is not None:
            request.set_engine_error("EngineDead")

    async def do_set_attribute(self, scope: Any, send: Any) -> None:
        trace.get_current_span().set_attribute("key", "value")

    async def do_set_error_status(self, scope: Any, send: Any) -> None:
        trace.get_current_span().set_status(trace.StatusCode.ERROR)

    async def do_record_stage(self, scope: Any, send: Any, name: Any, items: int) -> None:
        if (request := current_request()) is not None:
            request.record_stage(name, request.arrived_at, items)

    async def do_change_scheme(self, scope: Any, send: Any) -> None:
        scope["scheme"] = "https"  # as uvicorn's middleware for proxies, which is behind the entry point

    async def do_mount(self, scope: Any, send: Any) -> None:
        scope[exchange.SCOPE_KEY].mount_path = "/mounted"


class Server:
    """An entry point as in uvicorn, with the three patched layers behind it."""

    def __init__(self, arena: MemoryArena, layers: bool) -> None:
        self.arena, self.hook = arena, Hook("entry point")
        self.layers = layers
        self.endpoint: Any = None
        self.app = asgi._make_entry_point(self._make_app(), self.hook)
        self._reader: RequestReader | None = None
        self.started: dict[int, list[Any]] = {}

    def _make_app(self) -> Any:
        async def call_endpoint(scope: Any, receive: Any, send: Any) -> None:
            await self.endpoint(scope, receive, send)

        app: Any = call_endpoint
        for patch in (asgi._patch_route, asgi._patch_router, asgi._patch_application) if self.layers else ():
            layer = type(
                "Patched",
                (Layer,),
                {"__call__": patch(Layer.call, Hook("layer")), "path_format": "/items/{id}"},
            )
            app = layer(app)
        return app

    async def serve(
        self, actions: list[Action], headers: Any = (TRACEPARENT,), **scope: Any
    ) -> tuple[Any, ...]:
        """Serves one request. Returns what the client, the server and the recording show of it."""
        cycle = Cycle()
        self.endpoint = Endpoint(cycle, actions)
        scope = {
            "type": "http",
            "method": "POST",
            "scheme": "http",
            "headers": list(headers),
            "root_path": "",
            **scope,
        }
        raised = ""
        try:
            await self.app(scope, cycle.receive, cycle.send)
        except BaseException as exc:
            raised = repr(exc)
        assert exchange.SCOPE_KEY not in scope
        assert current_request() is None and not otel_context.get_current()
        assert recorder.requests is not None and recorder.requests.in_flight == 0
        assert cycle.otel_infer_response is None
        return raised, cycle.sent, cycle.completions, self.read_events()

    async def warm_up(self) -> None:
        """Serves the requests after which others are plain: they create the rings, and start the timer."""
        for _ in range(2):
            await self.serve(JSON)

    def read_events(self) -> list[Any]:
        """Returns the events of the last request without instants and ids."""
        self._reader = self._reader or RequestReader(self.arena.buffers[0][1], 1)
        for entry in self._reader.poll(_clock.now(), final=True):
            if entry.handle:
                self.started.setdefault(entry.handle, []).append(entry.event)
        return [describe(event) for event in list(self.started.values())[-1]]


def describe(event: Any) -> Any:
    if isinstance(event, events.RequestArrived):
        return (
            "RequestArrived",
            event.flags,
            event.name,
            event.parent_span_id,
            event.server_span_id != bytes(8),
        )
    if isinstance(event, events.RequestEnded):
        return "RequestEnded", event.outcome, event.error_type, event.status_code, event.chunks
    if isinstance(event, events.StageEnded):
        return "StageEnded", *event[2:]
    return type(event).__name__, *event[1:]


@contextlib.contextmanager
def record_in_memory() -> Iterator[MemoryArena]:
    arena = MemoryArena()
    factory = span_ids.SdkSpanFactory(DEFAULT_ON, RandomIdGenerator(), span_ids.Limits())
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(request_span, "span_factory", factory)
        monkeypatch.setitem(server_connection._hooks, __name__, Hook("connection"))
        monkeypatch.setitem(server_connection.FLOWS, __name__, __name__)
        recorder.stop()  # rings of an earlier test
        recorder.start(lambda: arena, lambda: None, lambda reason: None)
        yield arena
        recorder.stop()
        plain_requests.invalidate_plain_requests()
        event_loop_lag._thread_timer.timer = None  # of a loop that is closed now


@pytest.fixture
def arena() -> Iterator[MemoryArena]:
    with record_in_memory() as arena:
        yield arena


@contextlib.contextmanager
def python_only() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        plain_requests.invalidate_plain_requests()
        monkeypatch.setattr(asgi, "renew_plain_requests", lambda exchange: None)
        yield


@contextlib.contextmanager
def counted_begins() -> Iterator[list[int]]:
    """Counts the requests that Python code begins."""
    begins: list[int] = []
    begin = asgi._begin_exchange
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(asgi, "_begin_exchange", lambda *args: begins.append(1) or begin(*args))
        yield begins


ACTION = st.one_of(
    st.tuples(st.just("start"), st.sampled_from((200, 204, 404, 500, 503))),
    st.tuples(st.just("chunk"), st.sampled_from((b"", b"text")), st.booleans()),
    st.tuples(st.just("record_stage"), st.sampled_from(("queue", "a" * 300)), st.integers(-(2**70), 2**70)),
    st.tuples(st.just("raise"), st.sampled_from((ValueError, RuntimeError, asyncio.CancelledError))),
    st.sampled_from(
        (
            "leave",
            "pause",
            "reach_token",
            "fail_engine",
            "set_attribute",
            "set_error_status",
            "mount",
            "change_scheme",
        )
    ).map(lambda name: (name,)),
)
ACTIONS = st.one_of(
    st.lists(ACTION, max_size=8),
    st.lists(ACTION, max_size=5).map(lambda middle: [("start", 200), *middle, ("chunk", b"end", False)]),
)


def serve_twice(arena: MemoryArena, actions: list[Action], layers: bool) -> tuple[Any, Any]:
    """Returns what both ways of recording show of the same request."""

    async def serve() -> tuple[Any, Any]:
        with python_only():
            expected = await Server(arena, layers).serve(actions)
        server = Server(arena, layers)
        await server.warm_up()
        with counted_begins() as begins:
            seen = await server.serve(actions)
        assert begins == []
        return seen, expected

    return asyncio.run(serve())


@settings(deadline=None, max_examples=300)
@given(actions=ACTIONS, layers=st.booleans())
def test_plain_request_is_recorded_as_by_python_code(actions: list[Action], layers: bool) -> None:
    with record_in_memory() as arena:
        seen, expected = serve_twice(arena, actions, layers)
    assert seen == expected


def test_stream_is_recorded_whole(arena: MemoryArena) -> None:
    actions = [
        ("start", 200),
        ("chunk", b"a", True),
        ("reach_token",),
        ("chunk", b"b", True),
        ("chunk", b"", False),
    ]
    (raised, sent, completions, recorded), expected = serve_twice(arena, actions, layers=True)
    assert (raised, len(sent), completions) == ("", 4, 1)
    assert recorded == [
        ("RequestArrived", events.SAMPLED | events.REMOTE_PARENT | events.OWN_SERVER_SPAN, "POST",
         bytes.fromhex("00f067aa0ba902b7"), True),
        ("ResponseStarted",),
        ("TokenReached",),
        ("FirstTokenSent",),
        ("HttpDescribed", "POST", "http", "/items/{id}"),
        ("RequestEnded", events.OK, "", 200, 0),
    ]  # fmt: skip
    assert recorded == expected[3]


@pytest.mark.parametrize(
    "scope",
    [
        {"headers": [TRACEPARENT, TRACEPARENT]},
        {"headers": [TRACEPARENT, (b"baggage", b"a=b")]},
        {"method": "BREW"},
        {"method": "GET"},
        {"root_path": "/behind/proxy"},
        {"type": "websocket"},
    ],
)
def test_other_requests_are_left_to_python_code(arena: MemoryArena, scope: dict[str, Any]) -> None:
    async def serve() -> None:
        server = Server(arena, layers=True)
        await server.warm_up()
        with counted_begins() as begins:
            await server.serve(JSON, **scope)
        assert len(begins) >= 1

    asyncio.run(serve())


@pytest.mark.parametrize(
    ("scope", "attributes"),
    [
        ({"server": ("127.0.0.1", 8000)}, {}),
        ({"server": ("127.0.0.1", 9000)}, {semconv.SERVER_ADDRESS: "127.0.0.1", semconv.SERVER_PORT: 9000}),
    ],
)
def test_another_address_than_the_processs_is_recorded(
    arena: MemoryArena, scope: dict[str, Any], attributes: dict[str, Any]
) -> None:
    async def serve() -> list[Any]:
        server = Server(arena, layers=True)
        for _ in range(2):
            await server.serve(JSON, server=("127.0.0.1", 8000))
        return (await server.serve(JSON, **scope))[3]

    recorded = asyncio.run(serve())
    found = {event[1]: event[2] for event in recorded if event[0] == "AttributeSet"}
    assert found == attributes


def test_compiled_code_renews_what_has_expired(arena: MemoryArena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request of a second is plain too, unless a setting has changed meanwhile."""

    async def serve() -> None:
        server = Server(arena, layers=False)
        monkeypatch.setattr(plain_requests, "CHECK_NS", 0)
        await server.warm_up()
        maintained_at = recorder.maintained_at
        with counted_begins() as begins:
            for _ in range(3):
                await server.serve(JSON)
            assert begins == []
            assert recorder.maintained_at > maintained_at
            monkeypatch.setattr(server_connection._hooks[__name__], "alive", False)
            await server.serve(JSON)
            assert begins == [1]

    asyncio.run(serve())


def test_setting_that_changes_is_noticed(arena: MemoryArena, monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider, or another propagator, is noticed with the next maintenance of the recorder; settings at once."""

    async def count_begins(server: Server) -> int:
        with counted_begins() as begins:
            await server.serve(JSON)
        return len(begins)

    async def serve() -> None:
        server = Server(arena, layers=False)
        await server.warm_up()
        assert await count_begins(server) == 0
        asgi.configure_asgi("", add_headers=True)
        assert [await count_begins(server), await count_begins(server)] == [1, 1]
        asgi.configure_asgi("")
        assert [await count_begins(server), await count_begins(server)] == [1, 0]
        server.hook.alive = False
        assert [await count_begins(server), await count_begins(server)] == [1, 1]

    asyncio.run(serve())


@pytest.mark.parametrize("name", ["propagator", "provider"])
def test_instrumentation_of_others_ends_plain_requests(
    arena: MemoryArena, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    class OwnPropagator(TraceContextTextMapPropagator):
        """A propagator that may read anything."""

    async def serve() -> None:
        server = Server(arena, layers=True)
        await server.warm_up()
        if name == "propagator":
            monkeypatch.setattr(propagate, "get_global_textmap", OwnPropagator)
        else:
            monkeypatch.setattr(trace, "_TRACER_PROVIDER", TracerProvider())
        plain_requests.invalidate_plain_requests()
        for _ in range(3):
            with counted_begins() as begins:
                await server.serve(JSON)
            assert len(begins) == 1

    asyncio.run(serve())


def test_ring_of_the_parent_process_is_not_written(arena: MemoryArena) -> None:
    async def serve() -> None:
        server = Server(arena, layers=False)
        await server.warm_up()
        recorder.reset_after_fork()  # as in a forked child
        before = bytes(arena.buffers[0][1])
        with counted_begins() as begins:
            await server.app(
                {"type": "http", "method": "POST", "scheme": "http", "headers": []},
                Cycle().receive,
                Cycle().send,
            )
        assert len(begins) == 1 and bytes(arena.buffers[0][1]) == before

    asyncio.run(serve())


def test_run_that_is_dropped_closes_its_request(arena: MemoryArena) -> None:
    async def serve() -> None:
        server = Server(arena, layers=True)
        await server.warm_up()
        cycle = Cycle()
        server.endpoint = Endpoint(cycle, [("start", 200), ("pause",), ("chunk", b"", False)])
        scope = {"type": "http", "method": "POST", "scheme": "http", "headers": [], "root_path": ""}
        run: Any = server.app(scope, cycle.receive, cycle.send)
        run.send(None)  # until the pause
        assert recorder.requests is not None and recorder.requests.in_flight == 1
        del run
        assert recorder.requests.in_flight == 0
        assert server.read_events()[-1] == ("RequestEnded", events.ABORTED, events.CANCELLED, 200, 0)

    asyncio.run(serve())


def test_run_is_a_coroutine_for_others(arena: MemoryArena) -> None:
    """asyncio makes a task of it, and tools find the frame in which it waits."""

    async def serve() -> None:
        server = Server(arena, layers=False)
        await server.warm_up()
        cycle = Cycle()
        server.endpoint = Endpoint(cycle, [("pause",), *JSON])
        scope = {"type": "http", "method": "POST", "scheme": "http", "headers": [], "root_path": ""}
        run: Any = server.app(scope, cycle.receive, cycle.send)
        assert asyncio.iscoroutine(run) and inspect.iscoroutine(run)
        task = asyncio.create_task(run)
        await asyncio.sleep(0)
        assert run.cr_frame is not None and run.__name__ == "call_endpoint"
        await task
        assert len(cycle.sent) == 2

    asyncio.run(serve())


def make_scope() -> dict[str, Any]:
    return {"type": "http", "method": "POST", "scheme": "http", "headers": [], "root_path": ""}


def test_request_belongs_to_the_task_that_awaits_it(arena: MemoryArena) -> None:
    """A wrapper may call the application in one task, and await it in another."""

    async def serve() -> None:
        server, cycle = Server(arena, layers=True), Cycle()
        await server.warm_up()
        server.endpoint = Endpoint(cycle, [("reach_token",), *JSON])
        run = server.app(make_scope(), cycle.receive, cycle.send)
        assert current_request() is None
        await asyncio.create_task(run)
        assert current_request() is None
        assert server.read_events()[-1] == ("RequestEnded", events.OK, "", 200, 1)

    asyncio.run(serve())


@pytest.mark.parametrize("end", ["close", "drop", "throw"])
def test_run_that_never_started_records_nothing(arena: MemoryArena, end: str) -> None:
    async def serve() -> None:
        server, cycle = Server(arena, layers=False), Cycle()
        await server.warm_up()
        before = len(server.started)
        run: Any = server.app(make_scope(), cycle.receive, cycle.send)
        if end == "close":
            run.close()
        elif end == "throw":
            with pytest.raises(KeyError):
                run.throw(KeyError("reason"))
        else:
            with pytest.warns(RuntimeWarning, match="never awaited"):
                del run
        server.read_events()
        assert len(server.started) == before

    asyncio.run(serve())


def test_run_in_a_reference_cycle_closes_its_request(arena: MemoryArena) -> None:
    async def serve() -> None:
        server, cycle = Server(arena, layers=True), Cycle()
        await server.warm_up()
        server.endpoint = Endpoint(cycle, [("start", 200), ("pause",), ("chunk", b"", False)])
        holder: dict[str, Any] = {}
        run: Any = server.app(make_scope() | {"holder": holder}, cycle.receive, cycle.send)
        holder["run"] = run
        run.send(None)
        del run, holder, cycle
        server.endpoint = None
        gc.collect()
        assert recorder.requests is not None and recorder.requests.in_flight == 0

    asyncio.run(serve())


@pytest.mark.parametrize("failure", [None, ValueError])
def test_signal_in_our_code_reaches_the_server(
    arena: MemoryArena, monkeypatch: pytest.MonkeyPatch, failure: type[Exception] | None
) -> None:
    def exit_in_end(self: Any, exc: BaseException | None) -> None:
        raise SystemExit(3)

    async def serve(actions: list[Action]) -> BaseException:
        server, cycle = Server(arena, layers=False), Cycle()
        await server.warm_up()
        server.endpoint = Endpoint(cycle, actions)
        run: Any = server.app(make_scope(), cycle.receive, cycle.send)
        with monkeypatch.context() as patched:
            patched.setattr(exchange.Exchange, "end", exit_in_end)
            with pytest.raises(SystemExit) as raised:
                run.send(None)
        return raised.value

    raised = asyncio.run(serve([("raise", failure)] if failure else []))
    assert type(raised.__context__) is (failure or type(None))


def test_entry_point_shows_a_coroutine_function() -> None:
    entry: Any = asgi._make_entry_point(Layer.call, Hook("entry point"))
    assert inspect.iscoroutinefunction(entry.__call__)  # asgiref looks there
    assert list(inspect.signature(entry).parameters) == ["scope", "receive", "send"]


def test_patched_call_copies_and_pickles_as_a_function() -> None:
    patched: Any = Starlette.__dict__["__call__"]
    if not isinstance(patched, native.CompiledHook):
        patched = functools.wraps(Starlette.__call__)(
            asgi._patch_application(Starlette.__call__, Hook("layer"))
        )
    assert copy.copy(patched) is patched and copy.deepcopy(patched) is patched
    assert weakref.ref(patched)() is patched


def test_patched_call_still_shows_a_coroutine_function() -> None:
    patched = asgi._patch_application(Layer.call, Hook("layer"))
    layer: Any = type("Patched", (Layer,), {"__call__": patched})(None)
    patched.__name__ = "__call__"
    patched.__annotations__ = {}
    assert inspect.iscoroutinefunction(layer.__call__)
    assert layer.__call__.__self__ is layer


def test_awaitable_that_is_no_coroutine_is_awaited(arena: MemoryArena) -> None:
    async def serve() -> None:
        async def respond(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})

        def app(scope: Any, receive: Any, send: Any) -> Any:
            return SimpleAwaitable(respond(scope, receive, send))

        server = Server(arena, layers=False)
        await server.warm_up()
        entry: Any = asgi._make_entry_point(app, Hook("entry point"))
        for expected_begins in (1, 0):  # the first request starts the timer of the event loop
            with counted_begins() as begins:
                cycle = Cycle()
                scope = {"type": "http", "method": "POST", "scheme": "http", "headers": [], "root_path": ""}
                await entry(scope, cycle.receive, cycle.send)
            assert len(begins) == expected_begins and len(cycle.sent) == 2

    asyncio.run(serve())


class SimpleAwaitable(SimpleNamespace):
    """An awaitable that is neither a coroutine nor a future."""

    def __init__(self, coroutine: Any) -> None:
        self.coroutine = coroutine

    def __await__(self) -> Any:
        return self.coroutine.__await__()


def test_a_dropped_call_is_reported_once_where_warnings_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda info: reported.append(info.exc_type))
    compiled = native.EntryPoint()
    compiled.app = compiled.call_slowly = compiled.hook = print
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled({}, None, None)
    assert reported == [RuntimeWarning]
