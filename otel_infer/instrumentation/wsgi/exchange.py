"""Records one HTTP request of a WSGI server, from the call of the application to the last byte of the response."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

from otel_infer import _clock
from otel_infer.config import tenancy
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.http_server.method import encode_method, to_known_names
from otel_infer.instrumentation.http_server.outcome import determine_outcome
from otel_infer.instrumentation.http_server.parent_context import (
    has_active_span,
    open_by_propagators,
    open_from_headers,
)
from otel_infer.instrumentation.http_server.socket_wait import record_socket_wait
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import caller, request_span
from otel_infer.tracing.context import detach
from otel_infer.tracing.deferred_request import DeferredRequest

Environ = dict[str, Any]
App = Callable[..., Iterable[bytes]]
ENVIRON_KEY = "otel_infer.exchange"
OWNER = "wsgi"
_UNTRACED_METHODS = frozenset(events.UNTRACED_METHODS)
_OTHERS = tuple(
    f"opentelemetry.instrumentation.{name}" for name in ("wsgi", "flask", "django", "falcon", "pyramid")
)
"""Instrumentations that start a SERVER span below the server's call of the application."""


def begin_exchange(environ: Environ, hook: Hook) -> WsgiExchange | None:
    """Returns the exchange that begins here; None if it is not recorded, or recorded already further out."""
    try:
        if (
            ENVIRON_KEY in environ
            or not hook.alive
            or not recorder.active
            or request_span.span_factory is None
        ):
            return None
        exchange = environ[ENVIRON_KEY] = WsgiExchange(environ, hook)
        return exchange
    except BaseException as exc:
        hook.count_failure(exc)
        return None


