"""Whose child a request is: of a span that is current in this process, or of the one that its headers name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from opentelemetry import baggage, propagate, trace
from opentelemetry import context as otel_context
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from otel_infer import ingress

Tokens = tuple[Any, ...]
"""What was made current, for `leave`."""

W3C_FIELDS = frozenset(("traceparent", "tracestate", "baggage"))

_TRACEPARENT = re.compile(rb"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class _Reading(NamedTuple):
    """How headers are read. `names`: all that the propagator looks at; None: it may look at others.

    `plainly`: it is the W3C's own, so that what it makes of a `traceparent` alone is known.
    """

    propagator: Any
    names: frozenset[bytes] | None
    plainly: bool


_reading = _Reading(None, None, False)


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
    current = trace.get_current_span()
    return current is request or current.get_span_context().span_id == request.get_span_context().span_id


def told_by(headers: Iterable[tuple[bytes, bytes]]) -> Context:
    """The current context with the span and baggage that the headers name, or without any."""
    global _reading
    propagator = propagate.get_global_textmap()
    if propagator is not _reading.propagator:
        _reading = _reading_with(propagator)
    _, names, plainly = _reading
    wanted = [(name, value) for name, value in headers if names is None or name in names]
    context = otel_context.get_current()
    if context:  # left over from another request, it may be, whose baggage is not this one's
        context = baggage.clear(trace.set_span_in_context(trace.INVALID_SPAN, context))
    if not wanted:
        return context
    if plainly and len(wanted) == 1 and (span := _plain(*wanted[0])) is not None:
        return trace.set_span_in_context(span, context)
    carrier: dict[str, str] = {}
    for name, value in wanted:
        key, text = name.decode("latin-1"), value.decode("latin-1")
        carrier[key] = f"{carrier[key]},{text}" if key in carrier else text
    return propagate.extract(carrier, context)


def _reading_with(propagator: Any) -> _Reading:
    # Other propagators may read headers whose names only begin with what they declare.
    known = propagator.fields <= W3C_FIELDS
    names = frozenset(field.encode() for field in propagator.fields) if known else None
    composite = type(propagator) is CompositePropagator
    parts = set(map(type, getattr(propagator, "_propagators", ()) if composite else (propagator,)))
    of_w3c = {TraceContextTextMapPropagator, W3CBaggagePropagator}
    return _Reading(propagator, names, TraceContextTextMapPropagator in parts and parts <= of_w3c)


def _plain(name: bytes, value: bytes) -> trace.Span | None:
    """The caller's span, as nearly all of them send it: `traceparent` of version 00, nothing beside it. None otherwise."""
    said = _TRACEPARENT.fullmatch(value) if name == b"traceparent" else None
    if said is None:
        return None
    trace_id, span_id, flags = said.groups()
    context = trace.SpanContext(int(trace_id, 16), int(span_id, 16), True, trace.TraceFlags(int(flags, 16)))
    return trace.NonRecordingSpan(context) if context.is_valid else None


def leave(tokens: Tokens) -> None:
    """Ends what was made current, the last first."""
    for token in reversed(tokens):
        ingress.detach(token)
