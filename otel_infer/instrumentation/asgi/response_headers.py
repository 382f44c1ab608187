"""What a client is told in the headers of the response, where that is asked for: whose span it was, and how long it took.

`traceresponse` as the W3C drafts it (level 2 of Trace Context), `Server-Timing` as browsers show it and as
`otel_infer.instrumentation.httpx` reads it. A header that the application has set stays as it is: the first is then left out, the
second gets one entry more.
"""

from __future__ import annotations

from typing import Any

from otel_infer import _clock
from otel_infer.tracing.request_span import RequestSpan

TRACE_RESPONSE, SERVER_TIMING = b"traceresponse", b"server-timing"

enabled = False
"""Set by `configure`; asked once per response."""


def add_headers(message: Any, request: RequestSpan) -> dict[str, Any]:
    """A copy of the response's start message that says more; an application may send one and the same again."""
    headers = list(message.get("headers") or ())
    names = [name.lower() for name, _ in headers]
    if TRACE_RESPONSE not in names:
        headers.append((TRACE_RESPONSE, _format_traceresponse(request)))
    entry = _format_server_timing(_clock.now() - request.arrived_at)
    if SERVER_TIMING in names:
        last = len(names) - 1 - names[::-1].index(SERVER_TIMING)
        name, said = headers[last]
        headers[last] = (name, b", ".join(filter(None, (said.strip(), entry))))
    else:
        headers.append((SERVER_TIMING, entry))
    return {**message, "headers": headers}


def _format_traceresponse(request: RequestSpan) -> bytes:
    """The server span if that is ours, else the request's."""
    context = request.server or request.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}".encode()


def _format_server_timing(spent_ns: int) -> bytes:
    return f'infer;dur={spent_ns / 1e6:.3f};desc="arrival to response start"'.encode()
