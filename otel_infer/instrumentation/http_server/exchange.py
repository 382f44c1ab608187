"""Records one HTTP request and its response, on any server whose module says how to read both."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Mapping
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.http_server.event_loop_lag import watch_event_loop
from otel_infer.instrumentation.http_server.local_address import (
    announce_address,
    is_announced,
    record_address,
)
from otel_infer.instrumentation.http_server.method import encode_method, to_known_names
from otel_infer.instrumentation.http_server.outcome import determine_outcome
from otel_infer.instrumentation.http_server.server_exchange import ServerExchange
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import request_span

_UNTRACED_METHODS = frozenset(events.UNTRACED_METHODS)


def is_websocket(method: Any, headers: Mapping[str, str]) -> bool:
    """Returns whether a request asks for a websocket, which only a GET can. `headers`: with names in any case."""
    return method == "GET" and str(headers.get("upgrade") or "").lower() == "websocket"


class HttpExchange(ServerExchange):
    """One HTTP request and its response.

    It is deferred in two cases. A method that infers nothing has no span unless a model is reached. Another
    instrumentation may start its own SERVER span further in; then the request is opened below that span.

    `status`: 0 = no response yet. `route`: the template of the framework's route. `disconnected_at`: when the client was
    found to be gone; 0 = it was not.
    """

    __slots__ = ("disconnected_at", "method", "route", "scheme", "status")

    owner = "http"

    def __init__(
        self, hook: Hook, method: Any, scheme: Any, has_other_span: bool = False, arrived_at: int = 0
    ) -> None:
        """Begins an exchange. `has_other_span`: another instrumentation may start a SERVER span further in."""
        self.method, self.scheme = method, scheme
        self.status, self.disconnected_at, self.route = 0, 0, ""
        super().__init__(hook, has_other_span or method in _UNTRACED_METHODS, arrived_at)

    def has_client_left(self, exc: BaseException | None) -> bool:
        """Returns whether the client did not wait for the whole response. `exc`: what left the application, or None."""
        return bool(self.disconnected_at)

    def find_address(self) -> Any:
        """Returns host and port on which the request was received; None if they are unknown."""
        return None

    def name_span(self) -> str:
        name, _ = to_known_names(self.method, "")
        return name

    def open_request(self) -> request_span.RequestSpan | None:
        request = super().open_request()
        if not is_announced():  # before a request can end
            announce_address(self.find_address())
        return request

    def record_disconnect(self) -> None:
        """Notes that the client leaves, unless it had the whole response."""
        if not self.completed_at:
            self.disconnected_at = self.disconnected_at or _clock.now()

    def record_start(self, status: int) -> None:
        """Notes the status, and whether the span of another instrumentation is current."""
        self.status = status
        self.note_other_span()

    def close_request(self, request: request_span.RequestSpan, exc: BaseException | None) -> None:
        outcome, error_type = self._determine_outcome(exc)
        http, route = 0, ""
        if request.has_server:
            http, route = encode_method(self.method, self.scheme), self.route
            record_address(request, self.find_address())
        at = self.disconnected_at or self.completed_at
        request.close(outcome, error_type, self.status, at, http, route)

    def _determine_outcome(self, exc: BaseException | None) -> tuple[int, str]:
        """Returns outcome and error type, and sets a missing status."""
        if self.has_client_left(exc):
            return events.ABORTED, events.CLIENT_DISCONNECT
        if isinstance(exc, CancelledError):  # by a server that shuts down, which sends nothing
            return events.ABORTED, events.CANCELLED
        sent_status = self.status
        self.status = sent_status or 500  # servers send 500 if the application sent nothing
        if exc is None and self.status >= 500:
            exc = self.error
        return determine_outcome(exc, sent_status, bool(self.completed_at))

    def record_without_span(self, exc: BaseException | None) -> None:
        """Counts a request whose method infers nothing; opens and closes any other."""
        method, scheme = to_known_names(self.method, self.scheme)
        if method not in _UNTRACED_METHODS:
            request = self.open_request()
            if request is not None:
                self.close_request(request, exc)
            return
        _, error_type = self._determine_outcome(exc)
        ended_at = self.disconnected_at or self.completed_at or _clock.now()
        recorder.record_process(
            events.HttpServed(ended_at, self.arrived_at, self.status, error_type, method, scheme, self.route)
        )


class TransportExchange(HttpExchange):
    """One HTTP request on a transport of asyncio. `incoming`: the framework's request, with a path and a transport.

    `address`: where it was received. The transport does not show it any more once the client has left.
    """

    __slots__ = ("address", "incoming")

    def __init__(self, incoming: Any, hook: Hook, has_other_span: bool = False) -> None:
        transport = incoming.transport
        self.incoming = incoming
        self.address = None if transport is None else transport.get_extra_info("sockname")
        super().__init__(hook, incoming.method, incoming.scheme, has_other_span)
        watch_event_loop()

    def find_path(self) -> str:
        return str(self.incoming.path)

    def find_socket(self) -> Any:
        transport = self.incoming.transport
        return None if transport is None else transport.get_extra_info("socket")

    def find_address(self) -> Any:
        return self.address

    def has_client_left(self, exc: BaseException | None) -> bool:
        """Returns whether the connection closed before the last byte. A server that cancels closes it too."""
        if self.completed_at or self.disconnected_at or isinstance(exc, CancelledError):
            return bool(self.disconnected_at)
        transport = self.incoming.transport
        return transport is None or transport.is_closing()

    def record_sent_status(self, status: Any) -> None:
        """Notes the status of a response whose headers are sent, unless the client has left before."""
        try:
            if not self.status and not self.has_client_left(None):
                self.record_start(int(status))
        except BaseException as exc:
            self._hook.count_failure(exc)
