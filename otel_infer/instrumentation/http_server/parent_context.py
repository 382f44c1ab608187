"""Determines the parent of a request: a span that is current in this process, or the span in its headers."""

from __future__ import annotations

from binascii import unhexlify
from collections.abc import Iterable
from typing import Any

from opentelemetry import baggage, trace
from opentelemetry.context import Context

from otel_infer.ringbuffer.events import OWN_SERVER_SPAN
from otel_infer.ringbuffer.recorder import CHECK_NS, recorder
from otel_infer.tracing import context, request_span, start
from otel_infer.tracing.header_reader import get_header_reader, reads_w3c_only
from otel_infer.tracing.span_ids import NO_REMOTE_PARENT, LazySpanIds, RemoteParent

Tokens = tuple[Any, ...]
"""Context tokens, for `detach_all`."""

TRACEPARENT_BYTES, REMOTE_PARENT_BYTES = 55, 26
_DASH, _NO_TRACE, _NO_SPAN = ord("-"), bytes(16), bytes(8)

_had_no_provider = False


def has_provider() -> bool:
    """Returns whether a tracer provider is set, so that instrumentations of this process start real spans."""
    global _had_no_provider
    # While no provider is set, each call of the API reads the environment.
    if _had_no_provider and getattr(trace, "_TRACER_PROVIDER", True) is None:
        return False
    provider = trace.get_tracer_provider()
    _had_no_provider = isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider))
    return not _had_no_provider


def has_active_span() -> bool:
    """Returns whether a span of this process is current and has not ended.

    asyncio leaks the context of a request into the next request on the connection, if the first one resumed
    reading. With uvicorn this happens after a body of more than 64 KiB.
    """
    span = trace.get_current_span()
    context = span.get_span_context()
    if not context.is_valid or context.is_remote:
        return False
    return span.is_recording() or isinstance(span, trace.NonRecordingSpan)


def is_remote_parent_in_other_trace(scope: Any) -> bool:
    """Returns whether the headers name a span of another trace than the current span.

    In that case the current span was started without reading the headers.
    """
    remote = trace.get_current_span(extract_context(scope.get("headers") or (), Context())).get_span_context()
    return remote.is_valid and remote.trace_id != trace.get_current_span().get_span_context().trace_id


def is_current_span(request: request_span.RequestSpan | None) -> bool:
    """Returns whether no span was started since this request was opened."""
    if request is None or context.current_span() is request:
        return True
    current = trace.get_current_span()
    return current.get_span_context().span_id == request.get_span_context().span_id


def clear_span_and_baggage(context: Context) -> Context:
    """Returns the context without span and baggage, which may be left over from another request."""
    return baggage.clear(trace.set_span_in_context(trace.INVALID_SPAN, context)) if context else context


def parse_remote_parent(headers: Iterable[tuple[bytes, bytes]]) -> RemoteParent | None:
    """Returns the remote parent of a request with a `traceparent` of version 00 or no propagation header at all.

    Nearly all requests are of this kind. `NO_REMOTE_PARENT`: there is no `traceparent`. None: the propagators must
    read the headers.
    """
    if not reads_w3c_only():
        return None
    pairs = headers if isinstance(headers, list) else list(headers)
    value_by_name = dict(pairs)
    if len(value_by_name) != len(pairs) or b"baggage" in value_by_name or b"tracestate" in value_by_name:
        return None
    if (value := value_by_name.get(b"traceparent")) is None:
        return NO_REMOTE_PARENT
    if len(value) != TRACEPARENT_BYTES or value[:3] != b"00-" or not (value[35] == value[52] == _DASH):
        return None
    try:
        # Not a regular expression, because it would be most of the cost of a request in this module.
        parent = unhexlify(value.replace(b"-", b""))
    except ValueError:
        return None
    if len(parent) != REMOTE_PARENT_BYTES:  # the value had more dashes
        return None
    if parent.startswith(_NO_TRACE, 1) or parent.startswith(_NO_SPAN, 17) or not value.islower():
        return None
    return parent


def open_from_headers(
    headers: Any, name: str, owner: str, arrived_at: int
) -> request_span.RequestSpan | None:
    """Opens a request below an own SERVER span by one compiled call; None where that is impossible.

    To be called only where the propagators are W3C's (`reads_w3c_only`). It is possible for most requests: a lone `traceparent`
    or none, and a sampler that depends on nothing else.
    """
    factory, writer = request_span.span_factory, recorder.requests
    if factory is None or writer is None or writer.open_below_remote is None or factory.plain_sampler is None:
        return None
    if not recorder.active or arrived_at - recorder.maintained_at > CHECK_NS:  # that is due before
        return None
    opened = writer.open_below_remote(headers, name, arrived_at, OWN_SERVER_SPAN, *factory.plain_sampler)
    if opened is None:
        return None
    handle, ids, flags, parent = opened
    around = context.current_context()
    if around:
        around = clear_span_and_baggage(around)
    identity = tuple.__new__(LazySpanIds, (ids, flags, True, parent, None))
    return request_span.RequestSpan(identity, handle, arrived_at, owner, around)


def open_by_propagators(
    headers: Any, name: str, owner: str, local: Context | None, at: int
) -> request_span.RequestSpan | None:
    """Opens a request below the span of this process in `local`, or else below the span that the propagators read."""
    if local:
        return start.open_request(name, owner=owner, around=local, server=True, arrived_at=at)
    around, remote_parent = clear_span_and_baggage(context.current_context()), parse_remote_parent(headers)
    if remote_parent is not None:
        return start.open_request_below_remote(remote_parent, name, owner, around, at)
    around = extract_context(headers, around)
    return start.open_request(name, owner=owner, around=around, server=True, arrived_at=at)


def extract_context(headers: Iterable[tuple[bytes, bytes]], around: Context) -> Context:
    """Returns `around` with the span and baggage that the propagators read from the headers.

    Returns `around` unchanged if a propagator raises.
    """
    names = get_header_reader().header_names
    carrier: dict[str, str] = {}
    for name, value in headers:
        if names is None or name in names:
            key, text = name.decode("latin-1"), value.decode("latin-1")
            carrier[key] = f"{carrier[key]},{text}" if key in carrier else text
    return context.extract(carrier, around) if carrier else around


def detach_all(tokens: Tokens) -> None:
    """Detaches the tokens from the current context."""
    for token in tokens:
        context.detach(token)
