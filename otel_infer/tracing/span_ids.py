"""The identity of a new request: its trace and span ids, its sampling decision and its parent."""

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
from otel_infer.ringbuffer.forks import call_in_child
from otel_infer.tracing.pending_spans import ProviderSpans

_SAMPLED, _NOT_SAMPLED = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)
_NO_ID, SAMPLED_FLAG = bytes(8), int(TraceFlags.SAMPLED)
_SAMPLING_FIELD = re.compile("th:[0-9a-f]{1,14}|rv:[0-9a-f]{14}")


class Limits(NamedTuple):
    """The SDK's span limits that apply to the live span. `length`: of attribute values; None = unlimited."""

    attributes: int = 128
    events: int = 128
    links: int = 128
    length: int | None = None

    def truncate_value(self, value: Any) -> Any:
        """Returns the value of an attribute, cut to the allowed length."""
        if isinstance(value, str):
            return value[: self.length]
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return [self.truncate_value(item) for item in value]
        return value


class SpanIds(NamedTuple):
    """The identity of a new request, as contexts of the API."""

    request: SpanContext
    server: SpanContext | None
    parent: SpanContext | None
    provider_spans: ProviderSpans | None

    @property
    def trace_state(self) -> trace.TraceState:
        """Returns the trace state of the request."""
        return self.request.trace_state

    @property
    def has_server(self) -> bool:
        """Returns whether the request's parent is a SERVER span of this package."""
        return self.server is not None

    @property
    def ids(self) -> tuple[bytes, bytes, bytes, bytes]:
        """Returns trace id, request span id, parent span id and own SERVER span id; zeros = none."""
        request, parent, server = self.request, self.parent, self.server
        return (
            request.trace_id.to_bytes(16, "big"),
            request.span_id.to_bytes(8, "big"),
            _NO_ID if parent is None else parent.span_id.to_bytes(8, "big"),
            _NO_ID if server is None else server.span_id.to_bytes(8, "big"),
        )

    @property
    def flags(self) -> int:
        """Returns the flags of `RequestArrived`."""
        flags = SAMPLED if self.request.trace_flags.sampled else 0
        flags |= REMOTE_PARENT if self.parent is not None and self.parent.is_remote else 0
        return flags | (OWN_SERVER_SPAN if self.server is not None else 0)


RemoteParent = bytes
"""The parent span in another process: 26 bytes (version, trace id, span id, flags) of a `traceparent`.

Empty = no parent.
"""
NO_REMOTE_PARENT: RemoteParent = b""


class LazySpanIds(NamedTuple):
    """The identity of a new request, as ids only.

    The API's contexts are created when they are read, which is rare. `ids`: of the trace, the request span,
    its parent and its SERVER span, as in `SpanIds`. `above`: the span above the request, or above its SERVER
    span. A tuple, because creating one takes no call.
    """

    ids: tuple[bytes, bytes, bytes, bytes]
    flags: int
    has_server: bool
    above: RemoteParent | SpanContext | None = None
    trace_state: trace.TraceState | None = None

    @property
    def provider_spans(self) -> None:
        """Returns None: no provider's span stands for the request."""

    @property
    def request(self) -> SpanContext:
        """Returns the context of the request span."""
        return self._make_context(self.ids[1])

    @property
    def server(self) -> SpanContext | None:
        """Returns the context of this package's SERVER span; None if there is none."""
        return self._make_context(self.ids[3]) if self.has_server else None

    @property
    def parent(self) -> SpanContext | None:
        """Returns the context of the parent span; None if there is none."""
        above = self.above
        return to_span_context(above) if isinstance(above, bytes) else above

    def _make_context(self, span_id: bytes) -> SpanContext:
        ids = int.from_bytes(self.ids[0], "big"), int.from_bytes(span_id, "big")
        flags = _SAMPLED if self.flags & SAMPLED else _NOT_SAMPLED
        return SpanContext(*ids, False, flags, self.trace_state)


