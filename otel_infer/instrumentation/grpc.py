"""Records remote procedure calls of grpcio's servers, threaded and asyncio: unary and streams.

    grpc.server, grpc.aio.server ─▶ an interceptor ─▶ the method's handler, wrapped ─▶ its response, or each message

A call arrives when the server looks up its method. On a threaded server it then waits for a thread of the pool. It ends when its handler
has returned, or its last message was taken. Calls of gRPC's own services (health, reflection) have no span.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import otel_infer.tracing  # noqa: F401  (loads OpenTelemetry's API, see `config.propagators`)
from otel_infer import _clock
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.http_server.event_loop_lag import watch_event_loop
from otel_infer.instrumentation.http_server.server_exchange import ServerExchange, can_record, encode_headers
from otel_infer.instrumentation.waits import record_pool_wait
from otel_infer.ringbuffer import events
from otel_infer.tracing import request_span
from otel_infer.tracing.outcome import classify_exception

STATUS_CODES = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
"""By number, as grpc.StatusCode has them."""
SERVER_ERRORS = (
    "UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS",
)  # fmt: skip
"""Codes that are an error of the server (RPC conventions 1.45)."""
_END = object()
"""After the last message of a stream."""
_OWN_SERVICES = "grpc."
_KINDS = {
    (False, False): "unary_unary", (False, True): "unary_stream", (True, False): "stream_unary", (True, True): "stream_stream",
}  # fmt: skip
"""Whether requests and responses are streams ─▶ the attribute of a handler that holds its function."""

instrumentor = Instrumentor("grpc", "grpcio", ("grpc",))


class RpcExchange(ServerExchange):
    """One remote procedure call. `context`: gRPC's, once its handler runs.

    `method`: `package.Service/Method`; `_OTHER` if the server has none of this name, because clients may send any.
    """

    __slots__ = ("context", "is_known", "metadata", "method")

    owner = "grpc"

    def __init__(
        self, details: Any, hook: Hook, is_known: bool, has_other_span: bool, arrived_at: int
    ) -> None:
        self.is_known = is_known
        self.method = str(details.method).lstrip("/") if is_known else events.OTHER
        self.metadata = details.invocation_metadata or ()
        self.context: Any = None
        is_deferred = has_other_span or self.method.startswith(_OWN_SERVICES)
        super().__init__(hook, is_deferred, arrived_at)
        watch_event_loop()

    def name_span(self) -> str:
        return self.method if self.is_known else self.owner

    def list_headers(self) -> list[tuple[bytes, bytes]]:
        return encode_headers(self.metadata)

    def find_path(self) -> str:
        return f"/{self.method}"

    def close_request(self, request: request_span.RequestSpan, exc: BaseException | None) -> None:
        code = self._find_code(exc)
        if request.has_server:
            for key, value in zip(events.RPC_KEYS, (self.owner, self.method, code)):
                request.record_attribute(key, value)
        outcome, error_type = events.OK, ""
        if isinstance(exc, (asyncio.CancelledError, GeneratorExit)) or code == "CANCELLED":
            outcome, error_type = events.ABORTED, events.CLIENT_DISCONNECT
        elif code in SERVER_ERRORS:
            is_raised = exc is not None and type(exc) is not Exception  # `abort` raises a bare one
            outcome, error_type = classify_exception(exc) if is_raised else (events.ERROR, code)
        request.close(outcome, error_type)

    def _find_code(self, exc: BaseException | None) -> str:
        """Returns the name of the status code that the client gets."""
        if not self.is_known:
            return "UNIMPLEMENTED"
        if isinstance(exc, (asyncio.CancelledError, GeneratorExit)):
            return "CANCELLED"
        code = self.context.code() if self.context is not None else None
        number = code if isinstance(code, int) else getattr(code, "value", (0,))[0]
        if isinstance(number, int) and 0 < number < len(STATUS_CODES):
            return STATUS_CODES[number]
        is_active = getattr(self.context, "is_active", None)
        if exc is None and is_active is not None and not is_active():
            return "CANCELLED"
        return "OK" if exc is None else "UNKNOWN"


# ── handlers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _wrap_handler(handler: Any, exchange: RpcExchange, pool_size: int) -> Any:
    """Returns the handler of a method that runs its function as this request."""
    kind = _KINDS[bool(handler.request_streaming), bool(handler.response_streaming)]
    function = getattr(handler, kind)
    is_stream = bool(handler.response_streaming)
    if inspect.isasyncgenfunction(function):
        wrapped: Callable[..., Any] = _follow_async_stream(function, exchange)
    elif inspect.iscoroutinefunction(function):
        wrapped = _follow_coroutine(function, exchange)
    else:
        follow = _follow_stream if is_stream else _follow_call
        wrapped = follow(function, exchange, pool_size)
    make_handler = getattr(sys.modules["grpc"], f"{kind}_rpc_method_handler")
    return make_handler(wrapped, handler.request_deserializer, handler.response_serializer)


def _follow_call(function: Callable[..., Any], exchange: RpcExchange, pool_size: int) -> Callable[..., Any]:
    def call(request: Any, context: Any) -> Any:
        _begin_handler(exchange, context, pool_size)
        with exchange:
            live = exchange.request
            response = (
                function(request, context)
                if live is None
                else live.call_in_thread(function, request, context)
            )
        _end_unary(exchange, response)
        return response

    return call


def _follow_stream(
    function: Callable[..., Any], exchange: RpcExchange, pool_size: int
) -> Callable[..., Iterator[Any]]:
    def stream(request: Any, context: Any) -> Iterator[Any]:
        """Yields the messages. Between two of them the request is not current in the server's thread."""
        _begin_handler(exchange, context, pool_size)
        with exchange:
            messages = iter(function(request, context))
        while True:
            with exchange:
                message = next(messages, _END)
            if message is _END:
                break
            exchange.record_chunk(True, _clock.now())
            try:
                yield message
            except BaseException as exc:  # the server stops reading: its client has left
                exchange.end(exc)
                raise
        exchange.completed_at = _clock.now()
        exchange.end()

    return stream


