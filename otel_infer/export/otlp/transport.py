"""Sends encoded OTLP bytes through the SDK's own exporters, and reads the receiver's response.

The exporters handle retry, TLS, headers, timeouts, proxies and the OTEL_EXPORTER_OTLP_* variables. They
ignore `partial_success` and report only that an export failed. So responses and errors are recorded before
the exporter handles them.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from otel_infer.config.redaction import replace_controls
from otel_infer.export.otlp import Encoded, gzip_parts, sdk_adapter
from otel_infer.export.otlp.sdk_adapter import IncompatibleSdk

__all__ = ["GrpcTransport", "HttpTransport", "IncompatibleSdk", "SendResult", "Transport", "make_transport"]

HTTP, GRPC = "http/protobuf", "grpc"

_MAX_MESSAGE_LENGTH = 100
_NOT_SENT = "not sent"
_PARTIAL = "partial success"
_ABSENCES = ("connection refused", "name not resolved")
_REFUSALS = frozenset(
    (
        *_ABSENCES, "TLS error", "shut down", _NOT_SENT, "INVALID_ARGUMENT",
        "UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED",
        "FAILED_PRECONDITION", "OUT_OF_RANGE", "INTERNAL",
    )
)  # fmt: skip
"""Reasons with which the receiver certainly has nothing of the batch."""
_REASON_BY_ERROR: tuple[tuple[type[BaseException], str], ...] = (
    (ConnectionRefusedError, "connection refused"),
    (ConnectionResetError, "connection reset"),
    (BrokenPipeError, "connection reset"),
    (socket.gaierror, "name not resolved"),
    (ssl.SSLError, "TLS error"),
    (TimeoutError, "timeout"),
)


class SendResult(NamedTuple):
    """The spans of a batch that the receiver accepted and rejected, and its reason.

    `reason`: of a rejection or a warning; None without either.
    The text before the first colon of `reason` is one of a few dozen ("connection refused", "HTTP 401",
    "DEADLINE_EXCEEDED", "partial success"). The rest, if any, is the receiver's own message, cut short.
    """

    accepted: int
    rejected: int
    reason: str | None


def is_unconfirmed(result: SendResult) -> bool:
    """Returns whether the receiver may have a batch that failed: it was sent, and no valid answer came."""
    reason = (result.reason or "").partition(":")[0]
    answered = reason.startswith(("HTTP ", _PARTIAL)) or reason in _REFUSALS
    return result.rejected > 0 and not answered


class Transport(Protocol):
    """The destination of batches. For one thread, except that any thread may call `shutdown`."""

    def send_spans(self, parts: Sequence[Encoded], count: int) -> SendResult:
        """Sends an uncompressed ExportTraceServiceRequest, in parts, of `count` spans. Never raises.

        Blocks while the exporter retries, at most for its timeout (10 s by default; old SDK releases up to a
        minute).
        """

    @property
    def is_absent(self) -> bool:
        """Whether nothing listens at the destination: the last connection was refused, or its name is not known."""

    def shutdown(self) -> None:
        """Stops a pending retry and closes connections. Later batches are rejected."""


def make_transport(protocol: str, compression: str = "") -> Transport:
    """Returns a transport for `http/protobuf` or `grpc`.

    The environment configures it like the SDK's exporter. `compression`: the configured `none`, `gzip` or `deflate`; any other value is gzip, at level 1 over HTTP.
    Raises ValueError for another protocol, ImportError if its exporter is not installed, and
    `IncompatibleSdk`.
    """
    if protocol == HTTP:
        return HttpTransport(compression)
    if protocol == GRPC:
        return GrpcTransport(compression)
    raise ValueError(f"OTLP protocol {protocol!r}: expected {HTTP} or {GRPC}")


class _ExportOutcome:
    """The outcome of an export's last attempt. Each attempt overwrites the previous outcome."""

    def __init__(self) -> None:
        self.accepted, self.rejected = False, 0
        self.reason: str | None = _NOT_SENT

    def record_failure(self, reason: str) -> None:
        self.accepted, self.rejected, self.reason = False, 0, reason

    def record_response(self, response: bytes) -> None:
        """Records that the receiver accepted the batch.

        `response`: an ExportTraceServiceResponse, or an unknown body.
        """
        self.accepted, self.rejected, self.reason = True, 0, None
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

        try:
            partial = ExportTraceServiceResponse.FromString(response).partial_success
        except Exception:  # some receivers respond with JSON or a web page
            return
        self.rejected = partial.rejected_spans
        if partial.rejected_spans or partial.error_message:
            message = replace_controls(partial.error_message[:_MAX_MESSAGE_LENGTH])
            self.reason = f"{_PARTIAL}: {message}" if message else _PARTIAL


