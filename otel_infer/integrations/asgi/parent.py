"""Whose child a request is: of a span that is current in this process, or of the one that its headers name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from opentelemetry import baggage, propagate, trace
from opentelemetry import context as otel_context
from opentelemetry.context import Context

from otel_infer import ingress

Tokens = tuple[Any, ...]
"""What was made current, for `leave`."""

W3C_FIELDS = frozenset(("traceparent", "tracestate", "baggage"))

_read_headers: tuple[Any, frozenset[bytes] | None] = (None, None)


def has_provider() -> bool:
    """Whether instrumentations in this process start spans that are real."""
    return not isinstance(trace.get_tracer_provider(), (trace.ProxyTracerProvider, trace.NoOpTracerProvider))


def is_traced() -> bool:
    """Whether a span of this process is current, and not one that has ended.

    asyncio leaks the context of a request into the next one on its connection, if it was the request that had the
    reading resumed (after a body of more than 64 KiB, with uvicorn).
    """
    span = trace.get_current_span()
    context = span.get_span_context()
    if not context.is_valid or context.is_remote:
        return False
    return span.is_recording() or isinstance(span, trace.NonRecordingSpan)


def is_innermost(request: ingress.LiveRequest | None) -> bool:
    """Whether nobody has started a span since this request was opened."""
    if request is None:
        return True
    return trace.get_current_span().get_span_context().span_id == request.get_span_context().span_id


def enter_remote(headers: Iterable[tuple[bytes, bytes]]) -> Tokens:
    """Makes current what the headers say, span and baggage; no span if they name none."""
    global _read_headers
    propagator, names = _read_headers
    if propagator is not propagate.get_global_textmap():
        propagator = propagate.get_global_textmap()
        fields = propagator.fields
        # Other propagators may read headers whose names only begin with what they declare.
        names = frozenset(field.encode() for field in fields) if fields <= W3C_FIELDS else None
        _read_headers = propagator, names
    carrier: dict[str, str] = {}
    for name, value in headers:
        if names is None or name in names:
            key, text = name.decode("latin-1"), value.decode("latin-1")
            carrier[key] = f"{carrier[key]},{text}" if key in carrier else text
    if not carrier and trace.get_current_span() is trace.INVALID_SPAN:
        return ()
    # What is current here may be left over from another request, whose baggage is not this one's.
    context: Context = baggage.clear(trace.set_span_in_context(trace.INVALID_SPAN))
    return (otel_context.attach(propagate.extract(carrier, context) if carrier else context),)


def leave(tokens: Tokens) -> None:
    """Ends what was made current, the last first."""
    for token in reversed(tokens):
        ingress.detach(token)
