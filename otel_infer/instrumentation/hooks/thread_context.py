"""Carries our part of the current context to work that continues in another thread.

The whole context is not copied, because other libraries keep thread-specific state in it: decimal its
precision, sniffio the name of the running event loop.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from otel_infer.instrumentation.hooks.suppression import loading_for_engine, torch_suppressed
from otel_infer.tracing import context, request_span

_THREADS_INHERIT = bool(getattr(sys.flags, "thread_inherit_context", False))
"""Whether a new thread begins with the context of the one that starts it (Python 3.14)."""


class ThreadContext:
    """The OpenTelemetry context and our context variables, as they are where this object is made.

    `starts`: it is for a new thread, which may outlive the current request.
    """

    __slots__ = ("_otel_context", "_request", "_variables")

    def __init__(self, request: request_span.RequestSpan | None, *, starts: bool = False) -> None:
        """`request`: the current one."""
        self._otel_context = context.current_context()
        owner = request_span.thread_owner.get()
        self._request = request if starts else None
        if starts and request is not None:
            owner = request, self._otel_context.get(context.SPAN_KEY)
        self._variables: list[tuple[ContextVar[Any], Any]] = []
        # A value that is the default is the thread's, too: what it ran before has reset its own.
        if torch_suppressed.get() or _THREADS_INHERIT:
            self._variables.append((torch_suppressed, torch_suppressed.get()))
        if loading_for_engine.get() or _THREADS_INHERIT:
            self._variables.append((loading_for_engine, loading_for_engine.get()))
        if owner is not None or _THREADS_INHERIT:
            self._variables.append((request_span.thread_owner, owner))

    def add_variable(self, variable: ContextVar[Any], value: Any) -> ThreadContext:
        """Adds a context variable to be set in `run`, and returns this object."""
        self._variables.append((variable, value))
        return self

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls `fn` in the calling thread, with the captured context and variables set for the call."""
        token = context.attach(self._otel_context)
        tokens = []
        for variable, value in self._variables:
            tokens.append(variable.set(value))
        try:
            if self._request is not None:
                return self._request.call_in_thread(fn, *args, **kwargs)
            return fn(*args, **kwargs)
        finally:
            while tokens:
                variable_token = tokens.pop()
                variable_token.var.reset(variable_token)
            context.detach(token)
