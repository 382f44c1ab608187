"""Carries our part of the current context to work that continues in another thread.

The whole context is not copied, because other libraries keep thread-specific state in it: decimal its
precision, sniffio the name of the running event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from otel_infer.instrumentation.hooks.suppression import loading_for_engine, torch_suppressed
from otel_infer.tracing import context, request_span, start


class ThreadContext:
    """The OpenTelemetry context and our context variables, as they are where this object is made.

    `starts`: it is for a new thread, which may outlive the current request.
    """

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
        """Adds a context variable to be set in `run`, and returns this object."""
        self._variables.append((variable, value))
        return self

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls `fn` in the calling thread, with the captured context and variables set for the call."""
        token = context.attach(self._otel_context)
        tokens = [(variable, variable.set(value)) for variable, value in self._variables]
        try:
            return fn(*args, **kwargs)
        finally:
            for variable, variable_token in reversed(tokens):
                variable.reset(variable_token)
            context.detach(token)
