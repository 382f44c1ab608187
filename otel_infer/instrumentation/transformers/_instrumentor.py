"""The one `Integration` that the files of this folder fill, and what they share."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from opentelemetry import context as otel_context

from otel_infer.instrumentation.hooks.engines import strip_model_path
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.tracing import request_span
from otel_infer.tracing import start as ingress

ENGINE = "transformers"
CANCELLED = "_GenerationCancelled"
"""What a streamer raises to have `generate` stop."""

instrumentor = Instrumentor("transformers", "transformers", ("transformers",), is_engine=True)

already_submitted: ContextVar[bool] = ContextVar("otel_infer-handed-over", default=False)
"""Whether what runs next was handed to the thread it runs on, which has been said already."""


def model_name(model: Any) -> str:
    """The served name of a model: its hub id, or the folder's own name, never a path."""
    name = str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")
    return strip_model_path(name) if name else type(model).__name__


def open_own_request(operation: str, model: Any) -> request_span.RequestSpan | None:
    """A request of its own, for work that no server's request is current for (offline use)."""
    name = model_name(model)
    return ingress.open_request(
        f"{operation} {name}", owner=ENGINE, operation=operation, provider=ENGINE, model=name
    )


def name_request(request: request_span.RequestSpan, operation: str, model: Any) -> None:
    """Says on a server's request which model serves it, once."""
    if not request.is_named:
        request.is_named = True
        request.set_operation(
            operation=request.operation or operation, provider=ENGINE, model=model_name(model)
        )


def wrap_in_empty_context(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """A step hook for what starts a thread that serves everybody: it belongs to no request, whoever happens to start it."""

    def call_in_empty_context(*args: Any, **kwargs: Any) -> Any:
        token = otel_context.attach(otel_context.Context())
        try:
            return original(*args, **kwargs)
        finally:
            ingress.detach(token)

    return call_in_empty_context