class WsgiExchange:
    """One HTTP request and its response. It raises only exceptions of the application.

    The request is opened at once, except in two cases. A method that infers nothing has no span unless a model is
    reached. Another instrumentation may start its own SERVER span further in; then the request is opened below that span.

    `status`: 0 = no response yet. `completed_at`: when the last chunk was handed over. `route`: the template of the
    framework's route. `is_counted_elsewhere`: another instrumentation has a span of this request.
    """

    __slots__ = (
        "_deferred", "_ended", "_hook", "arrived_at", "completed_at", "environ", "is_counted_elsewhere", "request",
        "route", "status",
    )  # fmt: skip

    def __init__(self, environ: Environ, hook: Hook) -> None:
        self.arrived_at = _clock.now()
        self.environ, self._hook = environ, hook
        self.request: request_span.RequestSpan | None = None
        self.status = self.completed_at = 0
        self.route = ""
        self.is_counted_elsewhere = self._ended = False
        self._deferred: DeferredRequest | None = None
        if environ.get("REQUEST_METHOD") in _UNTRACED_METHODS or any(name in sys.modules for name in _OTHERS):
            self._deferred = DeferredRequest(self._open_deferred)
        else:
            self.open_request()

    # ── the request ──────────────────────────────────────────────────────────────────────────────────────────────

    def open_request(self) -> request_span.RequestSpan | None:
        """Opens the request below a span of this process, or else below the span in the headers."""
        environ = self.environ
        ambient = self._deferred is not None and has_active_span()
        headers = _list_headers(environ)
        name, _ = to_known_names(environ.get("REQUEST_METHOD"), "")
        request = None if ambient else open_from_headers(headers, name, OWNER, self.arrived_at)
        if request is None:
            request = open_by_propagators(headers, name, OWNER, ambient, self.arrived_at)
        self.request = request
        if request is None:
            return None
        record_socket_wait(request, _find_socket(environ), self.arrived_at, _clock.now())
        if caller.caller_settings is not tenancy.NO_CALLER_SETTINGS:
            caller.record_caller(request, headers, environ.get("PATH_INFO", ""))
        return request

    def call(self, function: Callable[..., Any], /, *args: Any) -> Any:
        """Calls a function of the application in the context of its request.

        While it runs, the sidecar finds this thread if the request is late.
        """
        token = self._attach()
        try:
            return function(*args) if self.request is None else self.request.call_in_thread(function, *args)
        finally:
            if token is not None:
                detach(token)

    def _attach(self) -> Any:
        """Makes the request current; returns a context token, or None."""
        try:
            if self.request is not None:
                return self.request.attach()
            return self._deferred.attach() if self._deferred is not None else None
        except BaseException as exc:
            self._hook.count_failure(exc)
            return None

    def _open_deferred(self) -> request_span.RequestSpan | None:
        """Opens a deferred request. The code that needs it gets no exception of ours."""
        try:
            return self.open_request()
        except BaseException as exc:
            self._hook.count_failure(exc)
            return None

    # ── the response ─────────────────────────────────────────────────────────────────────────────────────────────

    def follow_start(self, start_response: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the server's `start_response`, which notes the status on the way."""

        def start_and_follow(status: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                self.record_start(status)
            except BaseException as exc:
                self._hook.count_failure(exc)
            return start_response(status, *args, **kwargs)

        return start_and_follow

    def record_start(self, status: Any) -> None:
        """Notes the status, and whether the span of another instrumentation is current."""
        code = status[:3] if isinstance(status, str) else ""
        self.status = int(code) if code.isdigit() else 0
        if self._deferred is not None and self.request is None:
            self.is_counted_elsewhere = has_active_span()

    def record_chunk(self, chunk: Any, at: int) -> None:
        """Records a chunk of the response, which the server is about to send."""
        try:
            self._record_chunk(chunk, at)
        except BaseException as exc:
            self._hook.count_failure(exc)

    def _record_chunk(self, chunk: Any, at: int) -> None:
        request = self.request
        if request is None or not chunk:
            return
        request.chunks += 1
        if not request.responding:
            request.responding = True
            request.record_event(events.make_tuple(events.ResponseStarted, (at,)))
        if request.tokens_reached and not request.first_token_sent:
            request.first_token_sent = True
            request.record_event(events.make_tuple(events.FirstTokenSent, (at,)))

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def end(self, exc: BaseException | None = None) -> None:
        """Ends the request, once. `exc`: the exception that left the application or its body, or None."""
        if self._ended:
            return
        self._ended = True
        self.environ.pop(ENVIRON_KEY, None)
        if self._deferred is not None:
            self._deferred.discard()
        try:
            if self.request is not None:
                self._close_request(self.request, exc)
            elif not self.is_counted_elsewhere and recorder.requests is not None:
                self._record_without_span(exc)
        except BaseException as own_exc:
            self._abandon_request(own_exc)

    def _close_request(self, request: request_span.RequestSpan, exc: BaseException | None) -> None:
        environ = self.environ
        outcome, error_type = self._determine_outcome(exc)
        http = encode_method(environ.get("REQUEST_METHOD"), environ.get("wsgi.url_scheme"))
        http = http if request.has_server else 0
        route = self.route if request.has_server else ""
        request.close(outcome, error_type, self.status, self.completed_at, http, route)

    def _determine_outcome(self, exc: BaseException | None) -> tuple[int, str]:
        """Returns outcome and error type, and sets a missing status."""
        if exc is None and self.status and not self.completed_at:
            return events.ABORTED, events.CLIENT_DISCONNECT  # the server stopped reading the body
        if isinstance(exc, GeneratorExit):
            return events.ABORTED, events.CLIENT_DISCONNECT
        sent_status = self.status
        self.status = sent_status or 500  # servers send 500 if the application sent nothing
        return determine_outcome(exc, sent_status, bool(self.completed_at))

    def _record_without_span(self, exc: BaseException | None) -> None:
        """Counts a request that reached no model, and whose method infers nothing; opens and closes any other."""
        method, scheme = to_known_names(
            self.environ.get("REQUEST_METHOD"), self.environ.get("wsgi.url_scheme")
        )
        if method not in _UNTRACED_METHODS:
            request = self.open_request()
            if request is not None:
                self._close_request(request, exc)
            return
        _, error_type = self._determine_outcome(exc)
        ended_at = self.completed_at or _clock.now()
        recorder.record_process(
            events.HttpServed(ended_at, self.arrived_at, self.status, error_type, method, scheme, self.route)
        )

    def _abandon_request(self, exc: BaseException) -> None:
        """Closes the request after our own code raised: neither a success nor an error. Its slot is freed."""
        request, self.request = self.request, None
        if request is not None:
            with contextlib.suppress(BaseException):  # `exc` is the exception to be logged
                request.close(events.ABORTED, events.CANCELLED)
        self._hook.count_failure(exc)


def _find_socket(environ: Environ) -> Any:
    """Returns the socket of the connection; None for servers that do not show it."""
    return environ.get("gunicorn.socket") or environ.get("werkzeug.socket")


def _list_headers(environ: Environ) -> list[tuple[bytes, bytes]]:
    """Returns the request's headers as ASGI has them: names in lower case."""
    return [
        (name[5:].replace("_", "-").lower().encode("latin-1"), value.encode("latin-1", "replace"))
        for name, value in environ.items()
        if name.startswith("HTTP_") and isinstance(value, str)
    ]