def _follow_coroutine(function: Callable[..., Any], exchange: RpcExchange) -> Callable[..., Any]:
    async def call(request: Any, context: Any) -> Any:
        _begin_handler(exchange, context, 0)
        with exchange:
            response = await function(request, context)
        _end_unary(exchange, response)
        return response

    return call


def _follow_async_stream(function: Callable[..., Any], exchange: RpcExchange) -> Callable[..., Any]:
    async def stream(request: Any, context: Any) -> Any:
        _begin_handler(exchange, context, 0)
        with exchange:
            async for message in function(request, context):
                exchange.record_chunk(True, _clock.now())
                yield message
        exchange.completed_at = _clock.now()
        exchange.end()

    return stream


def _begin_handler(exchange: RpcExchange, context: Any, pool_size: int) -> None:
    """Notes that the handler begins, in its thread. `pool_size`: threads that it may have waited for; 0 = none."""
    exchange.context = context
    if pool_size and exchange.request is not None:
        record_pool_wait(exchange.request, exchange.arrived_at, pool_size)


def _end_unary(exchange: RpcExchange, response: Any) -> None:
    """Ends a call with one response. A coroutine that sends a stream by `context.write` returns None."""
    exchange.completed_at = _clock.now()
    exchange.record_chunk(response is not None, exchange.completed_at)
    exchange.end()


# ── servers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class RpcInterceptor:
    """The first interceptor of a threaded server. `pool_size`: the threads of its pool."""

    def __init__(self, hook: Hook, others: Sequence[Any], pool_size: int) -> None:
        self.hook, self.pool_size = hook, pool_size
        self.has_other_span = any(type(other).__module__.startswith("opentelemetry.") for other in others)

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        """Returns the handler of the method, which runs as a request; as gRPC's interceptors do."""
        arrived_at = _clock.now()
        return self.follow_call(continuation(handler_call_details), handler_call_details, arrived_at)

    def follow_call(self, handler: Any, details: Any, arrived_at: int) -> Any:
        """Returns the handler that runs as the request, which began at `arrived_at` (monotonic ns)."""
        try:
            if not can_record(self.hook):
                return handler
            is_known = handler is not None
            exchange = RpcExchange(details, self.hook, is_known, self.has_other_span, arrived_at)
        except BaseException as exc:
            self.hook.count_failure(exc)
            return handler
        if handler is None:
            exchange.end()
            return None
        try:
            return _wrap_handler(handler, exchange, self.pool_size)
        except BaseException as exc:
            exchange.end()
            self.hook.count_failure(exc)
            return handler


class AsyncRpcInterceptor(RpcInterceptor):
    """The first interceptor of an asyncio server."""

    async def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        """Returns the handler of the method, which runs as a request; as gRPC's interceptors do."""
        arrived_at = _clock.now()
        return self.follow_call(await continuation(handler_call_details), handler_call_details, arrived_at)


@instrumentor.patch_hot_path("grpc:server", reads=("thread_pool", "interceptors"))
def _patch_server(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def server(
        thread_pool: Any, handlers: Any = None, interceptors: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if hook.alive:
            size = getattr(thread_pool, "_max_workers", 0)
            own = RpcInterceptor(hook, interceptors or (), size if isinstance(size, int) else 0)
            interceptors = (own, *(interceptors or ()))
        return original(thread_pool, handlers, interceptors, *args, **kwargs)

    return server


def _patch_async_server(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def server(
        migration_thread_pool: Any = None,
        handlers: Any = None,
        interceptors: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if hook.alive:
            sys.modules["grpc.aio"].ServerInterceptor.register(AsyncRpcInterceptor)
            own = AsyncRpcInterceptor(hook, interceptors or (), 0)
            interceptors = (own, *(interceptors or ()))
        return original(migration_thread_pool, handlers, interceptors, *args, **kwargs)

    return server


instrumentor.patch_hot_path("grpc.aio:server", reads=("migration_thread_pool", "interceptors"), part="aio")(
    _patch_async_server
)
