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
from otel_infer.instrumentation.asgi.outcome import only, verdict
from otel_infer.instrumentation.asgi.parent_context import (
    Door,
    Tokens,
    caller_in,
    cleared,
    is_innermost,
    is_passed_over,
    is_traced,
    leave,
    told_by,
)
from otel_infer.instrumentation.asgi.route import asked
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.ringbuffer import events
from otel_infer.tracing import caller as asking
from otel_infer.tracing import context, request_span, start

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[..., Awaitable[Any]]

KEY = "otel_infer"
"""In a scope: the `Exchange` of a request, None if it is excluded; in that of the lifespan, the front's `Door`."""
OWNER = "asgi"
CLIENT_DISCONNECT, CANCELLED = "client_disconnect", "cancelled"

_now = _clock.now


class _Silent:
    """Stands for a server that does not say whether its client is still there."""

    def __init__(self) -> None:
        self.disconnected = False


_SILENT = _Silent()


class Exchange:
    """One HTTP request and what is sent in return. Nothing of it raises but what the server or the application does.

    `broken`: what left the routes while the response was on its way. Middleware of Starlette's ends such a response well.
    `ambient`: the span that is current where it begins is the parent. `deferred`: to be opened further in. `left_at`,
    `completed_at`: when the client was seen to be gone, and the last byte was handed over; 0 = not yet.
    """

    __slots__ = (
        "_receive",
        "_send",
        "_server",
        "_started_at",
        "_tokens",
        "ambient",
        "arrived_at",
        "broken",
        "completed_at",
        "deferred",
        "door",
        "finishing",
        "hook",
        "inside",
        "left_at",
        "mounted",
        "request",
        "root",
        "route",
        "scope",
        "status",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, hook: Hook, door: Door | None) -> None:
        self.arrived_at = _now()
        self.hook, self.door, self.scope = hook, door, scope
        self.request: request_span.LiveRequest | None = None
        self.ambient = self.deferred = self.inside = self.finishing = False
        self.status = self.left_at = self.completed_at = self._started_at = 0
        self._tokens: Tokens = ()
        self.root, self.mounted = scope.get("root_path") or "", ""
        self.route: Any = None
        self.broken: Exception | None = None
        self._receive, self._send = receive, send
        # uvicorn drops what is sent to a client that has left, and tells only those who ask `receive`.
        server = getattr(send, "__self__", None)
        self._server: Any = _SILENT
        if server is not None and type(getattr(server, "disconnected", None)) is bool:
            self._server = server

    def __enter__(self) -> Exchange:
        """The application is called inside."""
        if not self.deferred:
            self._tokens = self.open(self.ambient)
        return self

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        if self.request is not None:
            self.finish(exc)
        leave(self._tokens)
        self.scope.pop(KEY, None)  # `send` may hold the scope, which would hold us: garbage in a circle

    def open(self, ambient: bool) -> Tokens:
        """Opens the request and makes it current, until `leave` is given what this returns."""
        self.deferred = False
        try:
            scope, at = self.scope, self.arrived_at
            method, headers = scope.get("method"), scope.get("headers") or ()
            name = method if method in events.METHODS else events.OTHER
            caller = None if ambient else caller_in(headers)
            if caller is not None:
                request = start.open_below(caller, name, OWNER, cleared(context.here()), at)
            else:
                around = None if ambient else told_by(headers, cleared(context.here()))
                request = start.open_request(name, owner=OWNER, around=around, server=True, arrived_at=at)
            self.request = request
            if request is not None:
                if asking.wanted is not tenancy.NOTHING:
                    asking.tell(request, headers, str(self.scope.get("path", "")))
                return (request.attach(),)
        except BaseException as exc:
            self.hook.fail(exc)
        return ()

    def reached(self) -> Tokens:
        """It is past all middleware: nobody will start a span above it any more."""
        try:
            ambient = is_traced() and not is_passed_over(self.scope)
        except Exception as exc:
            self.hook.fail(exc)
            return ()
        return self.open(ambient)

    # ── on the way in ────────────────────────────────────────────────────────────────────────────────────────────

    def entered(self, app: Any) -> Tokens:
        """The request has come to an application that we hook; of several, the outermost one counts."""
        if self.inside:
            return ()
        try:
            self.inside = True
            self.root = getattr(app, "root_path", "") or self.root
            if self.deferred:
                return self.open(ambient=True) if is_traced() and not is_passed_over(self.scope) else ()
            if self.door is not None:
                self.door.inside = True
                if context.innermost() is not self.request:
                    self.door.traced = self.door.traced or not is_innermost(self.request)
        except BaseException as exc:
            self.hook.fail(exc)
        return ()

    def breaks(self, exc: Exception) -> None:
        """This left the routes before the last byte did. Where the answer is a good one, it was begun before."""
        if self.request is not None and not self.finishing:
            self.broken = exc

    # ── on the way out ───────────────────────────────────────────────────────────────────────────────────────────

    async def receive(self) -> Message:
        """The server's `receive`, seen."""
        message = await self._receive()
        try:
            # With the last byte on its way, servers say "disconnect" of clients that have all they wanted.
            if message.get("type") == "http.disconnect" and not self.finishing:
                self.left_at = self.left_at or _now()
        except BaseException as exc:
            self._give_up(exc)
        return message

    async def send(self, message: Message) -> None:
        """The server's `send`, seen and timed. A chunk of a stream passes here without a call more than it takes."""
        began, request = 0, self.request
        try:
            kind = message.get("type")
            if kind != "http.response.body":
                if kind == "http.response.start":
                    message = self._starts(message)
                elif kind == "http.response.pathsend":
                    self.finishing, began = True, _now()
            elif request is not None:
                began = _now()
                if not message.get("more_body"):
                    self.finishing = True
                if self._server.disconnected:
                    self.left_at = self.left_at or began
                elif message.get("body"):
                    if request.has_news:
                        self._say_first(request, began)
                    request.chunks += 1
        except BaseException as exc:
            if isinstance(
                message, MutableMapping
            ):  # or else it is the application's mistake, which the server will tell it
                self._give_up(exc)
        try:
            await self._send(message)
        except BaseException as exc:
            self._failed(began, exc)
            raise
        if began and request is not None:
            ended = _now()
            request.send_wait_ns += ended - began
            if self.finishing:
                self._complete(ended)

    def _failed(self, began: int, exc: BaseException) -> None:
        """This left the server's `send`."""
        try:
            request, ended = self.request, _now()
            if request is not None and began:
                request.send_wait_ns += ended - began
            if isinstance(exc, OSError) or type(exc).__name__ == "ClientDisconnect":
                self.left_at = self.left_at or ended
        except BaseException as ours:
            self._give_up(ours)

    def _say_first(self, request: request_span.LiveRequest, at: int) -> None:
        request.has_news = False
        if not request.responding:
            request.responding = True
            if self.finishing:
                self._started_at = at  # to be said with the end, which is near
            else:
                request.state(events.ResponseStarted(at))
        if request.tokens_reached and not request.first_token_sent:
            request.first_token_sent = True
            request.state(events.FirstTokenSent(at))

    def _starts(self, message: Message) -> Message:
        """The response's first message, as the client is to have it."""
        if self.deferred:  # middleware answers
            self.deferred = False
            if not is_traced():
                leave(self.open(ambient=False))
        if self._server.disconnected:
            self.left_at = self.left_at or _now()
        status = message.get("status")
        if not self.left_at and isinstance(status, int):
            self.status = int(status)
        if response_headers.wanted and self.request is not None:
            return response_headers.added(message, self.request)
        return message

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _complete(self, at: int) -> None:
        """The last byte was handed over. What is done after it (background tasks) is no part of the request."""
        try:
            if self._server.disconnected:
                self.left_at = self.left_at or at
            self.completed_at = at
            if self.status < 500 or self.left_at:  # else the exception that was answered is still to come
                self.finish(None)
        except BaseException as exc:
            self._give_up(exc)

    def finish(self, exc: BaseException | None) -> None:
        """Closes the request; `exc` is what left the application. The second call does nothing."""
        request, self.request = self.request, None
        if request is None:
            return
        try:
            broken, self.broken = self.broken, None
            outcome, error_type = events.OK, ""
            failed = exc is not None or broken is not None or self.status >= 500
            if failed or self.left_at or not self.completed_at:
                outcome, error_type = self._verdict(only(exc or (broken if self.status < 300 else None)))
            at = self.left_at or self.completed_at
            http, route = (
                asked(self.scope, self.route, self.root, self.mounted) if request.has_server else (0, "")
            )
            if self._started_at:
                if self._started_at == at - request.send_wait_ns:
                    http |= events.WHOLE
                else:
                    request.state(events.ResponseStarted(self._started_at))
            request.close(outcome, error_type, self.status, at, http, route)
        except BaseException as ours:
            self.request = request
            self._give_up(ours)

    def _verdict(self, exc: BaseException | None) -> tuple[int, str]:
        """Outcome and error type."""
        if not self.completed_at and self._server.disconnected:
            self.left_at = self.left_at or _now()
        if self.left_at or type(exc).__name__ == "ClientDisconnect":
            return events.ABORTED, CLIENT_DISCONNECT
        if isinstance(exc, (asyncio.CancelledError, GeneratorExit)):
            # A server that would say that the client has left cancels because it is shutting down.
            return events.ABORTED, CLIENT_DISCONNECT if self._server is _SILENT else CANCELLED
        sent, self.status = self.status, self.status or 500  # as servers answer where the application has not
        return verdict(exc, sent, bool(self.completed_at))

    def _give_up(self, exc: BaseException) -> None:
        """Code of ours has raised: the request counts neither as a success nor as an error, and its slot is freed."""
        request, self.request = self.request, None
        if request is not None:
            with contextlib.suppress(BaseException):  # what is told is the first
                request.close(events.ABORTED, CANCELLED)
        self.hook.fail(exc)
