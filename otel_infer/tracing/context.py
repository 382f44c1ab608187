"""The context that is current, as OpenTelemetry's API keeps it, without the calls on the way there."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.context.contextvars_context import ContextVarsRuntimeContext

log = logging.getLogger(__name__)

(SPAN_KEY,) = trace.set_span_in_context(trace.INVALID_SPAN, Context())
"""Under which a context has its span."""

_runtime: Any = getattr(otel_context, "_RUNTIME_CONTEXT", otel_context)
_variable: Any = getattr(_runtime, "_current_context", None)
if type(_runtime) is ContextVarsRuntimeContext and _variable is not None:
    current_context, attach, _detach = _variable.get, _variable.set, _variable.reset
else:  # one that OTEL_PYTHON_CONTEXT names
    current_context, attach, _detach = _runtime.get_current, _runtime.attach, _runtime.detach


def detach(token: Any) -> None:
    """Ends what `attach` began; a token of another task (a stream closed elsewhere) is no error, and is not logged."""
    try:
        _detach(token)
    except Exception:
        pass


def current_span() -> object:
    """The span that is current, if any."""
    return current_context().get(SPAN_KEY)


def span_context(around: Context) -> trace.SpanContext:
    """What this context says of its span; an invalid one if it has none."""
    span: Any = around.get(SPAN_KEY)
    return trace.INVALID_SPAN_CONTEXT if span is None else span.get_span_context()


_logged_types: set[type] = set()


def extract(headers: Mapping[str, str], around: Context) -> Context:
    """This context with what OTEL_PROPAGATORS find in the headers, which are anybody's: what they break on costs the parent alone."""
    try:
        return propagate.extract(headers, around)
    except Exception as exc:
        if type(exc) not in _logged_types:  # its text may be what the client sent
            _logged_types.add(type(exc))
            log.warning(
                "a propagator broke on a request's headers (%s): such requests have no parent",
                type(exc).__name__,
            )
        return around
