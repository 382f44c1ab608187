"""Follows the response of one HTTP request: its start, its first chunks, its last byte, a client that leaves.

    start, first chunks ─▶ send_and_follow, or send_and_record ─▶ server's send
    further chunks ─▶ server's send

The application holds `send`, which stays the same object when it lets the chunks pass: the compiled exchange, or
a `functools.partial` whose function is replaced. That needs hooks on the server, which report the last byte and
slow readers (`server_connection`). Other servers are timed at each chunk.
"""

from __future__ import annotations

from collections.abc import Awaitable, MutableMapping

from otel_infer import _clock
from otel_infer.instrumentation.asgi import response_headers
from otel_infer.instrumentation.asgi.exchange_state import ExchangeState, Message
from otel_infer.instrumentation.asgi.server_connection import (
    UNKNOWN_CONNECTION,
    follow_stream,
    is_stream_followed,
)
from otel_infer.ringbuffer import events
from otel_infer.tracing import request_span

_now = _clock.now


class Response(ExchangeState):
    """The response of one exchange, which `Exchange` extends by the request."""

    __slots__ = ()

    def send_and_follow(self, message: Message) -> Awaitable[None]:
        """Calls the server's `send`, where the server reports the last byte: no coroutine of ours is awaited."""
        try:
            kind = message.get("type")
            if kind == "http.response.body":
                if self.request is not None:
                    self._record_chunk(self.request, message, _now())
            elif kind == "http.response.start":
                message = self._start_response(message)
        except BaseException as exc:
            # Any other message is the application's error, which the server raises.
            if isinstance(message, MutableMapping):
                self.abandon_request(exc)
        return self.server_send(message)

    async def send_and_record(self, message: Message) -> None:
        """Calls the server's `send` and times it, where the server does not report the last byte."""
        began_at, request = 0, self.request
        try:
            kind = message.get("type")
            if kind == "http.response.body":
                if request is not None:
                    began_at = _now()
                    self._record_chunk(request, message, began_at)
            elif kind == "http.response.start":
                message = self._start_response(message)
            elif kind == "http.response.pathsend":
                self.finishing, began_at = True, _now()
        except BaseException as exc:
            # Any other message is the application's error, which the server raises.
            if isinstance(message, MutableMapping):
                self.abandon_request(exc)
        try:
            await self.server_send(message)
        except BaseException as exc:
            self._record_send_error(began_at, exc)
            raise
        if began_at and request is not None:
            ended_at = _now()
            request.send_wait_ns += ended_at - began_at
            if self.finishing:
                self.record_last_byte(ended_at)

    def _record_chunk(self, request: request_span.RequestSpan, message: Message, at: int) -> None:
        if not message.get("more_body"):
            self.finishing = True
        if self.connection.disconnected:
            self.disconnected_at = self.disconnected_at or at
            return
        if not message.get("body"):
            return
        request.chunks += 1
        if request.inspect_next_chunk:
            request.inspect_next_chunk = False
            if not request.responding:
                request.responding = True
                if self.finishing:
                    self.started_at = at  # recorded with the end, which follows
                else:
                    request.record_event(events.make_tuple(events.ResponseStarted, (at,)))
            if request.tokens_reached and not request.first_token_sent:
                request.first_token_sent = True
                request.record_event(events.make_tuple(events.FirstTokenSent, (at,)))
        if not self.finishing:
            self._send_directly(request)

    # ── chunks without a frame of ours ───────────────────────────────────────────────────────────────────────────

    def _send_directly(self, request: request_span.RequestSpan) -> None:
        """Lets the further chunks of a stream pass, unless the server does not report its end."""
        if not self.is_direct:
            if self.is_timed:
                return
            if not self.is_followed and not follow_stream(self.server_send, self):
                self.is_timed = True
                return
            self.is_direct = request.sends_directly = True
        request.on_token_reached = None if request.first_token_sent else self.inspect_next_chunk
        self.passes = True
        if request.inspect_next_chunk:  # another thread has set it just now
            self.passes = False

    def record_disconnect(self, at: int) -> None:
        """Stores when the client was found to be gone, unless it is known."""
        self.disconnected_at = self.disconnected_at or at

    # ── start and end ────────────────────────────────────────────────────────────────────────────────────────────

    def _start_response(self, message: Message) -> Message:
        """Reads the start message of the response. Returns it, with tracing headers if they are enabled."""
        if self.deferred:
            self.open_deferred_request()
        if self.connection.disconnected:
            self.disconnected_at = self.disconnected_at or _now()
        status = message.get("status")
        if not self.disconnected_at and isinstance(status, int):
            self.status = int(status)
        if response_headers.enabled and self.request is not None:
            return response_headers.add_headers(message, self.request)
        return message

    def record_last_byte(self, at: int) -> None:
        """Closes the request at its last byte. Background tasks that follow are not part of the request."""
        if self.completed_at:
            return
        try:
            if self.connection.disconnected:
                self.disconnected_at = self.disconnected_at or at
            self.completed_at, self.finishing = at, True
            if self.is_followed and self.started_at and self.request is not None:
                self.request.send_wait_ns = at - self.started_at  # of the only chunk
            # For a status of 500 or more, the exception behind it is still to come.
            if self.status < 500 or self.disconnected_at:
                self.close_request(None)
        except BaseException as exc:
            self.abandon_request(exc)

    def _record_send_error(self, began_at: int, exc: BaseException) -> None:
        """Records an exception of the server's `send`. `began_at`: 0 = the call is not timed."""
        try:
            request, ended_at = self.request, _now()
            if request is not None and began_at:
                request.send_wait_ns += ended_at - began_at
            if isinstance(exc, OSError) or type(exc).__name__ == "ClientDisconnect":
                self.disconnected_at = self.disconnected_at or ended_at
        except BaseException as own_exc:
            self.abandon_request(own_exc)

    def reports_disconnects(self) -> bool:
        """Returns whether the server tells that its client has left."""
        return self.connection is not UNKNOWN_CONNECTION or is_stream_followed(self.server_send, self)

    # ── what `Exchange` adds ─────────────────────────────────────────────────────────────────────────────────────

    def open_deferred_request(self) -> None:
        """Opens a request that is still to be opened."""
        raise NotImplementedError

    def close_request(self, exc: BaseException | None) -> None:
        """Closes the request, once. `exc`: the exception that left the application, or None."""
        raise NotImplementedError

    def abandon_request(self, exc: BaseException) -> None:
        """Closes the request after our own code raised `exc`."""
        raise NotImplementedError
