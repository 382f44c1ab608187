"""Records HTTP requests of aiohttp.web: their arrival, the response, and their outcome.

RequestHandler._handle_request ─▶ handler ─▶ StreamResponse.prepare ─▶ write, per chunk of a stream ─▶ the response is finished

A client that leaves is seen in RequestHandler.connection_lost. The handler goes on, unless it writes or the server cancels handlers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import otel_infer.tracing  # noqa: F401  (loads OpenTelemetry's API, see `config.propagators`)
from otel_infer import _clock
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.http_server.exchange import TransportExchange, is_websocket
from otel_infer.instrumentation.http_server.server_exchange import can_record

EXCHANGE_KEY = "otel_infer.exchange"
Handler = Callable[[Any], Awaitable[Any]]

instrumentor = Instrumentor("aiohttp", "aiohttp", ("aiohttp.web_protocol",))


class AiohttpExchange(TransportExchange):
    """One HTTP request of aiohttp.web."""

    __slots__ = ()

    owner = "aiohttp"

    def __init__(self, incoming: Any, hook: Hook, handler: Handler) -> None:
        has_other_span = _has_middleware_of_opentelemetry(getattr(handler, "__self__", None))
        super().__init__(incoming, hook, has_other_span)
        self.is_counted_elsewhere = has_other_span

    def list_headers(self) -> list[tuple[bytes, bytes]]:
        return [(name.lower(), value) for name, value in self.incoming.raw_headers]

    def follow_handler(self, handler: Handler) -> Handler:
        """Returns the application's handler, which notes its exception, or that the response begins, on the way."""

        async def call_and_follow(incoming: Any) -> Any:
            try:
                response = await handler(incoming)
            except BaseException as exc:
                self.error = exc
                raise
            finally:
                self.record_route()
            if not getattr(response, "prepared", True):  # it is no stream
                self.record_chunk(response, _clock.now())
            return response

        return call_and_follow

    def record_response(self, response: Any, is_complete: bool) -> None:
        """Notes the status and the last byte of a response that was sent."""
        if is_complete and not self.disconnected_at:
            self.record_sent_status(response.status)
            self.completed_at = _clock.now()

    def record_route(self) -> None:
        """Notes the route that the application found."""
        try:
            route = getattr(getattr(self.incoming, "match_info", None), "route", None)
            template = getattr(getattr(route, "resource", None), "canonical", "")
            self.route = template if isinstance(template, str) else ""
        except BaseException as exc:
            self._hook.count_failure(exc)


def _has_middleware_of_opentelemetry(app: Any) -> bool:
    """Returns whether OpenTelemetry's instrumentation of aiohttp starts a SERVER span for each request of this application."""
    return any(
        str(getattr(middleware, "__module__", "")).startswith("opentelemetry.")
        for middleware in getattr(app, "middlewares", ())
    )


def _begin_exchange(incoming: Any, hook: Hook, handler: Handler) -> AiohttpExchange | None:
    """Returns the exchange that begins here; None if it is not recorded."""
    try:
        if not can_record(hook) or is_websocket(incoming.method, incoming.headers):
            return None
        exchange = AiohttpExchange(incoming, hook, handler)
        # Not by `incoming[...]`, which warns of a key that is a string. Clones of the request have this dictionary too.
        incoming._state[EXCHANGE_KEY] = exchange
        return exchange
    except BaseException as exc:
        hook.count_failure(exc)
        return None


@instrumentor.patch_hot_path(
    "aiohttp.web_protocol:RequestHandler._handle_request", reads=("request", "start_time", "request_handler")
)
def _patch_handle_request(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    async def handle_request(self: Any, request: Any, start_time: Any, request_handler: Handler) -> Any:
        exchange = _begin_exchange(request, hook, request_handler)
        if exchange is None:
            return await original(self, request, start_time, request_handler)
        with exchange:
            response, is_reset = result = await original(
                self, request, start_time, exchange.follow_handler(request_handler)
            )
            exchange.record_response(response, not is_reset)
        exchange.end()
        return result

    return handle_request


def _find_exchange(incoming: Any) -> AiohttpExchange | None:
    """Returns the exchange of a request of aiohttp; None without one, and for a request of an application's own kind."""
    state = getattr(incoming, "_state", None)
    return state.get(EXCHANGE_KEY) if isinstance(state, dict) else None


@instrumentor.patch_hot_path(
    "aiohttp.web_protocol:RequestHandler.connection_lost", optional=True, part="disconnects"
)
def _patch_connection_lost(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def connection_lost(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A server that shuts down has closed the connection by force.
        exchange = _find_exchange(getattr(self, "_current_request", None)) if hook.alive else None
        if exchange is not None and not getattr(self, "_force_close", False):
            exchange.record_disconnect()
        return original(self, *args, **kwargs)

    return connection_lost


@instrumentor.patch_hot_path("aiohttp.web_response:StreamResponse.prepare", reads=("request",), part="status")
def _patch_prepare(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    async def prepare(self: Any, request: Any) -> Any:
        result = await original(self, request)
        exchange = _find_exchange(request) if hook.alive else None
        if exchange is not None:
            exchange.record_sent_status(self.status)
        return result

    return prepare


@instrumentor.patch_hot_path("aiohttp.web_response:StreamResponse.write")
def _patch_write(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    async def write(self: Any, data: Any) -> Any:
        exchange = _find_exchange(self._req) if hook.alive else None
        request = None if exchange is None else exchange.request
        if exchange is None or request is None:
            return await original(self, data)
        began_at = _clock.now()
        exchange.record_chunk(data, began_at)
        try:
            return await original(self, data)
        finally:
            request.send_wait_ns += _clock.now() - began_at

    return write
