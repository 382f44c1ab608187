"""Who a new request is: its trace and span ids, whether it is sampled, and whose child it is."""

from __future__ import annotations

import re
from typing import Any, NamedTuple, Protocol

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

_SAMPLED, _NOT_SAMPLED = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)
_SAMPLING = re.compile("th:[0-9a-f]{1,14}|rv:[0-9a-f]{14}")


class Limits(NamedTuple):
    """Of the SDK's span limits, what applies to the live span."""

    attributes: int = 128
    events: int = 128
    links: int = 128
    length: int | None = None


class Opened(NamedTuple):
    """The identity of a new request. `inner`: a provider's own live spans, (server span or None, request span)."""

    request: SpanContext
    server: SpanContext | None
    parent: SpanContext | None
    inner: tuple[trace.Span | None, trace.Span] | None


class Opener(Protocol):
    """Makes identities: from the SDK's sampler and id generator, or from a user's provider."""

    limits: Limits

    def open(self, name: str, parent: Context, above: SpanContext, own_server: bool, wall_at: int) -> Opened:
        """A request span named `name`, below a server span of ours if `own_server`; `above` is the span in `parent`."""
        ...


class IdOpener:
    """Identities by the SDK's sampler and id generator, as configured by the standard variables."""

    def __init__(self, sampler: Any, ids: Any, limits: Limits) -> None:
        self._sampler, self._ids, self.limits = sampler, ids, limits
        self._constant = _constant(sampler)

    def open(self, name: str, parent: Context, above: SpanContext, own_server: bool, wall_at: int) -> Opened:
        trace_id = above.trace_id if above.is_valid else self._ids.generate_trace_id()
        if self._constant is not None:
            sampled, state = self._constant.of(above), above.trace_state if above.is_valid else None
        else:
            kind = SpanKind.SERVER if own_server else SpanKind.INTERNAL
            result = self._sampler.should_sample(parent, trace_id, name, kind, None, None)
            sampled, state = result.decision.is_sampled(), result.trace_state
        flags = _SAMPLED if sampled else _NOT_SAMPLED

        new = self._ids.generate_span_id
        request = SpanContext(trace_id, new(), False, flags, state)
        server = SpanContext(trace_id, new(), False, flags, state) if own_server else None
        return Opened(request, server, above if above.is_valid else None, None)


class _Constant(NamedTuple):
    """A sampler that asks for nothing but its parent's flag, or not even for that. `root`: for who has no parent."""

    root: bool
    follows: bool

    def of(self, above: SpanContext) -> bool:
        """Whether the child of this span is sampled."""
        return above.trace_flags.sampled if self.follows and above.is_valid else self.root


def _constant(sampler: Any) -> _Constant | None:
    """What this one decides, if it is one of those that the standard variables name without an argument: known without
    the dozen calls that asking it takes."""
    from opentelemetry.sdk.trace import sampling

    known = (
        (sampling.DEFAULT_ON, _Constant(True, True)),
        (sampling.DEFAULT_OFF, _Constant(False, True)),
        (sampling.ALWAYS_ON, _Constant(True, False)),
        (sampling.ALWAYS_OFF, _Constant(False, False)),
    )
    return next((constant for one, constant in known if one is sampler), None)


class ProviderOpener:
    """Identities of spans that a user's provider starts; they are ended when the request has been assembled."""

    limits = Limits(1 << 30, 1 << 30, 1 << 30)

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer

    def open(self, name: str, parent: Context, above: SpanContext, own_server: bool, wall_at: int) -> Opened:
        server = None
        if own_server:
            server = self._tracer.start_span(name, parent, SpanKind.SERVER, start_time=wall_at)
            parent = trace.set_span_in_context(server, parent)
        span = self._tracer.start_span(name, parent, SpanKind.INTERNAL, start_time=wall_at)
        own = server.get_span_context() if server is not None else None
        return Opened(span.get_span_context(), own, above if above.is_valid else None, (server, span))


def sampling_state(state: trace.TraceState) -> str:
    """Of a `tracestate` what says how it was sampled (specification of OpenTelemetry, "TraceState handling"): counts are
    scaled up by it. What vendors put beside it is theirs, and is passed on but not exported."""
    said = (state.get("ot") or "").split(";")
    kept = [part for part in said if _SAMPLING.fullmatch(part)]
    return f"ot={';'.join(kept)}" if kept else ""
