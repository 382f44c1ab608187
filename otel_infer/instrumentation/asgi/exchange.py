"""One HTTP request, from the outermost place where it is seen to its last byte, and the verdict on how it ended.

Longer than a module should be: whatever becomes of a message, the request is one.
"""

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
    is_caller_in_other_trace,
    is_current_span,
    parse_caller,
)
from otel_infer.instrumentation.asgi.route import encode_method_and_route
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.ringbuffer import events
from otel_infer.tracing import caller as asking
from otel_infer.tracing import context, request_span, start

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[..., Awaitable[Any]]

SCOPE_KEY = "otel_infer"
"""In a scope: the `Exchange` of a request, None if it is excluded; in that of the lifespan, the front's `Door`."""
OWNER = "asgi"
CLIENT_DISCONNECT, CANCELLED = "client_disconnect", "cancelled"

_now = _clock.now


class _UnknownConnection:
    """Stands for a server that does not say whether its client is still there."""

    def __init__(self) -> None:
        self.disconnected = False


_UNKNOWN_CONNECTION = _UnknownConnection()


class Exchange:
    """One HTTP request and what is sent in return. Nothing of it raises but what the server or the application does.

    `broken`: what left the routes while the response was on its way. Middleware of Starlette's ends such a response well.
    `ambient`: the span that is current where it begins is the parent. `deferred`: to be opened further in. `left_at`,
    `completed_at`: when the client was seen to be gone, and the last byte was handed over; 0 = not yet.
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
        self, scope: Scope, receive: Receive, send: Send, hook: Hook, door: AsgiEntryPoint | None
    ) -> None:
        self.arrived_at = _now()
        self.hook, self.entry_point, self.scope = hook, door, scope
        self.request: request_span.RequestSpan | None = None
        self.ambient = self.deferred = self.reached_app = self.finishing = False
        self.status = self.disconnected_at = self.completed_at = self._response_started_at = 0
        self._tokens: Tokens = ()
        self.root_path, self.mount_path = scope.get("root_path") or "", ""
        self.route: Any = None
        self.route_error: Exception | None = None
        self._receive, self._send = receive, send
        # uvicorn drops what is sent to a client that has left, and tells only those who ask `receive`.
        server = getattr(send, "__self__", None)
        self._server: Any = _UNKNOWN_CONNECTION
        if server is not None and type(getattr(server, "disconnected", None)) is bool:
            self._server = server

    def __enter__(self) -> Exchange:
        """The application is called inside."""
        if not self.deferred:
            self._tokens = self.open_request(self.ambient)
        return self

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        if self.request is not None:
            self.close_request(exc)
        detach_all(self._tokens)
        self.scope.pop(SCOPE_KEY, None)  # `send` may hold the scope, which would hold us: garbage in a circle

    def open_request(self, ambient: bool) -> Tokens:
        """Opens the request and makes it current, until `leave` is given what this returns."""
        self.deferred = False
        try:
            scope, at = self.scope, self.arrived_at
            method, headers = scope.get("method"), scope.get("headers") or ()
            name = method if method in events.METHODS else events.OTHER
            caller = None if ambient else parse_caller(headers)
            if caller is not None:
                request = start.open_request_from_caller(
                    caller, name, OWNER, clear_span_and_baggage(context.current_context()), at
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
                if asking.caller_settings is not tenancy.NO_CALLER_SETTINGS:
                    asking.record_caller(request, headers, str(self.scope.get("path", "")))
                return (request.attach(),)
        except BaseException as exc:
            self.hook.mark_failed(exc)
        return ()

    def enter_router(self) -> Tokens:
        """It is past all middleware: nobody will start a span above it any more."""
        try:
            ambient = has_active_span() and not is_caller_in_other_trace(self.scope)
        except Exception as exc:
            self.hook.mark_failed(exc)
            return ()
        return self.open_request(ambient)

    # ── on the way in ────────────────────────────────────────────────────────────────────────────────────────────

    def enter_application(self, app: Any) -> Tokens:
        """The request has come to an application that we hook; of several, the outermost one counts."""
        if self.reached_app:
            return ()
        try:
            self.reached_app = True
            self.root_path = getattr(app, "root_path", "") or self.root_path
            if self.deferred:
                return (
                    self.open_request(ambient=True)
                    if has_active_span() and not is_caller_in_other_trace(self.scope)
                    else ()
                )
            if self.entry_point is not None:
                self.entry_point.reached_app = True
                if context.current_span() is not self.request:
                    self.entry_point.has_tracer = self.entry_point.has_tracer or not is_current_span(
                        self.request
                    )
        except BaseException as exc:
            self.hook.mark_failed(exc)
        return ()

    def record_route_error(self, exc: Exception) -> None:
        """This left the routes before the last byte did. Where the answer is a good one, it was begun before."""
        if self.request is not None and not self.finishing:
            self.route_error = exc

    # ── on the way out ───────────────────────────────────────────────────────────────────────────────────────────

    async def receive(self) -> Message:
        """The server's `receive`, seen."""
        message = await self._receive()
        try:
            # With the last byte on its way, servers say "disconnect" of clients that have all they wanted.
            if message.get("type") == "http.disconnect" and not self.finishing:
                self.disconnected_at = self.disconnected_at or _now()
        except BaseException as exc:
            self._abandon_request(exc)
        return message

    async def send(self, message: Message) -> None:
        """The server's `send`, seen and timed. A chunk of a stream passes here without a call more than it takes."""
        began, request = 0, self.request
        try:
            kind = message.get("type")
            if kind != "http.response.body":
                if kind == "http.response.start":
                    message = self._start_response(message)
                elif kind == "http.response.pathsend":
                    self.finishing, began = True, _now()
            elif request is not None:
                began = _now()
                if not message.get("more_body"):
                    self.finishing = True
                if self._server.disconnected:
                    self.disconnected_at = self.disconnected_at or began
                elif message.get("body"):
                    if request.inspect_next_chunk:
                        self._record_first_chunk(request, began)
                    request.chunks += 1
        except BaseException as exc:
            if isinstance(
                message, MutableMapping
            ):  # or else it is the application's mistake, which the server will tell it
                self._abandon_request(exc)
        try:
            await self._send(message)
        except BaseException as exc:
            self._record_send_error(began, exc)
            raise
        if began and request is not None:
            ended = _now()
            request.send_wait_ns += ended - began
            if self.finishing:
                self._complete_response(ended)

    def _record_send_error(self, began: int, exc: BaseException) -> None:
        """This left the server's `send`."""
        try:
            request, ended = self.request, _now()
            if request is not None and began:
                request.send_wait_ns += ended - began
            if isinstance(exc, OSError) or type(exc).__name__ == "ClientDisconnect":
                self.disconnected_at = self.disconnected_at or ended
        except BaseException as ours:
            self._abandon_request(ours)

    def _record_first_chunk(self, request: request_span.RequestSpan, at: int) -> None:
        request.inspect_next_chunk = False
        if not request.responding:
            request.responding = True
            if self.finishing:
                self._response_started_at = at  # to be said with the end, which is near
            else:
                request.record_event(events.ResponseStarted(at))
        if request.tokens_reached and not request.first_token_sent:
            request.first_token_sent = True
            request.record_event(events.FirstTokenSent(at))

    def _start_response(self, message: Message) -> Message:
        """The response's first message, as the client is to have it."""
        if self.deferred:  # middleware answers
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
        """The last byte was handed over. What is done after it (background tasks) is no part of the request."""
        try:
            if self._server.disconnected:
                self.disconnected_at = self.disconnected_at or at
            self.completed_at = at
            if (
                self.status < 500 or self.disconnected_at
            ):  # else the exception that was answered is still to come
                self.close_request(None)
        except BaseException as exc:
            self._abandon_request(exc)

    def close_request(self, exc: BaseException | None) -> None:
        """Closes the request; `exc` is what left the application. The second call does nothing."""
        request, self.request = self.request, None
        if request is None:
            return
        try:
            broken, self.route_error = self.route_error, None
            outcome, error_type = events.OK, ""
            failed = exc is not None or broken is not None or self.status >= 500
            if failed or self.disconnected_at or not self.completed_at:
                outcome, error_type = self._determine_outcome(
                    unwrap_group(exc or (broken if self.status < 300 else None))
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
        except BaseException as ours:
            self.request = request
            self._abandon_request(ours)

    def _determine_outcome(self, exc: BaseException | None) -> tuple[int, str]:
        """Outcome and error type."""
        if not self.completed_at and self._server.disconnected:
            self.disconnected_at = self.disconnected_at or _now()
        if self.disconnected_at or type(exc).__name__ == "ClientDisconnect":
            return events.ABORTED, CLIENT_DISCONNECT
        if isinstance(exc, (asyncio.CancelledError, GeneratorExit)):
            # A server that would say that the client has left cancels because it is shutting down.
            return events.ABORTED, CLIENT_DISCONNECT if self._server is _UNKNOWN_CONNECTION else CANCELLED
        sent, self.status = self.status, self.status or 500  # as servers answer where the application has not
        return determine_outcome(exc, sent, bool(self.completed_at))

    def _abandon_request(self, exc: BaseException) -> None:
        """Code of ours has raised: the request counts neither as a success nor as an error, and its slot is freed."""
        request, self.request = self.request, None
        if request is not None:
            with contextlib.suppress(BaseException):  # what is told is the first
                request.close(events.ABORTED, CANCELLED)
        self.hook.mark_failed(exc)
