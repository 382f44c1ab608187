"""What is ours of the current context, for work that goes on in another thread.

Not a copy of the context: other libraries keep in theirs what is a thread's own (decimal its precision, sniffio which loop runs).
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from otel_infer.instrumentation.hooks.suppression import loading_for_engine, torch_suppressed
from otel_infer.tracing import context, request_span, start


class ThreadContext:
    """As it is where this is made. `starts`: for a thread that starts, which may outlive the current request."""

    __slots__ = ("_otel_context", "_variables")

    def __init__(self, *, starts: bool = False) -> None:
        self._otel_context = context.current_context()
        self._variables: list[tuple[ContextVar[Any], Any]] = [
            (variable, variable.get()) for variable in (torch_suppressed, loading_for_engine)
        ]
        self._variables.append(
            (
                request_span.thread_owner,
                start.capture_for_thread() if starts else request_span.thread_owner.get(),
            )
        )

    def add_variable(self, variable: ContextVar[Any], value: Any) -> ThreadContext:
        """With this, too."""
        self._variables.append((variable, value))
        return self

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls it with ours in the context that is current there."""
        token = context.attach(self._otel_context)
        tokens = [(variable, variable.set(value)) for variable, value in self._variables]
        try:
            return fn(*args, **kwargs)
        finally:
            for variable, before in reversed(tokens):
                variable.reset(before)
            context.detach(token)
