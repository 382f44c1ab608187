"""A request that is opened once something below it needs it: a stage, a model, another process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from opentelemetry.context import Context

from otel_infer.tracing import context
from otel_infer.tracing.request_span import REQUEST_KEY, RequestSpan


class DeferredRequest:
    """Takes the place of a request in the context. `open`: opens it; called once, in the thread that needs it."""

    __slots__ = ("_lock", "_open", "_request")

    ended = False

    def __init__(self, open_request: Callable[[], RequestSpan | None]) -> None:
        self._open: Callable[[], RequestSpan | None] | None = open_request
        self._request: RequestSpan | None = None
        self._lock = threading.RLock()  # a propagator may ask for the current request

    def open(self) -> RequestSpan | None:
        """Returns the request, which is opened now unless it is open; None if it is not recorded."""
        with self._lock:
            if self._open is not None:
                open_request, self._open = self._open, None
                self._request = open_request()
        return self._request

    def discard(self) -> None:
        """Makes `open` return None from now on, unless the request is open: its exchange has ended."""
        with self._lock:
            self._open = None

    def attach(self) -> Any:
        """Makes it current here; returns the token for `detach`."""
        return context.attach(Context({**context.current_context(), REQUEST_KEY: self}))