class _SdkTransport:
    """Base of both protocols: an SDK exporter, and the outcome that its innermost call records."""

    _exporter: Any

    def __init__(self) -> None:
        self._outcome = _ExportOutcome()
        self._is_shut_down = False

    def send_spans(self, parts: Sequence[Encoded], count: int) -> SendResult:
        """See `Transport`."""
        if self._is_shut_down:
            return SendResult(0, count, "shut down")
        outcome = self._outcome
        outcome.record_failure(_NOT_SENT)
        try:
            self._exporter.export(sdk_adapter.EncodedBatch(self._build_body(parts), count))
        except Exception as error:
            # Old releases raise connection errors, which are recorded in the outcome already.
            if outcome.reason == _NOT_SENT:
                outcome.record_failure(_describe_error(error))
        if not outcome.accepted:
            return SendResult(0, count, outcome.reason)
        rejected = min(max(outcome.rejected, 0), count)
        return SendResult(count - rejected, rejected, outcome.reason)

    @property
    def is_absent(self) -> bool:
        """See `Transport`. gRPC does not say why it is unavailable."""
        return self._outcome.reason in _ABSENCES

    def shutdown(self) -> None:
        """See `Transport`."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self._exporter.shutdown()

    def _build_body(self, parts: Sequence[Encoded]) -> bytes:
        return b"".join(parts)


class HttpTransport(_SdkTransport):
    """OTLP over HTTP. Bodies are compressed here, because the exporter uses level 9: seven times the CPU."""

    def __init__(self, compression: str = "") -> None:
        super().__init__()
        self._uses_gzip = compression not in ("none", "deflate")
        session = sdk_adapter.make_http_session()
        self._exporter = sdk_adapter.make_http_exporter("none" if self._uses_gzip else compression, session)
        if self._uses_gzip:
            session.headers["Content-Encoding"] = "gzip"
        self._session_send = session.send
        # A wrapper of `send` and not a response hook, because a hook is not called for a failed connection.
        session.send = self._send_and_record

    def _build_body(self, parts: Sequence[Encoded]) -> bytes:
        return gzip_parts(parts) if self._uses_gzip else super()._build_body(parts)

    def _send_and_record(self, request: Any, **options: Any) -> Any:
        # Old exporters follow redirects, and would take a login page for an accepted batch.
        options["allow_redirects"] = False
        try:
            response = self._session_send(request, **options)
            content = response.content
        except Exception as error:
            # A ValueError was not sent: the exporter retries with a timeout of 0 s when its time has passed.
            if not isinstance(error, ValueError) or self._outcome.reason == _NOT_SENT:
                self._outcome.record_failure(_describe_error(error))
            raise
        # The exporter treats a redirect as a success.
        if 200 <= response.status_code < 300:
            self._outcome.record_response(content)
        else:
            self._outcome.record_failure(f"HTTP {response.status_code}")
        return response


class GrpcTransport(_SdkTransport):
    """OTLP over gRPC. gRPC compresses messages itself, at its only level."""

    def __init__(self, compression: str = "") -> None:
        super().__init__()
        chosen = compression if compression in ("none", "deflate") else "gzip"
        self._exporter = sdk_adapter.make_grpc_exporter(chosen, self._send_and_record)

    def _send_and_record(self, call: Callable[[], bytes]) -> bytes:
        try:
            response = call()
        except Exception as error:
            code = getattr(error, "code", None)
            self._outcome.record_failure(code().name if callable(code) else _describe_error(error))
            raise
        self._outcome.record_response(response)
        return response


def _describe_error(error: BaseException) -> str:
    """Returns the kind of an error, without its message: that may contain addresses and credentials."""
    for cause in _iter_causes(error):
        for kind, reason in _REASON_BY_ERROR:
            if isinstance(cause, kind):
                return reason
    return type(error).__name__


def _iter_causes(error: BaseException) -> Iterator[BaseException]:
    """Yields the error and its causes, outermost first.

    urllib3 keeps causes in `reason`, requests in `args`.
    """
    seen = [error]
    for current in seen:
        yield current
        causes = (current.__cause__, current.__context__, getattr(current, "reason", None), *current.args)
        seen += [cause for cause in causes if isinstance(cause, BaseException) and cause not in seen]
