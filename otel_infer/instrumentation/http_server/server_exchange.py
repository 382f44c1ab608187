"""Records one request of a server and its response, whatever protocol it came by."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from opentelemetry.context import Context

from otel_infer import _clock
from otel_infer.config import tenancy
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.http_server.parent_context import (
    has_active_span,
    open_by_propagators,
    open_from_headers,
)
from otel_infer.instrumentation.http_server.socket_wait import record_socket_wait
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.forks import notice_fork
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import caller, request_span
from otel_infer.tracing.context import current_context, detach
from otel_infer.tracing.deferred_request import DeferredRequest
from otel_infer.tracing.header_reader import reads_w3c_only


def encode_headers(headers: Iterable[tuple[Any, Any]]) -> list[tuple[bytes, bytes]]:
    """Returns headers as ASGI has them: names in lower case, both as bytes. Headers that are no text are left out."""
    return [
        (name.lower().encode("latin-1", "replace"), value.encode("latin-1", "replace"))
        for name, value in headers
        if isinstance(name, str) and isinstance(value, str)
    ]


def can_record(hook: Hook) -> bool:
    """Returns whether requests are recorded at all."""
    notice_fork()
    return hook.alive and recorder.active and request_span.span_factory is not None


class ServerExchange:
    """One request and its response. It raises only exceptions of the application.

    The request is opened at once, or, if it is deferred, once a model is reached.

    `completed_at`: when the last chunk was handed over; 0 = not yet. `error`: what the framework answered with an error
    for. `is_counted_elsewhere`: another instrumentation has a span of this request.
    """

    __slots__ = (
        "_deferred", "_ended", "_hook", "_other_context", "_token", "arrived_at", "completed_at", "error", "is_counted_elsewhere", "request",
    )  # fmt: skip

    owner = "server"

    def __init__(self, hook: Hook, is_deferred: bool, arrived_at: int = 0) -> None:
        """Begins an exchange. `arrived_at`: monotonic ns; 0 = now."""
        self._ended = False
        self.arrived_at = arrived_at or _clock.now()
        self._hook = hook
        self._token: Any = None
        self.request: request_span.RequestSpan | None = None
        self.completed_at = 0
        self.error: BaseException | None = None
        self.is_counted_elsewhere = False
        self._deferred: DeferredRequest | None = None
        self._other_context: Context | None = None
        if is_deferred:
            self._deferred = DeferredRequest(self._open_deferred)
        else:
            self.open_request()

    # ── what a server adds ───────────────────────────────────────────────────────────────────────────────────────

    def name_span(self) -> str:
        """Returns the name of the SERVER span, as far as it is known at the beginning."""
        raise NotImplementedError

    def list_headers(self) -> list[tuple[bytes, bytes]]:
        """Returns the request's headers, names in lower case."""
        raise NotImplementedError

    def list_w3c_headers(self) -> list[tuple[bytes, bytes]]:
        """Returns the headers that the W3C propagators read, perhaps among others."""
        return self.list_headers()

    def find_path(self) -> str:
        """Returns the path of the URL."""
        raise NotImplementedError

    def close_request(self, request: request_span.RequestSpan, exc: BaseException | None) -> None:
        """Closes the request. `exc`: what left the application, or None."""
        raise NotImplementedError

    def record_without_span(self, exc: BaseException | None) -> None:
        """Records the end of a deferred request that reached no model, and that is not counted elsewhere."""

    def find_socket(self) -> Any:
        """Returns the socket of the connection; None where the server does not show it."""
        return None

    def record_accept_wait(self, request: request_span.RequestSpan) -> None:
        """Records how long the request has waited until the server accepted it."""
        connection = self.find_socket()
        if connection is not None:
            record_socket_wait(request, connection, self.arrived_at)

    # ── the request ──────────────────────────────────────────────────────────────────────────────────────────────

    def open_request(self) -> request_span.RequestSpan | None:
        """Opens the request below a span of this process, or else below the span in the headers."""
        ambient = self._deferred is not None and has_active_span()
        around = current_context() if ambient else self._other_context
        has_caller = caller.caller_settings is not tenancy.NO_CALLER_SETTINGS
        is_w3c = reads_w3c_only()
        headers = self.list_w3c_headers() if is_w3c and not has_caller else self.list_headers()
        name, owner = self.name_span(), self.owner
        request = None if around or not is_w3c else open_from_headers(headers, name, owner, self.arrived_at)
        if request is None:
            request = open_by_propagators(headers, name, owner, around, self.arrived_at)
        self.request = request
        if request is None:
            return None
        self.record_accept_wait(request)
        if has_caller:
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

    def __enter__(self) -> None:
        """Begins work on the request, which is current meanwhile: `with exchange:`. It may be entered again later."""
        self._token = self.attach()

    def __exit__(self, kind: Any, exc: BaseException | None, traceback: Any) -> None:
        """Ends the work, and with an exception the request. The exception goes on."""
        token, self._token = self._token, None
        if token is not None:
            detach(token)
        if exc is not None:
            self.end(exc)

    def _open_deferred(self) -> request_span.RequestSpan | None:
        """Opens a deferred request. The code that needs it gets no exception of ours."""
        try:
            return self.open_request()
        except BaseException as exc:
            self._hook.count_failure(exc)
            return None

    # ── the response ─────────────────────────────────────────────────────────────────────────────────────────────

    def note_other_span(self) -> None:
        """Notes, for a deferred request, whether the span of another instrumentation is current. It may end before a stream."""
        if self._deferred is not None and self.request is None:
            self.is_counted_elsewhere = has_active_span()
            self._other_context = current_context() if self.is_counted_elsewhere else None

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
                self.close_request(self.request, exc)
            elif not self.is_counted_elsewhere and recorder.requests is not None:
                self.record_without_span(exc)
        except BaseException as own_exc:
            self._abandon_request(own_exc)

    def _abandon_request(self, exc: BaseException) -> None:
        """Closes the request after our own code raised: neither a success nor an error. Its slot is freed."""
        request, self.request = self.request, None
        if request is not None:
            with contextlib.suppress(BaseException):  # `exc` is the exception to be logged
                request.close(events.ABORTED, events.CANCELLED)
        self._hook.count_failure(exc)
