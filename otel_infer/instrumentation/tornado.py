"""Records HTTP requests of Tornado: their arrival, the response, and their outcome.

    headers ─▶ body ─▶ RequestHandler._execute ─▶ flush, per chunk of a stream ─▶ finish, which is the end

A client that leaves is seen in the callback that Tornado has for that, before the handler's `on_connection_close`.

The route is the pattern of the rule that matched, as Tornado knows no other name for it.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Any

import otel_infer.tracing  # noqa: F401  (loads OpenTelemetry's API, see `config.propagators`)
from otel_infer import _clock
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.http_server.event_loop_lag import watch_event_loop
from otel_infer.instrumentation.http_server.exchange import HttpExchange, is_websocket
from otel_infer.instrumentation.http_server.server_exchange import can_record, encode_headers
from otel_infer.tracing.request_span import RequestSpan

_OTHER = "opentelemetry.instrumentation.tornado"
"""The instrumentation that starts a SERVER span in `RequestHandler.prepare`."""

instrumentor = Instrumentor("tornado", "tornado", ("tornado.web",))


class TornadoExchange(HttpExchange):
    """One HTTP request of Tornado. It arrived with its headers; its body was read since. `handler`: Tornado's handler.

    `outlives_handler`: the handler has returned, and the response is finished elsewhere.
    """

    __slots__ = ("address", "handler", "outlives_handler")

    owner = "tornado"

    def __init__(self, handler: Any, hook: Hook) -> None:
        self.handler, self.address, self.outlives_handler = handler, None, False
        incoming = handler.request
        read_ns = max(int(incoming.request_time() * 1e9), 0)
        super().__init__(
            hook, incoming.method, incoming.protocol, _OTHER in sys.modules, _clock.now() - read_ns
        )
        watch_event_loop()

    def list_headers(self) -> list[tuple[bytes, bytes]]:
        return encode_headers(self.handler.request.headers.get_all())

    def find_path(self) -> str:
        return str(self.handler.request.path)

    def open_request(self) -> RequestSpan | None:
        """Opens the request. The socket is read now, because it may be closed when the request ends."""
        connection = self.find_socket()
        self.address = None if connection is None else connection.getsockname()
        return super().open_request()

    def find_address(self) -> Any:
        return self.address

    def find_socket(self) -> Any:
        stream = getattr(self.handler.request.connection, "stream", None)
        return getattr(stream, "socket", None)

    def has_client_left(self, exc: BaseException | None) -> bool:
        """Returns whether the connection closed before the last byte."""
        return bool(self.disconnected_at) or (not self.completed_at and self.find_socket() is None)

    def follow_connection(self) -> None:
        """Notes on the way when the connection closes, unless Tornado has no callback for that."""
        connection = self.handler.request.connection
        callback = getattr(connection, "_close_callback", None)
        if not callable(callback):
            return

        def note_and_call() -> None:
            self.record_disconnect()
            if self.outlives_handler:
                self.end()
            callback()

        connection.set_close_callback(note_and_call)

    def record_flush(self, is_last: bool) -> None:
        """Records that buffered output is about to be sent, with the status in its first part."""
        if self.has_client_left(None):
            self.record_disconnect()
            return
        now = _clock.now()
        if not self.status:
            self.record_start(int(self.handler._status_code))
        self.record_chunk(self.handler._write_buffer, now)
        if is_last:
            self.completed_at = now


def _passes_on(handler: Any) -> bool:
    """Returns whether the handler passes its request on to another application, which answers it."""
    kind = getattr(sys.modules.get("tornado.web"), "FallbackHandler", None)
    return kind is not None and isinstance(handler, kind)


def _begin_exchange(handler: Any, hook: Hook) -> TornadoExchange | None:
    """Returns the exchange that begins here; None if it is not recorded."""
    try:
        if (
            not can_record(hook)
            or is_websocket(handler.request.method, handler.request.headers)
            or _passes_on(handler)
        ):
            return None
        exchange = handler.otel_infer_exchange = TornadoExchange(handler, hook)
        exchange.route = getattr(handler.request, "otel_infer_route", "")
        exchange.follow_connection()
        return exchange
    except BaseException as exc:
        hook.count_failure(exc)
        return None


@instrumentor.patch_hot_path("tornado.web:RequestHandler._execute")
def _patch_execute(original: Callable[..., Awaitable[Any]], hook: Hook) -> Callable[..., Awaitable[Any]]:
    async def execute(self: Any, *args: Any, **kwargs: Any) -> Any:
        exchange = _begin_exchange(self, hook)
        if exchange is None:
            return await original(self, *args, **kwargs)
        with exchange:
            result = await original(self, *args, **kwargs)
        if self._finished or exchange.has_client_left(None):
            exchange.end()
        else:
            exchange.outlives_handler = True
        return result

    return execute


@instrumentor.patch_hot_path("tornado.web:RequestHandler._handle_request_exception")
def _patch_handle_exception(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def handle_request_exception(self: Any, exc: BaseException) -> Any:
        exchange = getattr(self, "otel_infer_exchange", None)
        if exchange is not None and hook.alive:
            exchange.error = exc
        return original(self, exc)

    return handle_request_exception


@instrumentor.patch_hot_path("tornado.web:RequestHandler.flush", reads=("include_footers",))
def _patch_flush(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def flush(self: Any, include_footers: bool = False) -> Any:
        exchange = getattr(self, "otel_infer_exchange", None)
        if exchange is None or not hook.alive:
            return original(self, include_footers)
        try:
            exchange.record_flush(include_footers)
        except BaseException as exc:
            hook.count_failure(exc)
        result = original(self, include_footers)
        if include_footers:
            self.otel_infer_exchange = None
            exchange.end()  # what the handler does after that is no part of the request
        return result

    return flush


@instrumentor.patch_hot_path("tornado.routing:PathMatches.match", reads=("request",), part="routes")
def _patch_match(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def match(self: Any, request: Any) -> Any:
        result = original(self, request)
        try:
            if result is not None and hook.alive:
                request.otel_infer_route = str(self.regex.pattern).removesuffix("$")
        except Exception as exc:
            hook.count_failure(exc)
        return result

    return match
