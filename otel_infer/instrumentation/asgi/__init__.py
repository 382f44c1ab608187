"""HTTP requests of ASGI servers: when they arrive, what their client is sent and when, and how they end.

A request is seen at three places, of which the first that it comes to is its arrival and hears how it ends:

* the *front*, where the server calls the application (uvicorn, hypercorn, `wrap`);
* the *application*, if it is a Starlette or a FastAPI;
* the *router* inside it, past all middleware.

It is opened there at once, so that middleware is inside it too, unless an HTTP instrumentation may be about to start a
SERVER span further in: then it is opened where that span is current, as its child.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any

from otel_infer.instrumentation.asgi import event_loop_lag, response_headers
from otel_infer.instrumentation.asgi.exchange import SCOPE_KEY, App, Exchange, Receive, Scope, Send
from otel_infer.instrumentation.asgi.lifespan import Lifespan
from otel_infer.instrumentation.asgi.parent_context import (
    AsgiEntryPoint,
    detach_all,
    has_active_span,
    has_provider,
    is_caller_in_other_trace,
)
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook, WrapperFactory
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import request_span

MODULES = ("starlette.applications", "fastapi.routing", "uvicorn.config", "hypercorn.app_wrappers")
ASGI_PARAMETERS = ("scope", "receive", "send")
IGNORED_METHODS = frozenset(("GET", "HEAD", "OPTIONS", "DELETE", "TRACE", "CONNECT"))

log = logging.getLogger(__name__)
instrumentor = Instrumentor("asgi", "starlette", MODULES)
_excluded: tuple[re.Pattern[str], ...] = ()


def configure_asgi(excluded_urls: str, tell_client: bool = False) -> None:
    """Leaves requests alone in whose URL one of these comma-separated regular expressions is found.

    `tell_client`: responses say in headers whose span they are, and how long they took to start.
    """
    global _excluded
    response_headers.enabled = tell_client
    kept = []
    for pattern in filter(None, map(str.strip, excluded_urls.split(","))):
        try:
            kept.append(re.compile(pattern))
        except re.error as error:
            log.warning("excluded URL %r is ignored: it is no regular expression (%s)", pattern, error)
    _excluded = tuple(kept)


def wrap(app: App) -> App:
    """The ASGI application, watched, for a server that we do not hook. Wrapping twice watches once."""
    return _wrap_app(app, Hook("otel_infer.instrumentation.asgi:wrap"))


def _wrap_app(app: App, hook: Hook) -> App:
    door = AsgiEntryPoint()

    async def traced_app(scope: Scope, receive: Receive, send: Send) -> Any:
        exchange = _begin_exchange(scope, receive, send, hook, door)
        if exchange is not None:
            with exchange:
                return await app(scope, exchange.receive, exchange.send)
        if scope.get("type") == "lifespan" and hook.alive and recorder.active:
            return await Lifespan(send, hook).run(app, scope, receive)
        return await app(scope, receive, send)

    return traced_app


def _begin_exchange(
    scope: Scope, receive: Receive, send: Send, hook: Hook, door: AsgiEntryPoint | None
) -> Exchange | None:
    """The exchange that begins here; None if there is none to be watched, or it is watched already."""
    try:
        kind = scope.get("type")
        if kind != "http" or scope.get("method") in IGNORED_METHODS or SCOPE_KEY in scope:
            if kind == "lifespan" and door is not None:
                scope.setdefault(SCOPE_KEY, door)
            return None
        if not hook.alive or not recorder.active or request_span.span_factory is None:
            return None
        exchange = Exchange(scope, receive, send, hook, door)
        if _excluded and _is_excluded(scope):
            scope[SCOPE_KEY] = None
            return None
        if door is None:
            exchange.deferred = has_provider() and not has_active_span()
        else:
            exchange.deferred = door.reached_app and (door.has_tracer or has_provider())
        scope[SCOPE_KEY] = exchange
        _watch_loop(door, exchange.arrived_at)
        return exchange
    except BaseException as exc:
        hook.mark_failed(exc)
        return None


def _patch_app_attribute(attribute: str) -> WrapperFactory:
    """Puts a front before the application that an object holds under this name after the call."""

    def make_wrapper(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        def call_and_wrap_app(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            try:
                if hook.alive:
                    setattr(self, attribute, _wrap_app(getattr(self, attribute), hook))
            except BaseException as exc:
                hook.mark_failed(exc)
            return result

        return call_and_wrap_app

    return make_wrapper


instrumentor.patch_hot_path("uvicorn.config:Config.load", part="uvicorn")(_patch_app_attribute("loaded_app"))
instrumentor.patch_hot_path("hypercorn.app_wrappers:ASGIWrapper.__init__", part="hypercorn")(
    _patch_app_attribute("app")
)


@instrumentor.patch_hot_path(
    "starlette.applications:Starlette.__call__", reads=ASGI_PARAMETERS, part="starlette"
)
def _patch_application(original: App, hook: Hook) -> App:
    # A coroutine function, because servers look whether it is one.
    async def call_application(self: Any, scope: Scope, receive: Receive, send: Send) -> Any:
        seen = scope.get(SCOPE_KEY)
        if seen is None:
            exchange = _begin_exchange(scope, receive, send, hook, None)
            if exchange is not None:
                exchange.enter_application(self)
                is_below = not exchange.deferred and has_active_span()
                exchange.ambient = is_below and not is_caller_in_other_trace(scope)
                with exchange:
                    return await original(self, scope, exchange.receive, exchange.send)
            if scope.get("type") == "lifespan" and hook.alive and recorder.active:
                return await Lifespan(send, hook).run(functools.partial(original, self), scope, receive)
            return await original(self, scope, receive, send)
        tokens = seen.enter_application(self) if hook.alive and not seen.reached_app else ()
        try:
            return await original(self, scope, receive, send)
        finally:
            if tokens:
                detach_all(tokens)

    return call_application


@instrumentor.patch_hot_path("starlette.routing:Router.__call__", reads=ASGI_PARAMETERS, part="starlette")
def _patch_router(original: App, hook: Hook) -> App:
    async def call_router(self: Any, scope: Scope, receive: Receive, send: Send) -> Any:
        seen = scope.get(SCOPE_KEY)
        if seen is None or not hook.alive:
            return await original(self, scope, receive, send)
        tokens = seen.enter_router() if seen.deferred else ()
        try:
            return await original(self, scope, receive, send)
        except Exception as exc:
            seen.record_route_error(exc)
            raise
        finally:
            if tokens:
                detach_all(tokens)

    return call_router


def _patch_route_handler(note: Callable[[Exchange, Any, Scope], None]) -> WrapperFactory:
    """Notes on the exchange what a route says of itself."""

    def make_wrapper(original: App, hook: Hook) -> App:
        def handle_route(self: Any, scope: Scope, receive: Receive, send: Send) -> Awaitable[Any]:
            seen = scope.get(SCOPE_KEY)
            if seen is not None and hook.alive:
                try:
                    note(seen, self, scope)
                except BaseException as exc:
                    hook.mark_failed(exc)
            return original(self, scope, receive, send)

        return handle_route

    return make_wrapper


def _set_route(exchange: Exchange, route: Any, scope: Scope) -> None:
    exchange.route = route


def _add_mount(exchange: Exchange, mount: Any, scope: Scope) -> None:
    exchange.mount_path += mount.path_format.removesuffix("/{path}")
    exchange.route = None


def _set_included_route(exchange: Exchange, route: Any, scope: Scope) -> None:
    # From FastAPI 0.137 on, a route of an included router does not know its prefix.
    effective = scope.get("fastapi", {}).get("effective_route_context")
    exchange.route = effective if getattr(effective, "original_route", None) is route else route


for _target, _note, _part in (
    ("starlette.routing:Route.handle", _set_route, "starlette"),
    ("starlette.routing:Mount.handle", _add_mount, "starlette"),
    ("fastapi.routing:APIRoute.handle", _set_included_route, "fastapi"),
):
    instrumentor.patch_hot_path(_target, reads=ASGI_PARAMETERS, optional=True, part=_part)(
        _patch_route_handler(_note)
    )


def _watch_loop(door: AsgiEntryPoint | None, now: int) -> None:
    """Has the event loop watched; a front asks for it once in a while, since the timer runs that long at least."""
    if door is None:
        event_loop_lag.watch_event_loop()
    elif now > door.watched_until:
        event_loop_lag.watch_event_loop()
        door.watched_until = now + event_loop_lag.CHECK_INTERVAL_NS // 2


def _is_excluded(scope: Scope) -> bool:
    """By the URL without its query, as `opentelemetry.util.http.ExcludeList` is given it."""
    host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
    if not host:
        name, port = scope.get("server") or ("0.0.0.0", 80)
        host = name if port in (None, 80) else f"{name}:{port}"
    url = f"{scope.get('scheme', 'http')}://{host}{scope.get('path', '')}"
    return any(pattern.search(url) for pattern in _excluded)
