"""Records client-side latency: time to headers, to the first byte and token, and gaps between tokens.

Nothing here raises. An error ends the span and is logged once per exception type; the request continues
untraced.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from opentelemetry import propagate, trace
from opentelemetry.context import Context

from otel_infer import _clock, semconv
from otel_infer.instrumentation.httpx.sse import SseParser
from otel_infer.tracing.propagator_warnings import call_propagators

if TYPE_CHECKING:
    from httpx import Request, Response

KNOWN_METHODS = frozenset("CONNECT DELETE GET HEAD OPTIONS PATCH POST PUT QUERY TRACE".split())
DEFAULT_PORTS = {"http": 80, "https": 443}
CANCELLED_ERRORS = ("CancelledError", "Cancelled")
"""Names of the exceptions by which asyncio and trio cancel a task."""
SERVER_TIMING_ENTRY = "infer"

log = logging.getLogger(__name__)
P = ParamSpec("P")
_now = _clock.now


def start_client_span(tracer: trace.Tracer, request: Request) -> ClientRequestSpan | None:
    """Starts the span of a request and injects its context into the headers; None if it is not recorded."""
    span: trace.Span = trace.INVALID_SPAN
    try:
        method = request.method if request.method in KNOWN_METHODS else semconv.OTHER
        name = semconv.SPAN_HTTP if method == semconv.OTHER else method
        span = tracer.start_span(
            name, kind=trace.SpanKind.CLIENT, attributes=_describe_target(method, request.url)
        )
        context = trace.set_span_in_context(span)
        call_propagators(propagate.inject, request.headers, context)
        return ClientRequestSpan(span, context) if span.is_recording() else None
    except Exception as exc:
        _abort_span(span, exc)
        return None


def _describe_target(method: str, url: Any) -> dict[str, Any]:
    """Returns the attributes of the request's target, without query, fragment and credentials."""
    path = url.raw_path.partition(b"?")[0].decode("ascii")
    attributes = {
        semconv.HTTP_REQUEST_METHOD: method,
        semconv.SERVER_ADDRESS: url.host,
        semconv.SERVER_PORT: url.port or DEFAULT_PORTS.get(url.scheme),
        semconv.URL_FULL: f"{url.scheme}://{url.netloc.decode('ascii')}{path}",
    }
    return {key: value for key, value in attributes.items() if value}


