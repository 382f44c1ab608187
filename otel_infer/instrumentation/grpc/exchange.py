"""Records one remote procedure call: its request, and the status code that its client gets."""

from __future__ import annotations

import sys
from asyncio import CancelledError
from collections.abc import Callable
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.grpc.accept_wait import UNKNOWN_CALL, AcceptedCall, AcceptWaits
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.http_server.event_loop_lag import watch_event_loop
from otel_infer.instrumentation.http_server.server_exchange import ServerExchange, encode_headers
from otel_infer.instrumentation.waits import MIN_WAIT_NS, record_wait
from otel_infer.ringbuffer import events
from otel_infer.tracing import context as current
from otel_infer.tracing import request_span
from otel_infer.tracing.header_reader import W3C_FIELDS
from otel_infer.tracing.outcome import classify_exception

STATUS_CODES = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
"""By number, as grpc.StatusCode has them."""
SERVER_ERRORS = (
    "UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS",
)  # fmt: skip
"""Codes that are an error of the server (RPC conventions 1.45)."""
_OWN_SERVICES = "grpc."
MAX_TRANSIT_S = 0.1
"""Longest time from a client to the core, by which a deadline is later there."""
_ABORT_MODULE, _ABORT_NAME = "grpc._cython.cygrpc", "AbortError"


class Server:
    """How a server records its calls. `pool_size`: threads of its pool, 0 = unknown.

    `has_other_span`: an interceptor of another instrumentation starts the SERVER span. `waits`: None if it is unknown how
    long calls wait to be accepted.
    """

    __slots__ = ("has_other_span", "hook", "is_asyncio", "pool_size", "waits")

    def __init__(self, hook: Hook, pool_size: int, has_other_span: bool, is_asyncio: bool) -> None:
        self.hook, self.pool_size = hook, pool_size
        self.has_other_span, self.is_asyncio = has_other_span, is_asyncio
        self.waits: AcceptWaits | None = None

    def note_end(self, accepted: AcceptedCall, _task: Any = None) -> None:
        """Notes that an accepted call has ended; it may be noted again."""
        if self.waits is not None and accepted.number:
            self.waits.note_end(accepted.number)


