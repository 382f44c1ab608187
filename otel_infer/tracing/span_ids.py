"""Who a new request is: its trace and span ids, whether it is sampled, and whose child it is."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

from otel_infer.ringbuffer.events import OWN_SERVER_SPAN, REMOTE_PARENT, SAMPLED
from otel_infer.tracing.pending_spans import ProviderSpans

_SAMPLED, _NOT_SAMPLED = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)
_NO_ID = bytes(8)
_SAMPLING_FIELD = re.compile("th:[0-9a-f]{1,14}|rv:[0-9a-f]{14}")


class Limits(NamedTuple):
    """Of the SDK's span limits, what applies to the live span."""

    attributes: int = 128
    events: int = 128
    links: int = 128
    length: int | None = None

    def truncate_value(self, value: Any) -> Any:
        """The value of an attribute, as long as it may be."""
        if isinstance(value, str):
            return value[: self.length]
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return [self.truncate_value(item) for item in value]
        return value


class SpanIds(NamedTuple):
    """The identity of a new request."""

    request: SpanContext
    server: SpanContext | None
    parent: SpanContext | None
    provider_spans: ProviderSpans | None

    @property
    def trace_state(self) -> trace.TraceState:
        """What its trace carries."""
        return self.request.trace_state

    @property
    def has_server(self) -> bool:
        """Whether a SERVER span of ours is above the request."""
        return self.server is not None

    @property
    def ids(self) -> tuple[bytes, bytes, bytes, bytes]:
        """Of the trace, of the request, of what is above it and of our server span."""
        request, parent, server = self.request, self.parent, self.server
        return (
            request.trace_id.to_bytes(16, "big"),
            request.span_id.to_bytes(8, "big"),
            _NO_ID if parent is None else parent.span_id.to_bytes(8, "big"),
            _NO_ID if server is None else server.span_id.to_bytes(8, "big"),
        )

    @property
    def flags(self) -> int:
        """As an arrival says them."""
        flags = SAMPLED if self.request.trace_flags.sampled else 0
        flags |= REMOTE_PARENT if self.parent is not None and self.parent.is_remote else 0
        return flags | (OWN_SERVER_SPAN if self.server is not None else 0)


Caller = bytes
"""The span of another process that a request is below, where nothing but a `traceparent` says so: version, trace id, span id
and flags of it as 26 bytes; empty: there is none."""
NO_CALLER: Caller = b""


class LazySpanIds:
    """The identity of a new request whose ids are all that decides it. Contexts of the API are made of them when somebody
    asks, which for most requests nobody does. `above`: the span that it is below, or that its SERVER span is."""

    __slots__ = ("_parent", "flags", "has_server", "ids", "trace_state")
    provider_spans = None

    def __init__(
        self,
        trace_id: bytes,
        parent_id: bytes,
        flags: int,
        own_server: bool,
        above: Caller | SpanContext | None = None,
        trace_state: trace.TraceState | None = None,
    ) -> None:
        spans = _random_ids()
        if own_server:
            self.ids, self.flags = (trace_id, spans[:8], parent_id, spans[8:]), flags | OWN_SERVER_SPAN
        else:
            self.ids, self.flags = (trace_id, spans[:8], parent_id, _NO_ID), flags
        self.has_server, self._parent, self.trace_state = own_server, above, trace_state

    @property
    def request(self) -> SpanContext:
        """The request span's."""
        return self._make_context(self.ids[1])

    @property
    def server(self) -> SpanContext | None:
        """The SERVER span's."""
        return self._make_context(self.ids[3]) if self.has_server else None

    @property
    def parent(self) -> SpanContext | None:
        """Of what is above it."""
        above = self._parent
        return caller_to_span_context(above) if isinstance(above, bytes) else above

    def _make_context(self, span_id: bytes) -> SpanContext:
        ids = int.from_bytes(self.ids[0], "big"), int.from_bytes(span_id, "big")
        flags = _SAMPLED if self.flags & SAMPLED else _NOT_SAMPLED
        return SpanContext(*ids, False, flags, self.trace_state)


def ids_from_caller(caller: Caller, sampler: ConstantSampler) -> LazySpanIds:
    """Below a SERVER span of ours, and that below the caller."""
    if not caller:
        flags = SAMPLED if sampler.root_sampled else 0
        return LazySpanIds(_random_ids(), _NO_ID, flags, True)
    flags = SAMPLED if sampler.is_sampled(True, caller[25]) else 0
    return LazySpanIds(caller[1:17], caller[17:25], flags | REMOTE_PARENT, True, caller)


def ids_from_parent(above: SpanContext, sampler: ConstantSampler, own_server: bool) -> LazySpanIds:
    """Below the span that is current, if it is one."""
    # A context is a tuple by its type, and each of its properties a call.
    trace_id, span_id, is_remote, trace_flags, trace_state, is_valid = above
    flags = SAMPLED if sampler.is_sampled(is_valid, trace_flags) else 0
    if not is_valid:
        return LazySpanIds(_random_ids(), _NO_ID, flags, own_server)
    if is_remote:
        flags |= REMOTE_PARENT
    # Whether any other is empty is a call to find out.
    state = None if trace_state is trace.DEFAULT_TRACE_STATE else trace_state
    return LazySpanIds(
        trace_id.to_bytes(16, "big"), span_id.to_bytes(8, "big"), flags, own_server, above, state
    )


def caller_to_span_context(caller: Caller) -> SpanContext | None:
    """The caller's span as a context of the API; None: there is none."""
    if not caller:
        return None
    ids = int.from_bytes(caller[1:17], "big"), int.from_bytes(caller[17:25], "big")
    return SpanContext(*ids, True, TraceFlags(caller[25]))


