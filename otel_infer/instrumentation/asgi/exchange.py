"""Records one HTTP request from its arrival to its last byte, and its outcome."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from otel_infer import _clock
from otel_infer.config import tenancy
from otel_infer.instrumentation.asgi import response_headers
from otel_infer.instrumentation.asgi.outcome import determine_outcome, unwrap_group
from otel_infer.instrumentation.asgi.parent_context import (
    AsgiEntryPoint,
    Tokens,
    clear_span_and_baggage,
    detach_all,
    extract_context,
    has_active_span,
    is_current_span,
    is_remote_parent_in_other_trace,
    parse_remote_parent,
)
from otel_infer.instrumentation.asgi.route import encode_method_and_route
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.ringbuffer import events
from otel_infer.tracing import caller, context, request_span, start

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[..., Awaitable[Any]]

SCOPE_KEY = "otel_infer"
"""Scope key of the `Exchange` of a request (None if excluded), or of the `AsgiEntryPoint` of a lifespan."""
OWNER = "asgi"

_now = _clock.now


class _UnknownConnection:
    """Stands for a server that does not report whether its client is still connected."""

    def __init__(self) -> None:
        self.disconnected = False


_UNKNOWN_CONNECTION = _UnknownConnection()


class Exchange:
    """One HTTP request and its response. It raises only exceptions of the server or the application.

    `route_error`: the exception that left the routes during the response. Middleware of Starlette may still
    complete such a response normally.
    `ambient`: the parent is the span that is current where the exchange begins.
    `deferred`: the request is to be opened further in. `finishing`: the last byte is being sent or was sent.
    `disconnected_at`, `completed_at`: when the client was found to be gone, and when the last byte was handed
    over; monotonic ns, 0 = not yet.
    """

    __slots__ = (
        "_receive",
        "_response_started_at",
        "_send",
        "_server",
        "_tokens",
        "ambient",
        "arrived_at",
        "completed_at",
        "deferred",
        "disconnected_at",
        "entry_point",
        "finishing",
        "hook",
        "mount_path",
        "reached_app",
        "request",
        "root_path",
        "route",
        "route_error",
        "scope",
        "status",
    )

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, hook: Hook, entry_point: AsgiEntryPoint | None
    ) -> None:
        self.arrived_at = _now()
        self.hook, self.entry_point, self.scope = hook, entry_point, scope
        self.request: request_span.RequestSpan | None = None
        self.ambient = self.deferred = self.reached_app = self.finishing = False
        self.status = self.disconnected_at = self.completed_at = self._response_started_at = 0
        self._tokens: Tokens = ()
        self.root_path, self.mount_path = scope.get("root_path") or "", ""
        self.route: Any = None
        self.route_error: Exception | None = None
        self._receive, self._send = receive, send
        # uvicorn drops messages to a client that has left. Only `receive` and this flag show that.
        server = getattr(send, "__self__", None)
        self._server: Any = _UNKNOWN_CONNECTION
        if server is not None and type(getattr(server, "disconnected", None)) is bool:
            self._server = server

    def __enter__(self) -> Exchange:
        """Opens the request, unless it is deferred. The application is called inside of this scope."""
        if not self.deferred:
            self._tokens = self.open_request(self.ambient)
        return self

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        if self.request is not None:
            self.close_request(exc)
        detach_all(self._tokens)
        # Breaks a reference cycle: `send` may hold the scope, and the scope would hold this object.
        self.scope.pop(SCOPE_KEY, None)

    def open_request(self, ambient: bool) -> Tokens:
        """Opens the request and makes it current. `detach_all` with the returned tokens ends that."""
        self.deferred = False
        try:
            scope, at = self.scope, self.arrived_at
            method, headers = scope.get("method"), scope.get("headers") or ()
            name = method if method in events.METHODS else events.OTHER
            remote_parent = None if ambient else parse_remote_parent(headers)
            if remote_parent is not None:
                request = start.open_request_below_remote(
                    remote_parent, name, OWNER, clear_span_and_baggage(context.current_context()), at
                )
            else:
                around = (
                    None
                    if ambient
                    else extract_context(headers, clear_span_and_baggage(context.current_context()))
                )
                request = start.open_request(name, owner=OWNER, around=around, server=True, arrived_at=at)
            self.request = request
            if request is not None:
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
                self.entry_point.reached_app = True
                if context.current_span() is not self.request:
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

    async def receive(self) -> Message:
        """Calls the server's `receive`, and records a disconnect of the client."""
        message = await self._receive()
        try:
            # From the last byte on, servers report "disconnect" also for clients that got the full response.
            if message.get("type") == "http.disconnect" and not self.finishing:
                self.disconnected_at = self.disconnected_at or _now()
        except BaseException as exc:
            self._abandon_request(exc)
        return message

    async def send(self, message: Message) -> None:
        """Calls the server's `send` and times it. A chunk of a stream takes as few calls as possible here."""
        began_at, request = 0, self.request
        try:
            kind = message.get("type")
            if kind != "http.response.body":
                if kind == "http.response.start":
                    message = self._start_response(message)
                elif kind == "http.response.pathsend":
                    self.finishing, began_at = True, _now()
            elif request is not None:
                began_at = _now()
                if not message.get("more_body"):
                    self.finishing = True
                if self._server.disconnected:
                    self.disconnected_at = self.disconnected_at or began_at
                elif message.get("body"):
                    if request.inspect_next_chunk:
                        self._record_first_chunk(request, began_at)
                    request.chunks += 1
        except BaseException as exc:
            # Any other message is the application's error, which the server raises.
            if isinstance(message, MutableMapping):
                self._abandon_request(exc)
        try:
            await self._send(message)
        except BaseException as exc:
            self._record_send_error(began_at, exc)
            raise
        if began_at and request is not None:
            ended_at = _now()
            request.send_wait_ns += ended_at - began_at
            if self.finishing:
                self._complete_response(ended_at)

    def _record_send_error(self, began_at: int, exc: BaseException) -> None:
        """Records an exception of the server's `send`. `began_at`: 0 = the call is not timed."""
        try:
            request, ended_at = self.request, _now()
            if request is not None and began_at:
                request.send_wait_ns += ended_at - began_at
            if isinstance(exc, OSError) or type(exc).__name__ == "ClientDisconnect":
                self.disconnected_at = self.disconnected_at or ended_at
        except BaseException as own_exc:
            self._abandon_request(own_exc)

    def _record_first_chunk(self, request: request_span.RequestSpan, at: int) -> None:
        request.inspect_next_chunk = False
        if not request.responding:
            request.responding = True
            if self.finishing:
                self._response_started_at = at  # recorded with the end, which follows
            else:
                request.record_event(events.ResponseStarted(at))
        if request.tokens_reached and not request.first_token_sent:
            request.first_token_sent = True
            request.record_event(events.FirstTokenSent(at))

    def _start_response(self, message: Message) -> Message:
        """Reads the start message of the response. Returns it, with tracing headers if they are enabled."""
        if self.deferred:  # a middleware responds, so the router is not reached
            self.deferred = False
            if not has_active_span():
                detach_all(self.open_request(ambient=False))
        if self._server.disconnected:
            self.disconnected_at = self.disconnected_at or _now()
        status = message.get("status")
        if not self.disconnected_at and isinstance(status, int):
            self.status = int(status)
        if response_headers.enabled and self.request is not None:
            return response_headers.add_headers(message, self.request)
        return message

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _complete_response(self, at: int) -> None:
        """Closes the request at its last byte. Background tasks that follow are not part of the request."""
        try:
            if self._server.disconnected:
                self.disconnected_at = self.disconnected_at or at
            self.completed_at = at
            # For a status of 500 or more, the exception behind it is still to come.
            if self.status < 500 or self.disconnected_at:
                self.close_request(None)
        except BaseException as exc:
            self._abandon_request(exc)

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
            http, route = (
                encode_method_and_route(self.scope, self.route, self.root_path, self.mount_path)
                if request.has_server
                else (0, "")
            )
            if self._response_started_at:
                if self._response_started_at == at - request.send_wait_ns:
                    http |= events.SINGLE_CHUNK
                else:
                    request.record_event(events.ResponseStarted(self._response_started_at))
            request.close(outcome, error_type, self.status, at, http, route)
        except BaseException as own_exc:
            self.request = request
            self._abandon_request(own_exc)

    def _determine_outcome(self, exc: BaseException | None) -> tuple[int, str]:
        """Returns outcome and error type. Sets a missing `status` and the instant of a disconnect."""
        if not self.completed_at and self._server.disconnected:
            self.disconnected_at = self.disconnected_at or _now()
        if self.disconnected_at or type(exc).__name__ == "ClientDisconnect":
            return events.ABORTED, events.CLIENT_DISCONNECT
        if isinstance(exc, (asyncio.CancelledError, GeneratorExit)):
            # A server that reports disconnects cancels only because it shuts down.
            return (
                events.ABORTED,
                events.CLIENT_DISCONNECT if self._server is _UNKNOWN_CONNECTION else events.CANCELLED,
            )
        # Servers send 500 if the application sent nothing.
        sent_status, self.status = self.status, self.status or 500
        return determine_outcome(exc, sent_status, bool(self.completed_at))

    def _abandon_request(self, exc: BaseException) -> None:
        """Closes the request after our own code raised: neither a success nor an error. Its slot is freed."""
        request, self.request = self.request, None
        if request is not None:
            with contextlib.suppress(BaseException):  # `exc` is the exception to be logged
                request.close(events.ABORTED, events.CANCELLED)
        self.hook.count_failure(exc)
