"""Counts an HTTP request whose method usually infers nothing: a health check, a preflight. It has no span.

If it reaches a model nevertheless, it becomes an `Exchange`, whose request began when it arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.asgi.exchange import SCOPE_KEY, Exchange, Receive
from otel_infer.instrumentation.asgi.exchange_state import Message, Scope, Send
from otel_infer.instrumentation.asgi.route import find_method_scheme_and_route
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.http_server.outcome import determine_outcome, unwrap_group
from otel_infer.instrumentation.http_server.parent_context import (
    Tokens,
    detach_all,
    has_active_span,
    is_remote_parent_in_other_trace,
)
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import request_span
from otel_infer.tracing.context import detach
from otel_infer.tracing.deferred_request import DeferredRequest


class UntracedExchange:
    """One such request. It has what the hooks of an application, a router and a route use of an `Exchange`.

    `deferred`: the router, or the start of the response, is still to show whether another instrumentation
    counts the request. `completed_at`: when the last byte was handed over, 0 = not yet.
    """

    __slots__ = (
        "_deferred_request",
        "_exchange",
        "_hook",
        "_is_counted_elsewhere",
        "_receive",
        "_send",
        "_token",
        "completed_at",
        "deferred",
        "mount_path",
        "reached_app",
        "root_path",
        "route",
        "scope",
        "started_at",
        "status",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, hook: Hook) -> None:
        self.started_at = _clock.now()
        self.scope, self._receive, self._send, self._hook = scope, receive, send, hook
        self._exchange: Exchange | None = None
        self._deferred_request = DeferredRequest(self._open_request)
        self._token = self._deferred_request.attach()
        self.reached_app = self.deferred = self._is_counted_elsewhere = False
        self.status = self.completed_at = 0
        self.route: Any = None
        self.root_path, self.mount_path = scope.get("root_path") or "", ""

    def _open_request(self) -> request_span.RequestSpan | None:
        """Opens the request, because a model was reached. The code that needs it gets no exception of ours."""
        try:
            exchange = Exchange(self.scope, self._receive, self._send, self._hook, None)
            exchange.arrived_at, exchange.status, exchange.reached_app = self.started_at, self.status, True
            exchange.root_path, exchange.mount_path, exchange.route = (
                self.root_path,
                self.mount_path,
                self.route,
            )
            ambient = has_active_span() and not is_remote_parent_in_other_trace(self.scope)
            detach_all(exchange.open_request(ambient))
            self.scope[SCOPE_KEY] = self._exchange = exchange
            return exchange.request
        except BaseException as exc:
            self._hook.count_failure(exc)
            return None

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickles as None, like an `Exchange`."""
        return type(None), ()

    def end(self, exc: BaseException | None) -> None:
        """Counts the request, after the application has returned or raised `exc`."""
        self._deferred_request.discard()
        detach(self._token)
        if self._exchange is not None:
            self._exchange.end(exc)
            return
        self.scope.pop(SCOPE_KEY, None)
        try:
            if not self._is_counted_elsewhere:
                recorder.record_process(self._describe(exc))
        except BaseException as own_exc:
            self._hook.count_failure(own_exc)

    def _describe(self, exc: BaseException | None) -> events.HttpServed:
        is_complete = bool(self.completed_at)
        _, error_type = determine_outcome(
            None if is_complete else unwrap_group(exc), self.status, is_complete
        )
        method, scheme, route = find_method_scheme_and_route(
            self.scope, self.route, self.root_path, self.mount_path
        )
        # Servers send 500 if the application sent nothing.
        is_failed = not is_complete and (exc is None or isinstance(exc, Exception))
        status = self.status or (500 if is_failed else 0)
        ended_at = self.completed_at or _clock.now()
        return events.HttpServed(ended_at, self.started_at, status, error_type, method, scheme, route)

    def enter_application(self, app: Any) -> Tokens:
        """Stores that an application was reached. Its router shows whether another instrumentation is active."""
        if not self.reached_app:
            self.reached_app = self.deferred = True
            self.root_path = getattr(app, "root_path", "") or self.root_path
        return ()

    def enter_router(self) -> Tokens:
        """Looks for the span of another instrumentation, which then counts the request too."""
        self.deferred = False
        try:
            self._is_counted_elsewhere = has_active_span()
        except Exception as exc:
            self._hook.count_failure(exc)
        return ()

    def record_route_error(self, exc: Exception) -> None:
        """Stores it for a request that has a span. Otherwise the status shows the error."""
        if self._exchange is not None:
            self._exchange.record_route_error(exc)

    async def receive(self) -> Message:
        """Calls the server's `receive`."""
        return await (self._receive() if self._exchange is None else self._exchange.receive())

    async def send(self, message: Message) -> None:
        """Calls the server's `send`, and stores the status and the end of the response."""
        if self._exchange is not None:
            await self._exchange.send(message)
            return
        try:
            kind = message.get("type")
            if kind == "http.response.start":
                if self.deferred:  # a middleware responds, so the router is not reached
                    self.enter_router()
                status = message.get("status")
                self.status = int(status) if isinstance(status, int) else 0
        except BaseException as exc:
            kind = ""
            self._hook.count_failure(exc)
        await self._send(message)
        if kind == "http.response.pathsend" or (
            kind == "http.response.body" and not message.get("more_body")
        ):
            self.completed_at = self.completed_at or _clock.now()
