"""What is ours of the current context, for work that goes on in another thread.

Not a copy of the context: other libraries keep in theirs what is a thread's own (decimal its precision, sniffio which loop runs).
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from otel_infer.instrumentation.hooks.suppression import claimed, owned
from otel_infer.tracing import context, request_span, start


class Carried:
    """As it is where this is made. `starts`: for a thread that starts, which may outlive the current request."""

    __slots__ = ("_around", "_ours")

    def __init__(self, *, starts: bool = False) -> None:
        self._around = context.here()
        self._ours: list[tuple[ContextVar[Any], Any]] = [
            (variable, variable.get()) for variable in (claimed, owned)
        ]
        self._ours.append((request_span.lent, start.lend() if starts else request_span.lent.get()))

    def also(self, variable: ContextVar[Any], value: Any) -> Carried:
        """With this, too."""
        self._ours.append((variable, value))
        return self

    def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls it with ours in the context that is current there."""
        token = context.attach(self._around)
        tokens = [(variable, variable.set(value)) for variable, value in self._ours]
        try:
            return fn(*args, **kwargs)
        finally:
            for variable, before in reversed(tokens):
                variable.reset(before)
            context.detach(token)
