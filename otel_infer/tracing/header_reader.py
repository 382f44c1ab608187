"""Which headers the global propagator reads, and whether it is the W3C propagator, whose result is known without a call."""

from __future__ import annotations

from typing import Any, NamedTuple

from opentelemetry import propagate
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

TRACEPARENT = "traceparent"
W3C_FIELDS = frozenset((TRACEPARENT, "tracestate", "baggage"))


class HeaderReader(NamedTuple):
    """How the global propagator reads headers.

    `header_names`: all headers it reads; None = it may read headers beyond its declared fields.
    `is_w3c`: it is the W3C propagator, so the result of a lone `traceparent` is known without calling it.
    """

    propagator: Any
    header_names: frozenset[bytes] | None
    is_w3c: bool


_reader = HeaderReader(None, None, False)


def get_header_reader() -> HeaderReader:
    """Returns how the propagator that is set now reads headers."""
    global _reader
    propagator = propagate.get_global_textmap()
    if propagator is not _reader.propagator:
        _reader = _make_header_reader(propagator)
    return _reader


def reads_w3c_only() -> bool:
    """Returns whether the global propagator reads the W3C headers and nothing else."""
    is_known = (
        propagate.get_global_textmap() is _reader.propagator
    )  # nearly always, which saves a call per request
    return (_reader if is_known else get_header_reader()).is_w3c


def _make_header_reader(propagator: Any) -> HeaderReader:
    # Other propagators may read headers whose names only begin with a declared field.
    is_known = propagator.fields <= W3C_FIELDS
    names = frozenset(field.encode() for field in propagator.fields) if is_known else None
    composite = type(propagator) is CompositePropagator
    parts = set(map(type, getattr(propagator, "_propagators", ()) if composite else (propagator,)))
    w3c_types = {TraceContextTextMapPropagator, W3CBaggagePropagator}
    return HeaderReader(propagator, names, TraceContextTextMapPropagator in parts and parts <= w3c_types)