def make_ids_below_remote(parent: RemoteParent, sampler: ConstantSampler) -> LazySpanIds:
    """Returns the ids of a request below an own SERVER span below the remote parent."""
    if not parent:
        return make_root_ids(sampler, own_server=True)
    random = _random_ids()
    flags = OWN_SERVER_SPAN | REMOTE_PARENT
    if parent[25] & SAMPLED_FLAG if sampler.follows_parent else sampler.root_sampled:
        flags |= SAMPLED
    return LazySpanIds((parent[1:17], random[16:24], parent[17:25], random[24:]), flags, True, parent)


def make_ids_below_parent(parent: SpanContext, sampler: ConstantSampler, own_server: bool) -> LazySpanIds:
    """Returns the ids of a request below this span; of a new trace if the span is invalid."""
    # A span context is a tuple; unpacking it saves a call for each property.
    trace_id, span_id, is_remote, trace_flags, trace_state, is_valid = parent
    if not is_valid:
        return make_root_ids(sampler, own_server)
    random = _random_ids()
    flags = SAMPLED if sampler.is_sampled(is_valid, trace_flags) else 0
    server_id = random[24:] if own_server else _NO_ID
    if own_server:
        flags |= OWN_SERVER_SPAN
    if is_remote:
        flags |= REMOTE_PARENT
    # Checking whether any other trace state is empty would take a call.
    state = None if trace_state is trace.DEFAULT_TRACE_STATE else trace_state
    ids = trace_id.to_bytes(16, "big"), random[16:24], span_id.to_bytes(8, "big"), server_id
    return LazySpanIds(ids, flags, own_server, parent, state)


def make_root_ids(sampler: ConstantSampler, own_server: bool) -> LazySpanIds:
    """Returns the ids of a request of a new trace."""
    random = _random_ids()
    flags = OWN_SERVER_SPAN if own_server else 0
    if sampler.root_sampled:
        flags |= SAMPLED
    ids = random[:16], random[16:24], _NO_ID, random[24:] if own_server else _NO_ID
    # Not `LazySpanIds(…)`, which is one more call.
    return tuple.__new__(LazySpanIds, (ids, flags, own_server, None, None))


def to_span_context(parent: RemoteParent) -> SpanContext | None:
    """Returns the remote parent as a context of the API; None if there is none."""
    if not parent:
        return None
    ids = int.from_bytes(parent[1:17], "big"), int.from_bytes(parent[17:25], "big")
    return SpanContext(*ids, True, TraceFlags(parent[25]))


def format_traceparent(span: SpanContext) -> str:
    """Returns the value of a `traceparent` of version 00 (W3C Trace Context)."""
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{int(span.trace_flags):02x}"


class SpanFactory(Protocol):
    """Creates identities, by the SDK's sampler and id generator or by a user's provider."""

    limits: Limits
    plain_sampler: ConstantSampler | None
    """The sampler, if it depends at most on the parent's flag, and ids are random; else None."""

    def create_span(
        self, name: str, parent: Context, parent_span: SpanContext, own_server: bool, wall_at: int
    ) -> SpanIds | LazySpanIds:
        """Returns the ids of a request span named `name`. `parent_span`: the span in `parent`.

        `own_server`: an own SERVER span is put above the request.
        """
        ...

    def create_below_remote(self, parent: RemoteParent) -> LazySpanIds | None:
        """Returns the ids of a request below an own SERVER span below this remote parent.

        None where the sampler or the id generator needs more than the ids.
        """
        ...

    def generate_ids(self) -> tuple[bytes, bytes]:
        """Returns trace id and span id of a new trace."""
        ...


