"""The fields of an exchange that compiled code reads and writes as well.

They are attributes of a compiled base class where that was built (`_exchange.c`), of a Python class elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.ringbuffer.native import native
from otel_infer.tracing import request_span

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


class PythonExchangeState:
    """The fields.

    `request`: None where nothing is recorded, and after it was closed. `finishing`: the last byte is being
    sent or was sent. `disconnected_at`, `completed_at`: when the client was found to be gone, and when the
    last byte was handed over; monotonic ns, 0 = not yet. `started_at`: when sending of the only chunk began.
    `is_direct`: chunks pass without a frame of ours. `is_timed`: the server has no hooks that allow it.
    `is_followed`: the server reports the last byte of every response, not of streams only. `on_response`: what
    it called for that before. `route_error`: the exception that left the routes during the response.
    `deferred`: the request is to be opened further in.
    """

    __slots__ = (
        "arrived_at",
        "completed_at",
        "connection",
        "deferred",
        "disconnected_at",
        "entry_point",
        "finishing",
        "hook",
        "is_direct",
        "is_followed",
        "is_timed",
        "mount_path",
        "on_response",
        "reached_app",
        "receive",
        "request",
        "root_path",
        "route",
        "route_error",
        "scope",
        "send",
        "server_receive",
        "server_send",
        "started_at",
        "status",
        "tokens",
    )

    hook: Hook
    request: request_span.RequestSpan | None
    scope: Scope
    server_send: Send
    server_receive: Callable[[], Awaitable[Message]]
    send: Any
    receive: Any
    connection: Any
    entry_point: Any
    route: Any
    route_error: Exception | None
    on_response: Callable[[], None] | None
    tokens: tuple[Any, ...]
    root_path: str
    mount_path: str
    deferred: bool
    reached_app: bool
    finishing: bool
    is_direct: bool
    is_followed: bool
    is_timed: bool
    status: int
    arrived_at: int
    disconnected_at: int
    completed_at: int
    started_at: int

    if TYPE_CHECKING:

        def send_and_follow(self, message: Message) -> Awaitable[None]: ...
        async def send_and_record(self, message: Message) -> None: ...
        def record_last_byte(self, at: int) -> None: ...

    def bind_send(self) -> None:
        """Makes `send`. The compiled exchange is itself the application's `send`."""
        self.send = functools.partial(self.send_and_follow if self.is_followed else self.send_and_record)

    @property
    def passes(self) -> bool:
        """Whether chunks reach the server without a frame of ours: the function in the partial is the server's."""
        return self.send is not None and self.send.func is self.server_send

    @passes.setter
    def passes(self, passes: bool) -> None:
        own = self.send_and_follow if self.is_followed else self.send_and_record
        if self.send is not None:  # the exchange has not ended just now
            self.send.__setstate__((self.server_send if passes else own, (), {}, None))

    def inspect_next_chunk(self) -> None:
        """Lets the next chunk pass through this object again, because it may be the first with a token."""
        self.passes = False

    def end_response(self) -> None:
        """Closes the request, whose last byte was written, then calls the server's own callback."""
        self.record_last_byte(_clock.now())
        if self.on_response is not None:
            self.on_response()


if TYPE_CHECKING or native is None:
    ExchangeState = PythonExchangeState
else:
    ExchangeState = native.ExchangeState
