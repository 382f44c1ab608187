"""A request that is opened once something below it needs it: a stage, a model, another process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from opentelemetry.context import Context

from otel_infer.tracing import context
from otel_infer.tracing.request_span import REQUEST_KEY, RequestSpan

MAX_EVENTS = 8


class DeferredRequest:
    """Takes the place of a request in the context. `open`: opens it; called once, in the thread that needs it.

    What only watches a request, such as a wait for a lock, does not open it (`start.find_request`).
    """

    __slots__ = ("_events", "_lock", "_open", "_request")

    responding = False
    tokens_reached = 0

    def __init__(self, open_request: Callable[[], RequestSpan | None]) -> None:
        self._open: Callable[[], RequestSpan | None] | None = open_request
        self._request: RequestSpan | None = None
        self._events: list[Any] = []
        self._lock = threading.RLock()  # a propagator may ask for the current request

    def open(self) -> RequestSpan | None:
        """Returns the request, which is opened now unless it is open; None if it is not recorded."""
        with self._lock:
            if self._open is not None:
                open_request, self._open = self._open, None
                request = self._request = open_request()
                if request is not None:
                    for event in self._events:
                        request.record_event(event)
        return self._request

    @property
    def ended(self) -> bool:
        """Whether it can no longer be opened, or the opened request has ended."""
        return self._open is None if self._request is None else self._request.ended

    @property
    def opened(self) -> RequestSpan | None:
        """The request, if it is open."""
        return self._request

    def record_event(self, event: Any) -> None:
        """Stores an event until the request is opened. Of many, the first ones are kept."""
        with self._lock:
            if self._request is not None:
                self._request.record_event(event)
            elif len(self._events) < MAX_EVENTS:
                self._events.append(event)

    def call_in_thread(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function for this request, which may open it."""
        return call(*args, **kwargs)

    def discard(self) -> None:
        """Makes `open` return None from now on, unless the request is open: its exchange has ended."""
        with self._lock:
            self._open = None

    def discard_after_fork(self) -> None:
        """Discards it in a child process: the parent opens it. A thread that does not exist here may hold the lock."""
        self._lock = threading.RLock()
        self._open = None

    def attach(self) -> Any:
        """Makes it current here; returns the token for `detach`."""
        return context.attach(Context({**context.current_context(), REQUEST_KEY: self}))


CurrentRequest = RequestSpan | DeferredRequest
"""A request that is current, perhaps not opened yet."""