class RpcExchange(ServerExchange):
    """One remote procedure call. `context`: gRPC's, once its handler runs.

    `method`: `package.Service/Method`; `_OTHER` if the server has none of this name, because clients may send any.
    `is_accepted`: the server has looked at the handler, so it did not refuse the call. `is_running`: a function of the
    user runs in a thread, which the end of the call does not stop; `is_over`: the call has ended meanwhile.
    `accepted`: how the server accepted it. `is_entered_again`: its function runs in several steps, one for each message.
    `has_single_message`: its response was one message, and brought no token before.
    `has_failed`: a threaded server has sent INTERNAL because of a message; `failure`: the exception, if there was one.
    """

    owner = "grpc"
    context: Any = None
    failure: BaseException | None = None
    has_failed = has_single_message = is_accepted = is_entered_again = is_over = is_running = False
    _around: Any = None

    def __init__(
        self,
        details: Any,
        server: Server,
        is_known: bool,
        arrived_at: int,
        accepted: AcceptedCall = UNKNOWN_CALL,
    ) -> None:
        self._ended = True  # there is nothing to end until it has begun
        self.is_known, self.server, self.accepted = is_known, server, accepted
        self.method = str(details.method).lstrip("/") if is_known else events.OTHER
        self.metadata = details.invocation_metadata or ()
        self._ends = [1]
        is_deferred = server.has_other_span or self.method.startswith(_OWN_SERVICES)
        super().__init__(server.hook, is_deferred, arrived_at)
        if server.is_asyncio:
            watch_event_loop()

    def record_accept_wait(self, request: request_span.RequestSpan) -> None:
        waited_since = self.accepted.waited_since
        if waited_since:
            request.record_event(events.StageEnded(self.arrived_at, waited_since, events.ACCEPT, 0))

    def name_span(self) -> str:
        return self.method if self.is_known else self.owner

    def list_headers(self) -> list[tuple[bytes, bytes]]:
        return encode_headers(self.metadata)

    def list_w3c_headers(self) -> list[tuple[bytes, bytes]]:
        return [
            (name.encode(), value.encode("latin-1", "replace"))
            for name, value in self.metadata
            if name in W3C_FIELDS and isinstance(value, str)
        ]

    def find_path(self) -> str:
        return f"/{self.method}"

    # ── the handler ──────────────────────────────────────────────────────────────────────────────────────────────

    def begin_handler(self, context: Any, is_pooled: bool) -> None:
        """Notes that the handler begins. The span of another instrumentation is current now. `is_pooled`: in a thread."""
        self.context = context
        if self._deferred is not None and not self.method.startswith(_OWN_SERVICES):
            self._deferred.open()
        if is_pooled and _clock.now() - self.arrived_at >= MIN_WAIT_NS:
            self.record_wait()

    def record_wait(self) -> None:
        """Records that the call has waited for a thread until now."""
        try:
            if self.server.pool_size and self.request is not None:
                record_wait(self.request, events.POOL_WAIT, self.arrived_at, self.server.pool_size)
        except BaseException as exc:
            self._hook.count_failure(exc)

    def call(self, function: Callable[[Any, Any], Any], request: Any, context: Any) -> Any:
        """Calls a function of the user that runs in a thread, in the context of its call, and returns its response.

        While it runs, the sidecar finds this thread if the call is late. An exception ends the call.
        """
        token, live = ServerExchange.attach(self), self.request
        self.is_running = True
        try:
            try:
                return (
                    function(request, context)
                    if live is None
                    else live.call_in_thread(function, request, context)
                )
            finally:
                self.is_running = False
                if token is not None:
                    current.detach(token)
        except BaseException as exc:
            self.end(exc)
            raise

    def attach(self) -> Any:
        """Makes the request current, or in a later step of a stream what was current at the end of the step before."""
        return super().attach() if self._around is None else current.attach(self._around)

    def __exit__(self, kind: Any, exc: BaseException | None, traceback: Any) -> None:
        if self.is_entered_again and exc is None and self._token is not None:
            self._around = current.current_context()
        super().__exit__(kind, exc, traceback)

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def finish_handler(self) -> None:
        """Ends the call after its handler returned a response, unless that is serialized afterwards."""
        try:
            is_refusal = self.server.is_asyncio and self._find_own_code() > 0  # there is no response then
        except BaseException as exc:
            is_refusal = False
            self._hook.count_failure(exc)
        if self.is_over:
            self.end(GeneratorExit())
        else:
            self.completed_at = _clock.now()
            if is_refusal:
                self.end()

    def record_response(self) -> None:
        """Records the only message of the response, which is serialized now and ends the call."""
        if not self._ended:
            self.completed_at = now = _clock.now()
            request = self.request
            if request is not None and not (request.responding or request.tokens_reached):
                request.chunks, self.has_single_message = 1, True  # the end of the request says so
            else:
                self.record_chunk(True, now)
            self.end()

    def record_message(self) -> None:
        """Records a message of a stream, which is serialized now."""
        if not self._ended:
            self.record_chunk(True, _clock.now())

    def finish(self) -> None:
        """Ends the call, whose last message was handed over now."""
        self.completed_at = _clock.now()
        self.end()

    def end(self, exc: BaseException | None = None) -> None:
        """Ends the request, once: the call and a function in a thread may end at the same time."""
        try:
            self._ends.pop()
        except IndexError:
            return
        if self.accepted.number:
            self.server.note_end(self.accepted)
        super().end(exc)

    def fail_message(self, exc: BaseException | None) -> None:
        """Ends the call, of which a message could not be (de)serialized. `exc`: None if the result was None."""
        self.note_failure(exc)
        self.end(exc)

    def fail_request(self, exc: BaseException | None) -> None:
        """Ends the call, whose only request could not be read, so that no handler runs. It has had a thread."""
        self.record_wait()
        self.fail_message(exc)

    def note_failure(self, exc: BaseException | None) -> None:
        """Notes that the server has sent its status because of a message; the handler may go on."""
        if not self.server.is_asyncio and not self.has_failed:
            self.has_failed, self.failure = True, exc

    def end_unfinished(self, _task: Any = None) -> None:
        """Ends a call that its server has left, unless a function of the user still runs."""
        self.is_over = True
        if not (self._ended or self.is_running):
            if self.context is None and self.is_accepted:
                self.record_wait()
            self.end(GeneratorExit())

    def __del__(self) -> None:
        if not (self._ended or sys.is_finalizing()):
            self.is_running = False
            self.end_unfinished()

    def close_request(self, request: request_span.RequestSpan, exc: BaseException | None) -> None:
        code, at = self._find_code(exc), self.completed_at or _clock.now()
        if request.has_server:
            served = at, self.owner, self.method, code
            request.record_event(events.make_tuple(events.CallServed, served))
        outcome, error_type = events.OK, ""
        if code == "CANCELLED":
            outcome, error_type = events.ABORTED, events.CLIENT_DISCONNECT
        elif code in SERVER_ERRORS:
            raised = self.failure or exc
            is_own = raised is not None and not _is_of_server(raised)
            outcome, error_type = classify_exception(raised) if is_own else (events.ERROR, code)
        request.close(outcome, error_type, 0, at, events.SINGLE_CHUNK if self.has_single_message else 0)

    def _find_code(self, exc: BaseException | None) -> str:
        """Returns the name of the status code that the client gets."""
        if not self.is_known and exc is None:
            return "UNIMPLEMENTED"
        is_left = isinstance(exc, GeneratorExit)
        if is_left and self.context is None and not self.is_accepted and not self.server.has_other_span:
            return "RESOURCE_EXHAUSTED"
        if not self.has_failed and self._is_cancelled(exc):
            return "DEADLINE_EXCEEDED" if self._has_timed_out() else "CANCELLED"
        number = self._find_own_code()
        if number > 0:
            return STATUS_CODES[number]
        if self.has_failed:
            return "INTERNAL"
        return "OK" if exc is None or is_left else "UNKNOWN"

    def _has_timed_out(self) -> bool:
        """Returns whether a cancelled call has reached its deadline. The client's is earlier than the server's, which begins later."""
        remaining = self.context.time_remaining() if self.context is not None else None
        elapsed_s = (_clock.now() - self.arrived_at) / 1e9
        return remaining is not None and remaining <= min(MAX_TRANSIT_S, elapsed_s / 5)

    def _find_own_code(self) -> int:
        """Returns the number of the status code that the handler set; 0 if it set none or OK."""
        if self.context is None:
            return 0
        noted = getattr(self.context, "_self_noted_code", None) if self.server.is_asyncio else None
        code = noted[0] if noted else self.context.code() if hasattr(self.context, "code") else None
        if code is None:
            return 0
        number = code if isinstance(code, int) else getattr(code, "value", (0,))[0]
        return number if isinstance(number, int) and 0 < number < len(STATUS_CODES) else 0

    def _is_cancelled(self, exc: BaseException | None) -> bool:
        """Returns whether the call was cancelled, by its client, its deadline or the end of the server."""
        is_left = isinstance(exc, GeneratorExit)
        if self.context is None or isinstance(exc, CancelledError):
            return is_left or isinstance(exc, CancelledError)
        if self.server.is_asyncio:
            is_done = getattr(self.context, "done", None)
            return is_left and not (is_done is not None and is_done())
        if is_left and self.completed_at:  # another interceptor has replaced our serializer
            return False
        is_active = getattr(self.context, "is_active", None)
        return is_active is not None and not is_active()


def _is_of_server(exc: BaseException) -> bool:
    """Returns whether gRPC raised it for a status: a call of `abort`, or the end of the call."""
    if isinstance(exc, (CancelledError, GeneratorExit)):
        return True
    kind = type(exc)
    is_abort = kind.__name__ == _ABORT_NAME and kind.__module__ == _ABORT_MODULE
    return kind is Exception or is_abort  # the threaded server's `abort` raises a bare one
