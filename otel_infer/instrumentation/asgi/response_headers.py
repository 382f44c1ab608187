"""Adds tracing headers to responses, if configured: the span's ids and the time to the response start.

`traceresponse` follows the W3C draft (Trace Context, level 2). `Server-Timing` is shown by browsers and read
by `otel_infer.instrumentation.httpx`. A `traceresponse` that the application has set stays unchanged. A
`Server-Timing` header of the application gets one more entry.
"""

from __future__ import annotations

from typing import Any

from otel_infer import _clock
from otel_infer.tracing.request_span import RequestSpan
from otel_infer.tracing.span_ids import format_traceparent

TRACE_RESPONSE, SERVER_TIMING = b"traceresponse", b"server-timing"

enabled = False
"""Set by `configure_asgi`, read once per response."""


def add_headers(message: Any, request: RequestSpan) -> dict[str, Any]:
    """Returns a copy of the start message with the headers; applications may reuse the original."""
    headers = list(message.get("headers") or ())
    names = [name.lower() for name, _ in headers]
    if TRACE_RESPONSE not in names:
        headers.append((TRACE_RESPONSE, _format_traceresponse(request)))
    entry = _format_server_timing(_clock.now() - request.arrived_at)
    if SERVER_TIMING in names:
        last = len(names) - 1 - names[::-1].index(SERVER_TIMING)
        name, value = headers[last]
        headers[last] = (name, b", ".join(filter(None, (value.strip(), entry))))
    else:
        headers.append((SERVER_TIMING, entry))
    return {**message, "headers": headers}


def _format_traceresponse(request: RequestSpan) -> bytes:
    """Returns a `traceresponse` for the SERVER span if it is ours, else for the request span."""
    return format_traceparent(request.server or request.get_span_context()).encode()


def _format_server_timing(spent_ns: int) -> bytes:
    return f'infer;dur={spent_ns / 1e6:.3f};desc="arrival to response start"'.encode()
