"""A request that goes on in another process: what it takes along, and what it is there.

Where it arrived it has a live span (`ingress`); an engine in a process of its own gets its ids with whatever the library
carries from one to the other, and states its facts there as those of a part of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from opentelemetry.trace import format_span_id, format_trace_id

from otel_infer import _clock
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import request_span

REQUEST_HEADER = "otel-infer-request"
"""Beside the standard headers, which another instrumentation below us may have made its own."""


def inject(request: request_span.RequestSpan) -> dict[str, str]:
    """What a request takes along, to be understood by `part` and by whoever knows W3C's (and OTEL_PROPAGATORS)."""
    context = request.get_span_context()
    return {
        **request_span.to_headers(request),
        REQUEST_HEADER: format_trace_id(context.trace_id) + format_span_id(context.span_id),
    }


class RequestFragment:
    """The part of a request that is in this process, since `began_at`. `left`: how many of its sequences are."""

    __slots__ = ("began_at", "handle", "packed", "sequences", "span_id")

    def __init__(self, handle: int, span_id: bytes, began_at: int) -> None:
        self.handle, self.span_id, self.began_at, self.sequences = handle, span_id, began_at, 0
        self.packed = handle.to_bytes(4, "little")

    def record_event(self, fact: Any) -> None:
        """States a fact about the request."""
        recorder.record(self.handle, fact)


_fragments: dict[bytes, RequestFragment] = {}
"""By span id: the sequences of one request are of one part."""
if hasattr(os, "register_at_fork"):  # a child has rings of its own
    os.register_at_fork(after_in_child=_fragments.clear)


def join_request(carried: Mapping[str, str] | None) -> RequestFragment | None:
    """The part of the request that came along with these headers, with one more sequence; None if they say of none."""
    ids = _parse_ids(carried.get(REQUEST_HEADER, "")) if carried else None
    if ids is None or not recorder.active:
        return None
    found = _fragments.get(ids[16:])
    if found is None:
        now, wall_at = _clock.read_clocks()
        arrived = events.RequestArrived(
            now, wall_at, ids[:16], ids[16:], bytes(8), bytes(8), events.JOINED, "", "", "", ""
        )
        found = _fragments[ids[16:]] = RequestFragment(recorder.open_request(arrived), ids[16:], now)
    found.sequences += 1
    return found


def _parse_ids(mark: str) -> bytes | None:
    """Trace id and span id; None for what is no mark of ours."""
    try:
        ids = bytes.fromhex(mark)
    except ValueError:
        return None
    return ids if len(ids) == 24 else None


def release(of: RequestFragment) -> None:
    """One of its sequences is not here any more."""
    of.sequences -= 1
    if of.sequences <= 0 and _fragments.get(of.span_id) is of:
        del _fragments[of.span_id]
        recorder.close_request(of.handle, events.RequestEnded(_clock.now(), events.OK, "", 0, 0, 0, 0))