class SdkSpanFactory:
    """Creates identities by the SDK's sampler and id generator, as the standard variables configure them."""

    def __init__(self, sampler: Any, ids: Any, limits: Limits) -> None:
        self._sampler, self._id_generator, self.limits = sampler, ids, limits
        self.plain_sampler = _to_constant_sampler(sampler) if _is_random_generator(ids) else None

    def create_span(
        self, name: str, parent: Context, parent_span: SpanContext, own_server: bool, wall_at: int
    ) -> SpanIds | LazySpanIds:
        constant = self.plain_sampler
        if constant is not None:
            return make_ids_below_parent(parent_span, constant, own_server)
        trace_id = parent_span.trace_id if parent_span.is_valid else self._id_generator.generate_trace_id()
        kind = SpanKind.SERVER if own_server else SpanKind.INTERNAL
        result = self._sampler.should_sample(parent, trace_id, name, kind, None, None)
        sampled, state = result.decision.is_sampled(), result.trace_state
        flags = _SAMPLED if sampled else _NOT_SAMPLED

        new = self._id_generator.generate_span_id
        request = SpanContext(trace_id, new(), False, flags, state)
        server = SpanContext(trace_id, new(), False, flags, state) if own_server else None
        return SpanIds(request, server, parent_span if parent_span.is_valid else None, None)

    def create_below_remote(self, parent: RemoteParent) -> LazySpanIds | None:
        constant = self.plain_sampler
        return None if constant is None else make_ids_below_remote(parent, constant)

    def generate_ids(self) -> tuple[bytes, bytes]:
        trace_id, span_id = self._id_generator.generate_trace_id(), self._id_generator.generate_span_id()
        return trace_id.to_bytes(16, "big"), span_id.to_bytes(8, "big")


class ConstantSampler(NamedTuple):
    """A sampler that depends at most on the parent's flag. `root_sampled`: its decision without a parent."""

    root_sampled: bool
    follows_parent: bool

    def is_sampled(self, has_parent: bool, flags: int) -> bool:
        """Returns whether a span is sampled. `flags`: those of its parent, if it has one."""
        return bool(flags & TraceFlags.SAMPLED) if self.follows_parent and has_parent else self.root_sampled


def _to_constant_sampler(sampler: Any) -> ConstantSampler | None:
    """Returns the decisions of a sampler that the standard variables name without an argument; else None.

    This saves the dozen calls that the sampler itself takes.
    """
    from opentelemetry.sdk.trace import sampling

    known = (
        (sampling.DEFAULT_ON, ConstantSampler(True, True)),
        (sampling.DEFAULT_OFF, ConstantSampler(False, True)),
        (sampling.ALWAYS_ON, ConstantSampler(True, False)),
        (sampling.ALWAYS_OFF, ConstantSampler(False, False)),
    )
    return next((constant for standard, constant in known if standard is sampler), None)


def _is_random_generator(ids: Any) -> bool:
    """Returns whether it is the SDK's own generator, whose calls one call of `_random_ids` can replace."""
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    return type(ids) is RandomIdGenerator


# Not the global generator, which applications seed: servers with the same seed would create the same ids.
_rng = random.Random()
call_in_child(_rng.seed)


def _random_ids() -> bytes:
    """Returns 32 random bytes: a trace id and two span ids."""
    ids = _rng.getrandbits(256).to_bytes(32, "big")
    return _random_ids() if _NO_ID in ids else ids


class ProviderSpanFactory:
    """Creates identities by starting spans of a user's provider; they end once the request is assembled."""

    limits = Limits(1 << 30, 1 << 30, 1 << 30)
    plain_sampler: ConstantSampler | None = None

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer

    def create_span(
        self, name: str, parent: Context, parent_span: SpanContext, own_server: bool, wall_at: int
    ) -> SpanIds:
        server = None
        if own_server:
            server = self._tracer.start_span(name, parent, SpanKind.SERVER, start_time=wall_at)
            parent = trace.set_span_in_context(server, parent)
        span = self._tracer.start_span(name, parent, SpanKind.INTERNAL, start_time=wall_at)
        own = server.get_span_context() if server is not None else None
        return SpanIds(
            span.get_span_context(), own, parent_span if parent_span.is_valid else None, (server, span)
        )

    def create_below_remote(self, parent: RemoteParent) -> LazySpanIds | None:
        return None

    def generate_ids(self) -> tuple[bytes, bytes]:
        """Returns ids for the rings only; the provider assigns others when the spans are exported."""
        return os.urandom(16), os.urandom(8)


def select_sampling_fields(state: trace.TraceState) -> str:
    """Returns the sampling fields of a `tracestate` (OpenTelemetry specification, "TraceState handling").

    Backends scale counts by them. Vendors' fields are propagated, but not exported. Empty = no sampling
    fields.
    """
    parts = (state.get("ot") or "").split(";")
    fields = [part for part in parts if _SAMPLING_FIELD.fullmatch(part)]
    return f"ot={';'.join(fields)}" if fields else ""
