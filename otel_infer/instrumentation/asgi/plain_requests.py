"""Lets compiled code record the plain requests of uvicorn (`_exchange.c`), where it was built.

    first request ─▶ Python code ─▶ renew ─▶ the others are recorded by compiled code, which renews once a second

A request is plain if nothing beyond the standard case applies. What does not differ from request to request is
checked here: the settings, the propagators, the provider, the sampler, and that the hooks on the connection work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from opentelemetry.context import Context

from otel_infer.config import tenancy
from otel_infer.instrumentation.asgi import response_headers
from otel_infer.instrumentation.asgi.entry_point import AsgiEntryPoint
from otel_infer.instrumentation.asgi.exchange import OWNER, SCOPE_KEY, App, Exchange
from otel_infer.instrumentation.asgi.server_connection import can_follow
from otel_infer.instrumentation.hooks.compiled_hook import compile_hook
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.http_server.local_address import announce_address
from otel_infer.instrumentation.http_server.parent_context import has_provider
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.native import native
from otel_infer.ringbuffer.recorder import CHECK_NS, recorder
from otel_infer.tracing import caller, context, request_span
from otel_infer.tracing.header_reader import reads_w3c_only
from otel_infer.tracing.span_ids import LazySpanIds, RemoteParent


def _make_identity(ids: tuple[bytes, bytes, bytes, bytes], flags: int, remote: RemoteParent) -> LazySpanIds:
    return LazySpanIds(ids, flags, True, remote)


def _make_plain_requests() -> Any:
    if native is None or context.variable is None:
        return None
    methods = {
        method: {scheme: events.HTTP_CODES[method, scheme] for scheme in events.SCHEMES if scheme}
        for method in events.METHODS
        if method not in (events.OTHER, *events.UNTRACED_METHODS)
    }
    codes = tuple(
        events.LAYOUT_BY_EVENT[event].code
        for event in (events.ResponseStarted, events.FirstTokenSent, events.ExchangeEnded)
    )
    return native.PlainRequests(
        Exchange,
        request_span.RequestSpan,
        Context,
        context.variable,
        request_span.REQUEST_KEY,
        context.SPAN_KEY,
        SCOPE_KEY,
        methods,
        OWNER,
        _make_identity,
        recorder.run_deferred_recorders,
        _renew_again,
        codes,
        events.OWN_SERVER_SPAN,
    )


def _renew_again(connection: Any, at: int) -> None:
    """Maintains the recorder, then lets further requests be plain, if they still are: with the first of a second."""
    if recorder.requests is not None and recorder.active and can_follow(connection):
        recorder.run_maintenance(at)
        _renew(connection)


_plain: Any = _make_plain_requests()
"""What compiled code knows about plain requests; None where it is not built."""


def renew_plain_requests(exchange: Exchange) -> None:
    """Lets requests like this one be recorded by compiled code, until the recorder is due for maintenance."""
    if _plain is not None and exchange.is_followed and exchange.arrived_at > _plain.valid_until:
        _renew(exchange.connection)


def _renew(connection: Any) -> None:
    factory, writer = request_span.span_factory, recorder.requests
    if factory is None or factory.plain_sampler is None or writer is None or writer.compiled is None:
        return
    if response_headers.enabled or caller.caller_settings is not tenancy.NO_CALLER_SETTINGS:
        return
    if recorder.active and reads_w3c_only() and not has_provider():
        until = recorder.maintained_at + CHECK_NS
        server = announce_address(connection.scope.get("server"))
        _plain.renew(writer.compiled, type(connection), until, *factory.plain_sampler, server)


def invalidate_plain_requests() -> None:
    """Lets the next request be recorded by Python code, because a setting has changed."""
    if _plain is not None:
        _plain.invalidate()


def compile_entry_point(app: App, hook: Hook, entry_point: AsgiEntryPoint, call: App) -> App:
    """Returns the entry point as a compiled application, which calls `call` for all that is not plain; or `call`."""
    if _plain is None:
        return call
    entry_point.plain, entry_point.app, entry_point.hook, entry_point.call_slowly = _plain, app, hook, call
    # Other libraries look there for a coroutine function, before they wrap the application.
    setattr(entry_point, "__call__", call)  # noqa: B010  (an attribute of the instance, which no call uses)
    for name in ("__name__", "__qualname__", "__code__", "__defaults__", "__kwdefaults__"):
        setattr(entry_point, name, getattr(call, name))
    compiled: Any = entry_point
    return cast("App", compiled)


def compile_asgi_hook(place: str, original: App, hook: Hook, call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a compiled form of the hook `call`, which calls it for all that is not plain; or `call` itself."""
    return compile_hook(place, _plain, original, hook, call)
