"""Records HTTP requests of Sanic's own server, and the routes of Sanic on an ASGI server.

    HttpProtocol.request_handler ─▶ handler ─▶ BaseHTTPResponse.send, per chunk ─▶ the response is finished

Sanic rewrites `handle_request` when it starts, so the server's reference to it is wrapped instead.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Awaitable, Callable
from typing import Any

import otel_infer.tracing  # noqa: F401  (loads OpenTelemetry's API, see `config.propagators`)
from otel_infer import _clock
from otel_infer.instrumentation.asgi.exchange import SCOPE_KEY
from otel_infer.instrumentation.asgi.route import RouteTemplate
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.http_server.app_attribute import patch_app_attribute
from otel_infer.instrumentation.http_server.exchange import TransportExchange, is_websocket
from otel_infer.instrumentation.http_server.server_exchange import can_record, encode_headers
from otel_infer.ringbuffer import events

RequestHandler = Callable[[Any], Awaitable[Any]]

instrumentor = Instrumentor("sanic", "sanic", ("sanic.server.protocols.http_protocol",))


class SanicExchange(TransportExchange):
    """One HTTP request of Sanic's own server."""

    __slots__ = ()

    owner = "sanic"

    def list_headers(self) -> list[tuple[bytes, bytes]]:
        return encode_headers(self.incoming.headers.items())

    def record_response(self) -> None:
        """Notes status and the last byte of a response that was sent."""
        try:
            stream = self.incoming.stream
            response = None if stream is None else stream.response
            if response is not None and not self.has_client_left(None):
                self.status, self.completed_at = int(response.status), _clock.now()
        except BaseException as exc:
            self._hook.count_failure(exc)

    def record_route(self) -> None:
        """Notes the route that Sanic found, and whether the connection was lost."""
        try:
            self.route = _find_template(self.incoming)
            if getattr(self.incoming.conn_info, "lost", False):
                self.record_disconnect()
        except BaseException as exc:
            self._hook.count_failure(exc)

    def _determine_outcome(self, exc: BaseException | None) -> tuple[int, str]:
        """Returns outcome and error type. Where Sanic cancels for its response timeout, it answers with an error then."""
        stream = self.incoming.stream if isinstance(exc, CancelledError) else None
        answered = getattr(stream, "exception", None)
        if answered is None or self.has_client_left(exc):
            return super()._determine_outcome(exc)
        self.status = self.status or int(answered.status_code)
        return events.ABORTED, events.TIMEOUT


def _find_template(incoming: Any) -> str:
    """Returns the template of the route that Sanic found; empty if it found none."""
    template = getattr(getattr(incoming, "route", None), "path", None)
    return f"/{template.lstrip('/')}" if isinstance(template, str) else ""


def _begin_exchange(incoming: Any, hook: Hook) -> SanicExchange | None:
    """Returns the exchange that begins here; None if it is not recorded."""
    try:
        if not can_record(hook) or is_websocket(incoming.method, incoming.headers):
            return None
        exchange = incoming.ctx.otel_infer_exchange = SanicExchange(incoming, hook)
        return exchange
    except BaseException as exc:
        hook.count_failure(exc)
        return None


def _wrap_handler(handler: RequestHandler, hook: Hook) -> RequestHandler:
    async def handle_request(request: Any) -> Any:
        exchange = _begin_exchange(request, hook)
        if exchange is None:
            return await handler(request)
        with exchange:
            try:
                result = await handler(request)
                exchange.record_response()
            finally:
                exchange.record_route()
        exchange.end()
        return result

    return handle_request


instrumentor.patch_hot_path("sanic.server.protocols.http_protocol:HttpProtocol.__init__")(
    patch_app_attribute("request_handler", _wrap_handler)
)


def _find_exchange(request: Any) -> Any:
    return getattr(getattr(request, "ctx", None), "otel_infer_exchange", None)


@instrumentor.patch_hot_path("sanic.handlers.error:ErrorHandler.response", reads=("request", "exception"))
def _patch_error_response(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def make_response(self: Any, request: Any, exception: BaseException) -> Any:
        exchange = _find_exchange(request) if hook.alive else None
        if exchange is not None:
            exchange.error = exception
        return original(self, request, exception)

    return make_response


@instrumentor.patch_hot_path("sanic.response.types:BaseHTTPResponse.send", part="streams")
def _patch_send(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    async def send(self: Any, *args: Any, **kwargs: Any) -> Any:
        incoming = getattr(self.stream, "request", None) if hook.alive else None
        exchange = _find_exchange(incoming)
        request = None if exchange is None else exchange.request
        if exchange is None or request is None:
            if incoming is not None:
                _note_route_on_asgi(incoming, hook)
            return await original(self, *args, **kwargs)
        began_at = _clock.now()
        exchange.record_sent_status(self.status)
        exchange.record_chunk(self, began_at)
        try:
            return await original(self, *args, **kwargs)
        finally:
            request.send_wait_ns += _clock.now() - began_at

    return send


def _note_route_on_asgi(incoming: Any, hook: Hook) -> None:
    """Notes the route of a request that an ASGI server received, before its response begins."""
    try:
        scope = getattr(incoming.transport, "scope", None)
        exchange = scope.get(SCOPE_KEY) if isinstance(scope, dict) else None
        template = _find_template(incoming)
        if exchange is not None and template:
            exchange.route = RouteTemplate(template)
    except Exception as exc:
        hook.count_failure(exc)
