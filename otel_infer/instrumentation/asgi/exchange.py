"""Records one HTTP request from its arrival to its last byte, and its outcome."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from otel_infer import _clock
from otel_infer.config import tenancy
from otel_infer.instrumentation.asgi.connection_socket import find_connection_socket
from otel_infer.instrumentation.asgi.entry_point import AsgiEntryPoint
from otel_infer.instrumentation.asgi.exchange_state import Message, Scope, Send
from otel_infer.instrumentation.asgi.response import Response
from otel_infer.instrumentation.asgi.route import encode_method_and_route
from otel_infer.instrumentation.asgi.server_connection import (
    UNKNOWN_CONNECTION,
    follow_connection,
    follow_stream,
    unfollow_stream,
)
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.http_server.local_address import announce_address, record_address
from otel_infer.instrumentation.http_server.outcome import determine_outcome, unwrap_group
from otel_infer.instrumentation.http_server.parent_context import (
    Tokens,
    detach_all,
    has_active_span,
    is_current_span,
    is_remote_parent_in_other_trace,
    open_by_propagators,
    open_from_headers,
)
from otel_infer.instrumentation.http_server.socket_wait import record_socket_wait
from otel_infer.ringbuffer import events
from otel_infer.tracing import caller, context
from otel_infer.tracing.header_reader import reads_w3c_only

Receive = Callable[[], Awaitable[Message]]
App = Callable[..., Awaitable[Any]]

SCOPE_KEY = "otel_infer"
"""Scope key of the `Exchange` of a request (None if excluded), or of the `AsgiEntryPoint` of a lifespan."""
OWNER = "asgi"

_now = _clock.now


class Exchange(Response):
    """One HTTP request and its response. It raises only exceptions of the server or the application.

    Plain requests of uvicorn are created by compiled code (`_exchange.c`), which calls these methods for all
    that is not plain.
    """

    __slots__ = ()

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, hook: Hook, entry_point: AsgiEntryPoint | None
    ) -> None:
        self.arrived_at = _now()
        self.hook, self.entry_point, self.scope = hook, entry_point, scope
        self.request = None
        self.deferred = self.reached_app = False
        self.finishing = self.is_direct = self.is_timed = False
        self.status = self.disconnected_at = self.completed_at = self.started_at = 0
        self.tokens = ()
        self.root_path, self.mount_path = scope.get("root_path") or "", ""
        self.route = self.route_error = self.on_response = None
        self.server_receive, self.server_send = receive, send
        # uvicorn drops messages to a client that has left. Only `receive` and this flag show that.
        owner = getattr(send, "__self__", None)
        if type(getattr(owner, "disconnected", None)) is bool:
            self.connection, self.is_followed = owner, follow_connection(owner, self)
        else:
            self.connection, self.is_followed = UNKNOWN_CONNECTION, False
            follow_stream(send, self)
        self.receive = receive if self.is_followed else self.receive_and_record
        self.bind_send()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickles as None: where a scope goes to another process, the request is recorded in this one."""
        return type(None), ()

    def end(self, exc: BaseException | None) -> None:
        """Closes the request, if it is open, after the application has returned or raised `exc`."""
        if self.request is not None:
            self.close_request(exc)
        for token in self.tokens:
            context.detach(token)
        # Breaks reference cycles: `send` and `receive` hold this object, and `send` may hold the scope.
        self.send = self.receive = None
        if self.is_followed:
            self.connection.otel_infer_response = None
        else:
            unfollow_stream(self.server_send, self)
        self.scope.pop(SCOPE_KEY, None)

    def open_request(self, ambient: bool) -> Tokens:
        """Opens the request and makes it current. `detach_all` with the returned tokens ends that.

        `ambient`: its parent is the span that is current here, not one in its headers.
        """
        self.deferred = False
        try:
            scope, at = self.scope, self.arrived_at
            method, headers = scope.get("method"), scope.get("headers") or ()
            name = method if method in events.METHODS else events.OTHER
            request = None
            if not ambient and reads_w3c_only():
                request = open_from_headers(headers, name, OWNER, at)
            if request is None:
                request = open_by_propagators(
                    headers, name, OWNER, context.current_context() if ambient else None, at
                )
            self.request = request
            if request is not None:
                announce_address(scope.get("server"))  # before a request can end
                record_socket_wait(request, find_connection_socket(self.server_send), at)
                if caller.caller_settings is not tenancy.NO_CALLER_SETTINGS:
                    caller.record_caller(request, headers, str(self.scope.get("path", "")))
                return (request.attach(),)
        except BaseException as exc:
            self.hook.count_failure(exc)
        return ()

    def enter_router(self) -> Tokens:
        """Opens a deferred request. It is past all middleware, so no span above it can start any more."""
        try:
            ambient = has_active_span() and not is_remote_parent_in_other_trace(self.scope)
        except Exception as exc:
            self.hook.count_failure(exc)
            return ()
        return self.open_request(ambient)

    # ── on the way in ────────────────────────────────────────────────────────────────────────────────────────────

    def enter_application(self, app: Any) -> Tokens:
        """Records that a patched application was reached. Opens a deferred request below a current span.

        Only the outermost of several applications counts.
        """
        if self.reached_app:
            return ()
        try:
            self.reached_app = True
            self.root_path = getattr(app, "root_path", "") or self.root_path
            if self.deferred:
                return (
                    self.open_request(ambient=True)
                    if has_active_span() and not is_remote_parent_in_other_trace(self.scope)
                    else ()
                )
            if self.entry_point is not None:
                self.entry_point.enter_application(app)
                if context.current_context().get(context.SPAN_KEY) is not self.request:
                    self.entry_point.has_tracer = self.entry_point.has_tracer or not is_current_span(
                        self.request
                    )
        except BaseException as exc:
            self.hook.count_failure(exc)
        return ()

    def record_route_error(self, exc: Exception) -> None:
        """Stores an exception that left the routes before the last byte was sent."""
        if self.request is not None and not self.finishing:
            self.route_error = exc

    # ── on the way out ───────────────────────────────────────────────────────────────────────────────────────────

    async def receive_and_record(self) -> Message:
        """Calls the server's `receive`, and records a disconnect of the client."""
        message = await self.server_receive()
        try:
            # From the last byte on, servers report "disconnect" also for clients that got the full response.
            if message.get("type") == "http.disconnect" and not self.finishing:
                self.disconnected_at = self.disconnected_at or _now()
        except BaseException as exc:
            self.abandon_request(exc)
        return message

    def open_deferred_request(self) -> None:
        """Opens a deferred request at the start of its response: a middleware responds."""
        self.deferred = False
        if not has_active_span():
            detach_all(self.open_request(ambient=False))

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def close_request(self, exc: BaseException | None) -> None:
        """Closes the request, once. `exc`: the exception that left the application, or None."""
        request, self.request = self.request, None
        if request is None:
            return
        try:
            route_error, self.route_error = self.route_error, None
            outcome, error_type = events.OK, ""
            failed = exc is not None or route_error is not None or self.status >= 500
            if failed or self.disconnected_at or not self.completed_at:
                outcome, error_type = self._determine_outcome(
                    unwrap_group(exc or (route_error if self.status < 300 else None))
                )
            at = self.disconnected_at or self.completed_at
            if self.is_direct:
                request.chunks = 0  # not all were seen
            http, route = 0, ""
            if request.has_server:
                http, route = encode_method_and_route(self.scope, self.route, self.root_path, self.mount_path)
                record_address(request, self.scope.get("server"))
            if self.started_at:
                if self.started_at == at - request.send_wait_ns:
                    http |= events.SINGLE_CHUNK
                else:
                    request.record_event(events.ResponseStarted(self.started_at))
            request.close(outcome, error_type, self.status, at, http, route)
        except BaseException as own_exc:
            self.request = request
            self.abandon_request(own_exc)

    def _determine_outcome(self, exc: BaseException | None) -> tuple[int, str]:
        """Returns outcome and error type. Sets a missing `status` and the instant of a disconnect."""
        if not self.completed_at and self.connection.disconnected:
            self.disconnected_at = self.disconnected_at or _now()
        if self.disconnected_at or type(exc).__name__ == "ClientDisconnect":
            return events.ABORTED, events.CLIENT_DISCONNECT
        if isinstance(exc, (asyncio.CancelledError, GeneratorExit)):
            # A server that reports disconnects cancels only because it shuts down.
            return (
                events.ABORTED,
                events.CANCELLED if self.reports_disconnects() else events.CLIENT_DISCONNECT,
            )
        # Servers send 500 if the application sent nothing.
        sent_status, self.status = self.status, self.status or 500
        return determine_outcome(exc, sent_status, bool(self.completed_at))

    def abandon_request(self, exc: BaseException) -> None:
        """Closes the request after our own code raised: neither a success nor an error. Its slot is freed."""
        request, self.request = self.request, None
        if request is not None:
            with contextlib.suppress(BaseException):  # `exc` is the exception to be logged
                request.close(events.ABORTED, events.CANCELLED)
        self.hook.count_failure(exc)
