"""Keeps the current request where another instrumentation replaces the context by what it has read from the headers.

    a server ─ our deferred request is current ─▶ attach(extract(headers)) ─▶ its SERVER span ─▶ the application

OpenTelemetry's instrumentations of Flask, WSGI, Falcon and others do so before they start their SERVER span. The request is then opened
below that span, once a model is reached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opentelemetry.context import Context

from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.tracing import context
from otel_infer.tracing.deferred_request import DeferredRequest
from otel_infer.tracing.request_span import REQUEST_KEY

instrumentor = Instrumentor(
    "other_instrumentations", "opentelemetry-api", ("opentelemetry.context.contextvars_context",)
)


@instrumentor.patch_hot_path(
    "opentelemetry.context.contextvars_context:ContextVarsRuntimeContext.attach", reads=("context",)
)
def _patch_attach(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def attach(self: Any, context: Context) -> Any:
        if hook.alive:
            try:
                context = keep_request(context)
            except Exception as exc:
                hook.count_failure(exc)
        return original(self, context)

    return attach


def keep_request(attached: Context) -> Context:
    """Returns the context that is to be attached, with the current request if that is not opened yet.

    A context with a span of this process is returned unchanged: who attaches it has left the request on purpose.
    """
    request = context.current_context().get(REQUEST_KEY)
    if type(request) is not DeferredRequest or request.ended or REQUEST_KEY in attached:
        return attached
    span = context.span_context(attached)
    return Context({**attached, REQUEST_KEY: request}) if span.is_remote or not span.is_valid else attached
