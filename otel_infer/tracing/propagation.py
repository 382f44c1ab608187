"""Propagates a request to another process: its headers and its state there.

In the process where a request arrives it has a live span (`tracing.start`). An engine in another process gets
the request's ids in what the library carries between the two. It records its events there, as those of a
fragment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from opentelemetry import baggage, propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan

from otel_infer import _clock
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import context, request_span
from otel_infer.tracing.header_reader import TRACEPARENT, reads_w3c_only
from otel_infer.tracing.propagator_warnings import call_propagators
from otel_infer.tracing.span_ids import LazySpanIds, format_traceparent, to_span_context

REQUEST_HEADER = "otel-infer-request"
"""Sent beside the standard headers, because another instrumentation below may replace those by its own."""

IDS_BYTES = 24
"""Length of trace id and span id in `REQUEST_HEADER`. A request with a name has a byte of flags after them."""
NAMED, NAMED_BY_FORWARD = 1, 2
"""Flags: the user or an engine named the request; the first model that served it did."""

JOINED = "process"
"""Owner of the live span of a request that another process has opened."""


def inject(request: request_span.RequestSpan, has_readers: bool = True) -> dict[str, str]:
    """Returns a request's headers: those of OTEL_PROPAGATORS, and `REQUEST_HEADER` for `join_request`.

    `has_readers`: others than `join_request` read the headers; without them `REQUEST_HEADER` is enough.
    """
    trace_id, span_id, _, _ = request.ids
    headers = _to_headers(request) if has_readers else {}
    flags = NAMED * request.is_named | NAMED_BY_FORWARD * request.has_forward_name
    headers[REQUEST_HEADER] = (trace_id + span_id + bytes([flags] if flags else [])).hex()
    return headers


class RequestFragment:
    """The part of a request in this process, since `began_at`. `sequences`: how many are in this process."""

    __slots__ = ("began_at", "handle", "packed", "sequences", "span_id")

    def __init__(self, handle: int, span_id: bytes, began_at: int) -> None:
        self.handle, self.span_id, self.began_at, self.sequences = handle, span_id, began_at, 0
        self.packed = handle.to_bytes(4, "little")

    def record_event(self, event: Any) -> None:
        """Records an event of the request."""
        recorder.record(self.handle, event)


_fragments: dict[bytes, RequestFragment] = {}
"""Fragments by span id: the sequences of one request share a fragment."""
os.register_at_fork(after_in_child=_fragments.clear)  # a forked child has separate rings


def join_request(headers: Mapping[str, str] | None) -> RequestFragment | None:
    """Returns the fragment of the request that these headers carry, with one more sequence.

    None if they carry no request or nothing records.
    """
    ids, _ = _parse_header(headers.get(REQUEST_HEADER, "") if headers else "")
    if not ids or not recorder.active:
        return None
    fragment = _fragments.get(ids[16:])
    if fragment is None:
        arrived = _make_arrival(ids)
        handle = recorder.open_request(arrived)
        fragment = _fragments[ids[16:]] = RequestFragment(handle, ids[16:], arrived.at)
    fragment.sequences += 1
    return fragment


def join_as_span(headers: Mapping[str, str]) -> request_span.RequestSpan | None:
    """Returns the request that these headers carry as the live span of this process, whose caller closes it here.

    None if they carry no request or nothing records. Its end is recorded by the process that opened it.
    """
    ids, flags = _parse_header(headers.get(REQUEST_HEADER, ""))
    if not ids or not recorder.active:
        return None
    arrived = _make_arrival(ids)
    around = _read_context(headers, ids)
    is_sampled = context.span_context(around).trace_flags.sampled
    own_ids = ids[:16], ids[16:], bytes(8), bytes(8)
    span_ids = LazySpanIds(own_ids, events.SAMPLED if is_sampled else 0, has_server=False)
    joined = request_span.RequestSpan(span_ids, recorder.open_request(arrived), arrived.at, JOINED, around)
    joined.is_named, joined.has_forward_name = bool(flags & NAMED), bool(flags & NAMED_BY_FORWARD)
    return joined


def _make_arrival(ids: bytes) -> events.RequestArrived:
    """Returns the arrival of a part of a request in this process. `ids`: trace id and span id of the request."""
    now, wall_at = _clock.read_clocks()
    names = "", "", "", ""
    return events.RequestArrived(now, wall_at, ids[:16], ids[16:], bytes(8), bytes(8), events.JOINED, *names)


def _parse_header(text: str) -> tuple[bytes, int]:
    """Returns trace id and span id of a `REQUEST_HEADER` as 24 bytes, and its flags; no bytes if the value is invalid."""
    try:
        parsed = bytes.fromhex(text)
    except ValueError:
        return b"", 0
    if not IDS_BYTES <= len(parsed) <= IDS_BYTES + 1:
        return b"", 0
    return parsed[:IDS_BYTES], parsed[-1] if len(parsed) > IDS_BYTES else 0


def release(fragment: RequestFragment) -> None:
    """Removes one sequence from the fragment; the last one closes it."""
    fragment.sequences -= 1
    if fragment.sequences <= 0 and _fragments.get(fragment.span_id) is fragment:
        del _fragments[fragment.span_id]
        recorder.close_request(fragment.handle, events.RequestEnded(_clock.now(), events.OK, "", 0, 0, 0, 0))


def _to_headers(request: request_span.RequestSpan) -> dict[str, str]:
    """Returns the headers by OTEL_PROPAGATORS that make spans of another process children of the request."""
    carrier: dict[str, str] = {}
    span = request.get_span_context()
    if span.is_valid and not span.trace_state and reads_w3c_only() and not baggage.get_all():
        carrier[TRACEPARENT] = format_traceparent(span)
        return carrier
    call_propagators(propagate.inject, carrier, trace.set_span_in_context(NonRecordingSpan(span)))
    return carrier


def _read_context(headers: Mapping[str, str], ids: bytes) -> Context:
    """Returns the context that the propagators read. Headers that `_to_headers` wrote without them are read without them."""
    text = headers.get(TRACEPARENT, "")
    span = to_span_context(bytes(1) + ids + bytes([text.endswith("1")]))
    if span is None or text != format_traceparent(span) or len(headers) > 2 or not reads_w3c_only():
        return context.extract(headers, Context())
    return Context({context.SPAN_KEY: NonRecordingSpan(span)})