def _suppress_errors(
    method: Callable[Concatenate[ClientRequestSpan, P], None],
) -> Callable[Concatenate[ClientRequestSpan, P], None]:
    """Returns a method that does nothing after the span ended, and ends the span instead of raising."""

    def call_safely(self: ClientRequestSpan, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.ended:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as exc:
            self.abort_span(exc)

    return call_safely


class ClientRequestSpan:
    """The span of a request in flight. All `*_at` are monotonic ns; 0 = not yet."""

    def __init__(self, span: trace.Span, context: Context) -> None:
        self.span, self.context = span, context
        self.ended = False
        self._sse_parser: SseParser | None = None
        self._chunk_count = self._gap_count = self._longest_gap_ns = 0
        self._first_byte_at = self._first_token_at = self._last_token_at = 0
        self._error_type = ""
        self._began_at = _now()

    @_suppress_errors
    def record_response(self, response: Response) -> None:
        """Records the headers of the response."""
        waited_ns, headers, status = _now() - self._began_at, response.headers, response.status_code
        attributes = {
            semconv.HTTP_RESPONSE_STATUS_CODE: status,
            semconv.CLIENT_TIME_TO_HEADERS: waited_ns / 1e9,
        }
        server_ms = parse_server_duration_ms(headers.get_list("server-timing"))
        # A duration longer than our wait belongs to another response, from which a cache stored the header.
        if server_ms is not None and server_ms * 1e6 <= waited_ns:
            attributes[semconv.CLIENT_SERVER_DURATION] = server_ms / 1e3
            attributes[semconv.CLIENT_NETWORK_DURATION] = (waited_ns - server_ms * 1e6) / 1e9
        self.span.set_attributes(attributes)
        if status >= 400:
            self._error_type = str(status)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        encoded = headers.get("content-encoding", "identity").strip().lower() not in ("", "identity")
        if kind == "text/event-stream" and not encoded:
            self._sse_parser = SseParser()

    @_suppress_errors
    def record_chunk(self, chunk: bytes) -> None:
        """Records a chunk of the body that is about to be returned to the application."""
        received_at = _now()
        if not chunk:
            return
        self._chunk_count += 1
        self._first_byte_at = self._first_byte_at or received_at
        if self._sse_parser is None or not self._sse_parser.scan_for_token(chunk):
            return
        if self._first_token_at:
            self._gap_count += 1
            self._longest_gap_ns = max(self._longest_gap_ns, received_at - self._last_token_at)
        else:
            self._first_token_at = received_at
        self._last_token_at = received_at

    def close(self) -> None:
        """Ends the span because the application closed the body.

        After the end marker of an event stream this is no early close, because nothing is left to read.
        """
        self.end(None, closed=self._sse_parser is None or not self._sse_parser.ended)

    @_suppress_errors
    def end(self, exc: BaseException | None = None, closed: bool = False) -> None:
        """Ends the span; only the first call counts.

        `exc`: the exception that ended the request, or None. `closed`: the application closed the body before
        its end.
        """
        self.ended = True
        if isinstance(exc, GeneratorExit):
            exc, closed = None, True
        if exc is not None:
            name = type(exc).__qualname__
            self._error_type = semconv.ERROR_CANCELLED if name in CANCELLED_ERRORS else name
        self.span.set_attributes(dict(self._collect_attributes()))
        if closed:
            self.span.set_attribute(semconv.CLIENT_CLOSED_EARLY, True)
        if self._error_type:
            self.span.set_attribute(semconv.ERROR_TYPE, self._error_type)
            self.span.set_status(trace.StatusCode.ERROR)
        self.span.end()

    def _collect_attributes(self) -> Iterable[tuple[str, Any]]:
        if self._first_byte_at:
            yield semconv.CLIENT_TIME_TO_FIRST_BYTE, (self._first_byte_at - self._began_at) / 1e9
            yield semconv.CLIENT_CHUNKS, self._chunk_count
        if self._first_token_at:
            yield semconv.CLIENT_TIME_TO_FIRST_TOKEN, (self._first_token_at - self._began_at) / 1e9
        if self._gap_count:
            yield semconv.CLIENT_ITL_MAX, self._longest_gap_ns / 1e9
            yield (
                semconv.CLIENT_ITL_MEAN,
                (self._last_token_at - self._first_token_at) / self._gap_count / 1e9,
            )

    def abort_span(self, exc: Exception) -> None:
        """Ends the span after an exception of our code or of the tracer provider."""
        self.ended = True
        _abort_span(self.span, exc)


def parse_server_duration_ms(headers: Iterable[str]) -> float | None:
    """Returns the server's time to its response headers from `Server-Timing`, in ms; None if absent.

    A gateway and the server behind it may both add an entry. The longest is the gateway's and includes the
    others.
    """
    durations = []
    for entry in re.sub(r'"(?:[^"\\]|\\.)*"', '""', ",".join(headers)).split(","):
        name, *parameters = (part.strip() for part in entry.split(";"))
        for key, _, value in (parameter.partition("=") for parameter in parameters):
            if name == SERVER_TIMING_ENTRY and key.strip().lower() == "dur":
                durations.append(_parse_number(value.strip()))
    return max((number for number in durations if number is not None), default=None)


def _parse_number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


_logged_types: set[str] = set()


def _abort_span(span: trace.Span, exc: Exception) -> None:
    kind = type(exc).__qualname__
    if kind not in _logged_types:
        _logged_types.add(kind)
        log.warning(
            "client span ended early: %s in otel_infer or the tracer provider; the request continues",
            kind,
        )
    try:
        span.end()
    except Exception:
        pass
