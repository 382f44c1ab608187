"""Records HTTP requests of ASGI servers: their arrival, the parts of the response, and their outcome.

A request passes up to three places. The first one it reaches is its arrival and also records its end:

* the *entry point*, where the server calls the application (uvicorn, hypercorn, `wrap`).
* the *application*, if it is a Starlette or a FastAPI.
* the *router* inside it, behind all middleware.

Where the compiled module was built, these places are compiled too, and complete the plain requests of uvicorn
(`plain_requests`). The code here knows all cases.

The request is normally opened on arrival, so that it includes the middleware. It is deferred if another HTTP
instrumentation may start a SERVER span further in. Then it is opened where that span is current, as its
child.

A request whose method usually infers nothing has no span, unless it reaches a model. It is counted, once there are rings.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Awaitable
from typing import Any

import otel_infer.tracing  # noqa: F401  (loads OpenTelemetry's API, see `config.propagators`)
from otel_infer.instrumentation.asgi import response_headers, server_connection
from otel_infer.instrumentation.asgi.entry_point import AsgiEntryPoint
from otel_infer.instrumentation.asgi.exchange import SCOPE_KEY, App, Exchange, Receive
from otel_infer.instrumentation.asgi.exchange_state import Scope, Send
from otel_infer.instrumentation.asgi.lifespan import Lifespan
from otel_infer.instrumentation.asgi.plain_requests import (
    compile_asgi_hook,
    compile_entry_point,
    invalidate_plain_requests,
    renew_plain_requests,
)
from otel_infer.instrumentation.asgi.untraced_exchange import UntracedExchange
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.http_server import event_loop_lag
from otel_infer.instrumentation.http_server.app_attribute import patch_app_attribute
from otel_infer.instrumentation.http_server.parent_context import (
    detach_all,
    has_active_span,
    has_provider,
    is_remote_parent_in_other_trace,
)
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import request_span

MODULES = (
    "starlette.applications",
    "fastapi.routing",
    "litestar.routes.http",
    "uvicorn.config",
    "hypercorn.app_wrappers",
)
ASGI_PARAMETERS = ("scope", "receive", "send")
_UNTRACED_METHODS = frozenset(events.UNTRACED_METHODS)

log = logging.getLogger(__name__)
instrumentor = Instrumentor("asgi", "starlette", MODULES)
_excluded: tuple[re.Pattern[str], ...] = ()


def configure_asgi(excluded_urls: str, add_headers: bool = False) -> None:
    """Sets which requests are not recorded, and whether responses get tracing headers.

    `excluded_urls`: comma-separated regular expressions. A request is excluded if one is found in its URL.
    `add_headers`: responses carry the span's ids and the time to the response start in headers.
    """
    global _excluded
    response_headers.enabled = add_headers
    invalidate_plain_requests()
    patterns = []
    for pattern in filter(None, map(str.strip, excluded_urls.split(","))):
        try:
            patterns.append(re.compile(pattern))
        except re.error as exc:
            log.warning(
                "OTEL_PYTHON_[OTEL_INFER_]EXCLUDED_URLS: %r is ignored, not a regular expression (%s)",
                pattern,
                exc,
            )
    _excluded = tuple(patterns)


def wrap(app: App) -> App:
    """Returns an ASGI application that records the requests of `app`, for a server that has no hooks.

    Wrapping an application twice records each request once.
    """
    return _wrap_app(app, Hook("otel_infer.instrumentation.asgi:wrap"), AsgiEntryPoint())


def _make_entry_point(app: App, hook: Hook) -> App:
    """Returns the application that a server calls in place of `app`; compiled, if that was built."""
    entry_point = AsgiEntryPoint()
    return compile_entry_point(app, hook, entry_point, _wrap_app(app, hook, entry_point))


def _wrap_app(app: App, hook: Hook, entry_point: AsgiEntryPoint) -> App:
    async def traced_app(scope: Scope, receive: Receive, send: Send) -> Any:
        exchange = _begin_exchange(scope, receive, send, hook, entry_point)
        if exchange is None:
            if scope.get("type") == "lifespan" and hook.alive and recorder.active:
                return await Lifespan(send, hook).run(app, scope, receive)
            return await app(scope, receive, send)
        try:
            result = await app(scope, exchange.receive, exchange.send)
        except BaseException as exc:
            exchange.end(exc)
            raise
        exchange.end(None)
        return result

    return traced_app


def _begin_exchange(
    scope: Scope, receive: Receive, send: Send, hook: Hook, entry_point: AsgiEntryPoint | None
) -> Exchange | UntracedExchange | None:
    """Returns the exchange that begins here; None if it is not recorded, or recorded already further out.

    `entry_point`: None if the exchange begins at the application, which then opens the request itself.
    """
    try:
        kind = scope.get("type")
        if kind != "http" or SCOPE_KEY in scope:
            if kind == "lifespan" and entry_point is not None:
                scope.setdefault(SCOPE_KEY, entry_point)
            return None
        if not hook.alive or not recorder.active or request_span.span_factory is None:
            return None
        if _excluded and _is_excluded(scope):
            scope[SCOPE_KEY] = None
            return None
        if scope.get("method") in _UNTRACED_METHODS:
            scope[SCOPE_KEY] = untraced = UntracedExchange(scope, receive, send, hook)
            return untraced
        exchange = Exchange(scope, receive, send, hook, entry_point)
        scope[SCOPE_KEY] = exchange
        if entry_point is None:
            exchange.deferred = has_provider() and not has_active_span()
            event_loop_lag.watch_event_loop()
            return exchange
        exchange.deferred = entry_point.reached_app and (entry_point.has_tracer or has_provider())
        if not exchange.deferred:
            exchange.tokens = exchange.open_request(ambient=False)
            if not _excluded:
                renew_plain_requests(exchange)
        if not entry_point.is_watched:
            event_loop_lag.watch_event_loop(entry_point)
        return exchange
    except BaseException as exc:
        hook.count_failure(exc)
        return None


instrumentor.patch_hot_path("uvicorn.config:Config.load", part="uvicorn")(
    patch_app_attribute("loaded_app", _make_entry_point)
)
instrumentor.patch_hot_path("hypercorn.app_wrappers:ASGIWrapper.__init__", part="hypercorn")(
    patch_app_attribute("app", _make_entry_point)
)
server_connection.register_hooks(instrumentor)


@instrumentor.patch_hot_path(
    "starlette.applications:Starlette.__call__", reads=ASGI_PARAMETERS, part="starlette"
)
def _patch_application(original: App, hook: Hook) -> App:
    # A coroutine function, because servers check for one.
    async def call_application(self: Any, scope: Scope, receive: Receive, send: Send) -> Any:
        outer = scope.get(SCOPE_KEY)
        if outer is None:
            exchange = _begin_exchange(scope, receive, send, hook, None)
            if exchange is not None:
                exchange.enter_application(self)
                if isinstance(exchange, Exchange) and not exchange.deferred:
                    is_below = has_active_span() and not is_remote_parent_in_other_trace(scope)
                    exchange.tokens = exchange.open_request(ambient=is_below)
                try:
                    result = await original(self, scope, exchange.receive, exchange.send)
                except BaseException as exc:
                    exchange.end(exc)
                    raise
                exchange.end(None)
                return result
            if scope.get("type") == "lifespan" and hook.alive and recorder.active:
                return await Lifespan(send, hook).run(functools.partial(original, self), scope, receive)
            return await original(self, scope, receive, send)
        tokens = outer.enter_application(self) if hook.alive and not outer.reached_app else ()
        try:
            return await original(self, scope, receive, send)
        finally:
            if tokens:
                detach_all(tokens)

    return compile_asgi_hook("application", original, hook, call_application)


@instrumentor.patch_hot_path("starlette.routing:Router.__call__", reads=ASGI_PARAMETERS, part="starlette")
def _patch_router(original: App, hook: Hook) -> App:
    async def call_router(self: Any, scope: Scope, receive: Receive, send: Send) -> Any:
        outer = scope.get(SCOPE_KEY)
        if outer is None or not hook.alive:
            return await original(self, scope, receive, send)
        tokens = outer.enter_router() if outer.deferred else ()
        try:
            return await original(self, scope, receive, send)
        except Exception as exc:
            outer.record_route_error(exc)
            raise
        finally:
            if tokens:
                detach_all(tokens)

    return compile_asgi_hook("router", original, hook, call_router)


def _patch_route(original: App, hook: Hook) -> App:
    """Returns a wrapper that stores the matched route on the exchange."""

    def handle_route(self: Any, scope: Scope, receive: Receive, send: Send) -> Awaitable[Any]:
        exchange = scope.get(SCOPE_KEY)
        if exchange is not None and hook.alive:
            exchange.route = self
        return original(self, scope, receive, send)

    return compile_asgi_hook("route", original, hook, handle_route)


def _patch_included_route(original: App, hook: Hook) -> App:
    """Returns a wrapper that stores FastAPI's matched route on the exchange.

    From FastAPI 0.137 on, a route of an included router lacks the prefix of its router.
    """

    def handle_route(self: Any, scope: Scope, receive: Receive, send: Send) -> Awaitable[Any]:
        exchange = scope.get(SCOPE_KEY)
        if exchange is not None and hook.alive:
            try:
                effective = scope.get("fastapi", {}).get("effective_route_context")
                exchange.route = effective if getattr(effective, "original_route", None) is self else self
            except BaseException as exc:
                hook.count_failure(exc)
        return original(self, scope, receive, send)

    return compile_asgi_hook("included route", original, hook, handle_route)


def _patch_mount(original: App, hook: Hook) -> App:
    """Returns a wrapper that adds the path of a mounted application to the exchange."""

    def handle_mount(self: Any, scope: Scope, receive: Receive, send: Send) -> Awaitable[Any]:
        exchange = scope.get(SCOPE_KEY)
        if exchange is not None and hook.alive:
            try:
                exchange.mount_path += self.path_format.removesuffix("/{path}")
                exchange.route = None
            except BaseException as exc:
                hook.count_failure(exc)
        return original(self, scope, receive, send)

    return handle_mount


for _target, _patch, _part in (
    ("starlette.routing:Route.handle", _patch_route, "starlette"),
    ("starlette.routing:Mount.handle", _patch_mount, "starlette"),
    ("fastapi.routing:APIRoute.handle", _patch_included_route, "fastapi"),
    ("litestar.routes.http:HTTPRoute.handle", _patch_route, "litestar"),
):
    instrumentor.patch_hot_path(_target, reads=ASGI_PARAMETERS, optional=True, part=_part)(_patch)


def _is_excluded(scope: Scope) -> bool:
    """Returns whether the URL without its query is excluded, as in `opentelemetry.util.http.ExcludeList`."""
    host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
    if not host:
        name, port = scope.get("server") or ("0.0.0.0", 80)
        host = name if port in (None, 80) else f"{name}:{port}"
    url = f"{scope.get('scheme', 'http')}://{host}{scope.get('path', '')}"
    return any(pattern.search(url) for pattern in _excluded)