class SpanFactory(Protocol):
    """Makes identities: from the SDK's sampler and id generator, or from a user's provider."""

    limits: Limits

    def create_span(
        self, name: str, parent: Context, above: SpanContext, own_server: bool, wall_at: int
    ) -> SpanIds | LazySpanIds:
        """A request span named `name`, below a server span of ours if `own_server`; `above` is the span in `parent`."""
        ...

    def create_from_caller(self, caller: Caller) -> LazySpanIds | None:
        """A request span below a server span of ours below this caller; None where ids alone do not decide that."""
        ...

    def generate_ids(self) -> tuple[bytes, bytes]:
        """Trace and span id of a trace that nobody else begins."""
        ...


class SdkSpanFactory:
    """Identities by the SDK's sampler and id generator, as configured by the standard variables."""

    def __init__(self, sampler: Any, ids: Any, limits: Limits) -> None:
        self._sampler, self._id_generator, self.limits = sampler, ids, limits
        self._constant_sampler = _to_constant_sampler(sampler)
        self._has_random_ids = _is_random_generator(ids)

    def create_span(
        self, name: str, parent: Context, above: SpanContext, own_server: bool, wall_at: int
    ) -> SpanIds | LazySpanIds:
        constant = self._constant_sampler
        if constant is not None and self._has_random_ids:
            return ids_from_parent(above, constant, own_server)
        trace_id = above.trace_id if above.is_valid else self._id_generator.generate_trace_id()
        kind = SpanKind.SERVER if own_server else SpanKind.INTERNAL
        result = self._sampler.should_sample(parent, trace_id, name, kind, None, None)
        sampled, state = result.decision.is_sampled(), result.trace_state
        flags = _SAMPLED if sampled else _NOT_SAMPLED

        new = self._id_generator.generate_span_id
        request = SpanContext(trace_id, new(), False, flags, state)
        server = SpanContext(trace_id, new(), False, flags, state) if own_server else None
        return SpanIds(request, server, above if above.is_valid else None, None)

    def create_from_caller(self, caller: Caller) -> LazySpanIds | None:
        constant = self._constant_sampler
        if constant is None or not self._has_random_ids:
            return None
        return ids_from_caller(caller, constant)

    def generate_ids(self) -> tuple[bytes, bytes]:
        trace_id, span_id = self._id_generator.generate_trace_id(), self._id_generator.generate_span_id()
        return trace_id.to_bytes(16, "big"), span_id.to_bytes(8, "big")


class ConstantSampler(NamedTuple):
    """A sampler that asks for nothing but its parent's flag, or not even for that. `root`: for who has no parent."""

    root_sampled: bool
    follows_parent: bool

    def is_sampled(self, has_parent: bool, flags: int) -> bool:
        """Whether the child of a span with these flags is sampled, if it has one."""
        return bool(flags & TraceFlags.SAMPLED) if self.follows_parent and has_parent else self.root_sampled


def _to_constant_sampler(sampler: Any) -> ConstantSampler | None:
    """What this one decides, if it is one of those that the standard variables name without an argument: known without
    the dozen calls that asking it takes."""
    from opentelemetry.sdk.trace import sampling

    known = (
        (sampling.DEFAULT_ON, ConstantSampler(True, True)),
        (sampling.DEFAULT_OFF, ConstantSampler(False, True)),
        (sampling.ALWAYS_ON, ConstantSampler(True, False)),
        (sampling.ALWAYS_OFF, ConstantSampler(False, False)),
    )
    return next((constant for one, constant in known if one is sampler), None)


def _is_random_generator(ids: Any) -> bool:
    """Whether these are the ids of the SDK's own generator: what it makes by two calls and more, one makes as well."""
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    return type(ids) is RandomIdGenerator


# Not the one that applications seed: servers with the same seed would have the same traces.
_rng = random.Random()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_rng.seed)


def _random_ids() -> bytes:
    """One id of a trace, or two of spans."""
    ids = _rng.getrandbits(128).to_bytes(16, "big")
    return _random_ids() if _NO_ID in ids else ids


class ProviderSpanFactory:
    """Identities of spans that a user's provider starts; they are ended when the request has been assembled."""

    limits = Limits(1 << 30, 1 << 30, 1 << 30)

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer

    def create_span(
        self, name: str, parent: Context, above: SpanContext, own_server: bool, wall_at: int
    ) -> SpanIds:
        server = None
        if own_server:
            server = self._tracer.start_span(name, parent, SpanKind.SERVER, start_time=wall_at)
            parent = trace.set_span_in_context(server, parent)
        span = self._tracer.start_span(name, parent, SpanKind.INTERNAL, start_time=wall_at)
        own = server.get_span_context() if server is not None else None
        return SpanIds(span.get_span_context(), own, above if above.is_valid else None, (server, span))

    def create_from_caller(self, caller: Caller) -> LazySpanIds | None:
        return None

    def generate_ids(self) -> tuple[bytes, bytes]:
        """To tell it by: the provider gives it others when it is written."""
        return os.urandom(16), os.urandom(8)


def sampling_state(state: trace.TraceState) -> str:
    """Of a `tracestate` what says how it was sampled (specification of OpenTelemetry, "TraceState handling"): counts are
    scaled up by it. What vendors put beside it is theirs, and is passed on but not exported."""
    said = (state.get("ot") or "").split(";")
    kept = [part for part in said if _SAMPLING_FIELD.fullmatch(part)]
    return f"ot={';'.join(kept)}" if kept else ""
