"""The current context of OpenTelemetry's API, read without the API's intermediate calls."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.context.contextvars_context import ContextVarsRuntimeContext

from otel_infer.tracing.propagator_warnings import call_propagators

log = logging.getLogger(__name__)

(SPAN_KEY,) = trace.set_span_in_context(trace.INVALID_SPAN, Context())
"""The key of the span in a context."""

_runtime: Any = getattr(otel_context, "_RUNTIME_CONTEXT", otel_context)
variable: Any = getattr(_runtime, "_current_context", None)
"""The variable that holds the current context; None for a runtime context that OTEL_PYTHON_CONTEXT names."""
if type(_runtime) is ContextVarsRuntimeContext and variable is not None:
    current_context, attach, _detach = variable.get, variable.set, variable.reset
else:
    variable = None
    current_context, attach, _detach = _runtime.get_current, _runtime.attach, _runtime.detach


def detach(token: Any) -> None:
    """Restores the context before `attach`.

    A token of another task (a stream that was closed elsewhere) is ignored and not logged.
    """
    try:
        _detach(token)
    except Exception:
        pass


def current_span() -> object:
    """Returns the current span; None if there is none."""
    return current_context().get(SPAN_KEY)


def span_context(context: Context) -> trace.SpanContext:
    """Returns the span context of a context's span; an invalid one if it has no span."""
    span: Any = context.get(SPAN_KEY)
    return trace.INVALID_SPAN_CONTEXT if span is None else span.get_span_context()


_logged_types: set[type] = set()


def extract(headers: Mapping[str, str], context: Context) -> Context:
    """Returns the context with what OTEL_PROPAGATORS extract from the headers.

    Clients control the headers: where a propagator raises, the context is returned unchanged.
    """
    try:
        extracted: Context = call_propagators(propagate.extract, headers, context)
        return extracted
    except Exception as exc:
        if type(exc) not in _logged_types:  # its message may hold text from the client
            _logged_types.add(type(exc))
            log.warning(
                "a propagator failed on a request's headers (%s): such requests have no parent",
                type(exc).__name__,
            )
        return context
