"""Whose child a request is: of a span that is current in this process, or of the one that its headers name."""

from __future__ import annotations

from binascii import unhexlify
from collections.abc import Iterable
from typing import Any, NamedTuple

from opentelemetry import baggage, propagate, trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from otel_infer.tracing import context, request_span
from otel_infer.tracing.span_ids import NO_CALLER, Caller

Tokens = tuple[Any, ...]
"""What was made current, for `leave`."""

W3C_FIELDS = frozenset(("traceparent", "tracestate", "baggage"))

TRACEPARENT_BYTES, CALLER_BYTES = 55, 26
_DASH, _NO_TRACE, _NO_SPAN = ord("-"), bytes(16), bytes(8)


class AsgiEntryPoint:
    """What was learned of the way in. `inside`: an application that we hook is behind it; `traced`: so is a tracer.

    `watched_until`: when it is to be asked again whether its loop is watched.
    """

    __slots__ = ("has_tracer", "reached_app", "watched_until")
    deferred = False

    def __init__(self) -> None:
        self.reached_app = self.has_tracer = False
        self.watched_until = 0

    def enter_application(self, app: Any) -> Tokens:
        """The lifespan has come to an application that we hook."""
        self.reached_app = True
        return ()

    def record_route_error(self, exc: BaseException) -> None:
        """The lifespan broke, which `Lifespan` tells."""


class _HeaderReader(NamedTuple):
    """How headers are read. `names`: all that the propagator looks at; None: it may look at others.

    `plainly`: it is the W3C's own, so that what it makes of a `traceparent` alone is known.
    """

    propagator: Any
    header_names: frozenset[bytes] | None
    is_w3c: bool


_header_reader = _HeaderReader(None, None, False)
_had_no_provider = False


def has_provider() -> bool:
    """Whether instrumentations in this process start spans that are real."""
    global _had_no_provider
    # While there is none, the API reads the environment each time it is asked.
    if _had_no_provider and getattr(trace, "_TRACER_PROVIDER", True) is None:
        return False
    provider = trace.get_tracer_provider()
    _had_no_provider = isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider))
    return not _had_no_provider


def has_active_span() -> bool:
    """Whether a span of this process is current, and not one that has ended.

    asyncio leaks the context of a request into the next one on its connection, if it was the request that had the
    reading resumed (after a body of more than 64 KiB, with uvicorn).
    """
    span = trace.get_current_span()
    context = span.get_span_context()
    if not context.is_valid or context.is_remote:
        return False
    return span.is_recording() or isinstance(span, trace.NonRecordingSpan)


def is_caller_in_other_trace(scope: Any) -> bool:
    """Whether the caller is of another trace than the span that is current: who started that has not read the headers."""
    told = trace.get_current_span(extract_context(scope.get("headers") or (), Context())).get_span_context()
    return told.is_valid and told.trace_id != trace.get_current_span().get_span_context().trace_id


def is_current_span(request: request_span.RequestSpan | None) -> bool:
    """Whether nobody has started a span since this request was opened."""
    if request is None or context.current_span() is request:
        return True
    current = trace.get_current_span()
    return current.get_span_context().span_id == request.get_span_context().span_id


def clear_span_and_baggage(context: Context) -> Context:
    """Without its span and baggage: left over from another request, it may be, whose are not this one's."""
    return baggage.clear(trace.set_span_in_context(trace.INVALID_SPAN, context)) if context else context


def parse_caller(headers: Iterable[tuple[bytes, bytes]]) -> Caller | None:
    """The caller, as nearly all of them name themselves: a `traceparent` of version 00 and nothing beside it, or not at all.

    None: the propagators are to be asked.
    """
    reading = (
        _header_reader
        if propagate.get_global_textmap() is _header_reader.propagator
        else _get_header_reader()
    )
    if not reading.is_w3c:
        return None
    pairs = headers if isinstance(headers, list) else list(headers)
    said = dict(pairs)
    if len(said) != len(pairs) or b"baggage" in said or b"tracestate" in said:
        return None
    if (value := said.get(b"traceparent")) is None:
        return NO_CALLER
    if len(value) != TRACEPARENT_BYTES or value[:3] != b"00-" or not (value[35] == value[52] == _DASH):
        return None
    try:
        # Not by a regular expression, which would be most of what a request costs here.
        caller = unhexlify(value.replace(b"-", b""))
    except ValueError:
        return None
    if len(caller) != CALLER_BYTES:  # there were more dashes
        return None
    if caller.startswith(_NO_TRACE, 1) or caller.startswith(_NO_SPAN, 17) or not value.islower():
        return None
    return caller


def extract_context(headers: Iterable[tuple[bytes, bytes]], around: Context) -> Context:
    """This context with the span and baggage that the propagators find in the headers; of those that break on them, as it is."""
    names = _get_header_reader().header_names
    carrier: dict[str, str] = {}
    for name, value in headers:
        if names is None or name in names:
            key, text = name.decode("latin-1"), value.decode("latin-1")
            carrier[key] = f"{carrier[key]},{text}" if key in carrier else text
    return context.extract(carrier, around) if carrier else around


def _get_header_reader() -> _HeaderReader:
    global _header_reader
    propagator = propagate.get_global_textmap()
    if propagator is not _header_reader.propagator:
        _header_reader = _make_header_reader(propagator)
    return _header_reader


def _make_header_reader(propagator: Any) -> _HeaderReader:
    # Other propagators may read headers whose names only begin with what they declare.
    known = propagator.fields <= W3C_FIELDS
    names = frozenset(field.encode() for field in propagator.fields) if known else None
    composite = type(propagator) is CompositePropagator
    parts = set(map(type, getattr(propagator, "_propagators", ()) if composite else (propagator,)))
    of_w3c = {TraceContextTextMapPropagator, W3CBaggagePropagator}
    return _HeaderReader(propagator, names, TraceContextTextMapPropagator in parts and parts <= of_w3c)


def detach_all(tokens: Tokens) -> None:
    """Ends what was made current."""
    for token in tokens:
        context.detach(token)
