"""Records one HTTP request and its response, on any server whose module says how to read both."""

from __future__ import annotations

import contextlib
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
from otel_infer.tracing.deferred_request import DeferredRequest

_UNTRACED_METHODS = frozenset(events.UNTRACED_METHODS)


def can_record(hook: Hook) -> bool:
    """Returns whether requests are recorded at all."""
    return hook.alive and recorder.active and request_span.span_factory is not None


class HttpExchange:
    """One HTTP request and its response. It raises only exceptions of the application.

    The request is opened at once, except in two cases. A method that infers nothing has no span unless a model is
    reached. Another instrumentation may start its own SERVER span further in; then the request is opened below that span.

    `status`: 0 = no response yet. `completed_at`: when the last chunk was handed over. `route`: the template of the
    framework's route. `error`: what the framework answered with an error status for. `is_counted_elsewhere`: another
    instrumentation has a span of this request.
    """

    __slots__ = (
        "_deferred", "_ended", "_hook", "arrived_at", "completed_at", "error", "is_counted_elsewhere", "method", "request",
        "route", "scheme", "status",
    )  # fmt: skip

    owner = "http"

    def __init__(
        self, hook: Hook, method: Any, scheme: Any, has_other_span: bool = False, arrived_at: int = 0
    ) -> None:
        """Begins an exchange. `arrived_at`: monotonic ns; 0 = now.

        `has_other_span`: another instrumentation may start a SERVER span further in.
        """
        self.arrived_at = arrived_at or _clock.now()
        self._hook, self.method, self.scheme = hook, method, scheme
        self.request: request_span.RequestSpan | None = None
        self.status = self.completed_at = 0
        self.route = ""
        self.error: BaseException | None = None
        self.is_counted_elsewhere = self._ended = False
        self._deferred: DeferredRequest | None = None
        if has_other_span or method in _UNTRACED_METHODS:
            self._deferred = DeferredRequest(self._open_deferred)
        else:
            self.open_request()

    @property
    def is_deferred(self) -> bool:
        """Whether the request is opened once a model is reached."""
        return self._deferred is not None

    # ── what a server adds ───────────────────────────────────────────────────────────────────────────────────────

    def list_headers(self) -> list[tuple[bytes, bytes]]:
        """Returns the request's headers, names in lower case."""
        raise NotImplementedError

    def find_path(self) -> str:
        """Returns the path of the URL."""
        raise NotImplementedError

    def find_socket(self) -> Any:
        """Returns the socket of the connection; None where the server does not show it."""
        return None

    def has_client_left(self, exc: BaseException | None) -> bool:
        """Returns whether the client did not wait for the whole response. `exc`: what left the application, or None."""
        return False

    # ── the request ──────────────────────────────────────────────────────────────────────────────────────────────

    def open_request(self) -> request_span.RequestSpan | None:
        """Opens the request below a span of this process, or else below the span in the headers."""
        ambient = self._deferred is not None and has_active_span()
        headers, owner = self.list_headers(), self.owner
        name, _ = to_known_names(self.method, "")
        request = None if ambient else open_from_headers(headers, name, owner, self.arrived_at)
        if request is None:
            request = open_by_propagators(headers, name, owner, ambient, self.arrived_at)
        self.request = request
        if request is None:
            return None
        record_socket_wait(request, self.find_socket(), self.arrived_at, _clock.now())
        if caller.caller_settings is not tenancy.NO_CALLER_SETTINGS:
            caller.record_caller(request, headers, self.find_path())
        return request

    def attach(self) -> Any:
        """Makes the request current; returns the token for `detach`, or None."""
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

    def record_start(self, status: int) -> None:
        """Notes the status, and whether the span of another instrumentation is current."""
        self.status = status
        if self._deferred is not None and self.request is None:
            self.is_counted_elsewhere = has_active_span()

    def record_chunk(self, chunk: Any, at: int) -> None:
        """Records a chunk of the response, which the server is about to send; an empty one is none."""
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
        outcome, error_type = self._determine_outcome(exc)
        http = encode_method(self.method, self.scheme) if request.has_server else 0
        route = self.route if request.has_server else ""
        request.close(outcome, error_type, self.status, self.completed_at, http, route)

    def _determine_outcome(self, exc: BaseException | None) -> tuple[int, str]:
        """Returns outcome and error type, and sets a missing status."""
        if self.has_client_left(exc):
            return events.ABORTED, events.CLIENT_DISCONNECT
        sent_status = self.status
        self.status = sent_status or 500  # servers send 500 if the application sent nothing
        if exc is None and self.status >= 500:
            exc = self.error
        return determine_outcome(exc, sent_status, bool(self.completed_at))

    def _record_without_span(self, exc: BaseException | None) -> None:
        """Counts a request that reached no model, and whose method infers nothing; opens and closes any other."""
        method, scheme = to_known_names(self.method, self.scheme)
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
