"""The `Instrumentor` to which the modules of this folder add their hooks, and the functions they share."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from opentelemetry import context as otel_context

from otel_infer.instrumentation.hooks.engines import read_model_name
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.tracing import request_span, start
from otel_infer.tracing.context import detach

ENGINE = "transformers"
CANCELLED = "_GenerationCancelled"
"""Name of the exception that a streamer raises to stop `generate`."""

instrumentor = Instrumentor("transformers", "transformers", ("transformers",), is_engine=True)

already_submitted: ContextVar[bool] = ContextVar("otel_infer-already-submitted", default=False)
"""Whether another thread queued the next `generate` of this thread, and has recorded its submission."""


def open_own_request(operation: str, model: Any) -> request_span.RequestSpan | None:
    """Opens a request for work outside any server's request (offline use); None while nothing is recorded."""
    name = read_model_name(model)
    return start.open_request(
        f"{operation} {name}", owner=ENGINE, operation=operation, provider=ENGINE, model=name
    )


def name_request(request: request_span.RequestSpan, operation: str, model: str) -> None:
    """Sets the operation and the served name of the model of a server's request, once."""
    if not request.is_named:
        request.is_named = True
        request.set_operation(request.operation or operation, ENGINE, model)


def wrap_in_empty_context(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Returns a wrapper that runs a call in an empty context.

    It is for calls that start a thread: the thread serves all requests, so it must not inherit one.
    """

    def call_in_empty_context(*args: Any, **kwargs: Any) -> Any:
        token = otel_context.attach(otel_context.Context())
        try:
            return original(*args, **kwargs)
        finally:
            detach(token)

    return call_in_empty_context
