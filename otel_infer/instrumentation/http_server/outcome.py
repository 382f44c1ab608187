"""Determines the outcome of a request whose client stayed connected, from the exception and the response."""

from __future__ import annotations

from otel_infer.ringbuffer import events
from otel_infer.tracing.outcome import classify_exception

GATEWAY_TIMEOUT = 504


def determine_outcome(exc: BaseException | None, status: int, is_complete: bool) -> tuple[int, str]:
    """Returns outcome and error type.

    `status`: 0 = nothing was sent. `is_complete`: the last byte was handed over.
    """
    if exc is None and is_complete and status < 500:
        return events.OK, ""
    if exc is not None:
        return classify_exception(exc)
    if is_complete and status == GATEWAY_TIMEOUT:
        return events.ABORTED, events.TIMEOUT
    is_truncated = bool(status) and not is_complete
    return events.ERROR, events.OTHER if is_truncated else str(status or 500)


def unwrap_group(exc: BaseException | None) -> BaseException | None:
    """Returns the only exception of an exception group, as task groups raise it; else `exc` itself."""
    inner = getattr(exc, "exceptions", None)
    return unwrap_group(inner[0]) if isinstance(inner, tuple) and len(inner) == 1 else exc
