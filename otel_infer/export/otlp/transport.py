"""Sends ready OTLP bytes through the SDK's own exporters, and reads what the receiver answers.

Retry, TLS, headers, timeouts, proxies and the OTEL_EXPORTER_OTLP_* variables stay the exporters'. They ignore
`partial_success` and say no more than that an export failed; so answers and errors are noted on their way back.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from otel_infer.export.otlp import Encoded, gzip_parts, sdk_adapter
from otel_infer.export.otlp.sdk_adapter import IncompatibleSdk

__all__ = ["GrpcTransport", "HttpTransport", "IncompatibleSdk", "SendResult", "Transport", "make_transport"]

HTTP, GRPC = "http/protobuf", "grpc"

_MAX_MESSAGE_LENGTH = 100
_NOT_SENT = "not sent"
_REASON_BY_ERROR: tuple[tuple[type[BaseException], str], ...] = (
    (ConnectionRefusedError, "connection refused"),
    (ConnectionResetError, "connection reset"),
    (BrokenPipeError, "connection reset"),
    (socket.gaierror, "name not resolved"),
    (ssl.SSLError, "TLS error"),
    (TimeoutError, "timeout"),
)


class SendResult(NamedTuple):
    """How many spans of a batch the receiver took, how many not, and why not or what it warned of.

    What stands before the first colon of `reason` is one of a few dozen texts ("connection refused", "HTTP 401",
    "DEADLINE_EXCEEDED", "partial success"); what follows, if anything, is the receiver's own message, cut short.
    """

    accepted: int
    rejected: int
    reason: str | None


class Transport(Protocol):
    """Where batches go. For one thread; `shutdown` may be called from another."""

    def send_spans(self, parts: Sequence[Encoded], count: int) -> SendResult:
        """Sends an uncompressed ExportTraceServiceRequest, in parts, of `count` spans. Blocks while the exporter retries, at most
        its timeout (10 s unless configured; old releases of the SDK up to a minute). Never raises."""

    def shutdown(self) -> None:
        """Ends a retry that is waiting, and closes connections. What is sent later is rejected."""


def make_transport(protocol: str, compression: str = "") -> Transport:
    """A transport for `http/protobuf` or `grpc`, configured by the environment as the SDK's exporter would be.

    `compression`: what the user asked for, `none`, `gzip` or `deflate`; anything else is gzip, at level 1 over HTTP.
    Raises ValueError for another protocol, ImportError where its exporter is not installed, and `SeamDrift`.
    """
    if protocol == HTTP:
        return HttpTransport(compression)
    if protocol == GRPC:
        return GrpcTransport(compression)
    raise ValueError(f"OTLP protocol {protocol!r}: expected {HTTP} or {GRPC}")


class _ExportOutcome:
    """What the last attempt of an export came to: each attempt overwrites the one before."""

    def __init__(self) -> None:
        self.accepted, self.rejected = False, 0
        self.reason: str | None = _NOT_SENT

    def record_failure(self, reason: str) -> None:
        self.accepted, self.rejected, self.reason = False, 0, reason

    def record_response(self, response: bytes) -> None:
        """The receiver took the batch; `response` is an ExportTraceServiceResponse, or else nothing we know."""
        self.accepted, self.rejected, self.reason = True, 0, None
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

        try:
            partial = ExportTraceServiceResponse.FromString(response).partial_success
        except Exception:  # some receivers answer in JSON, or with a page
            return
        self.rejected = partial.rejected_spans
        if partial.rejected_spans or partial.error_message:
            message = partial.error_message[:_MAX_MESSAGE_LENGTH]
            self.reason = f"partial success: {message}" if message else "partial success"


class _SdkTransport:
    """What both protocols share: an exporter of the SDK, and an outcome that its innermost call notes."""

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
            # Old releases let connection errors out, which the outcome has by then.
            if outcome.reason == _NOT_SENT:
                outcome.record_failure(_describe_error(error))
        if not outcome.accepted:
            return SendResult(0, count, outcome.reason)
        rejected = min(max(outcome.rejected, 0), count)
        return SendResult(count - rejected, rejected, outcome.reason)

    def shutdown(self) -> None:
        """See `Transport`."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self._exporter.shutdown()

    def _build_body(self, parts: Sequence[Encoded]) -> bytes:
        return b"".join(parts)


class HttpTransport(_SdkTransport):
    """OTLP over HTTP. We compress bodies ourselves: the exporter would at level 9, for seven times the CPU."""

    def __init__(self, compression: str = "") -> None:
        super().__init__()
        self._uses_gzip = compression not in ("none", "deflate")
        session = sdk_adapter.make_http_session()
        self._exporter = sdk_adapter.make_http_exporter("none" if self._uses_gzip else compression, session)
        if self._uses_gzip:
            session.headers["Content-Encoding"] = "gzip"
        self._session_send = session.send
        # Around `send` and no response hook, for hooks do not see a connection fail.
        session.send = self._send_and_record

    def _build_body(self, parts: Sequence[Encoded]) -> bytes:
        return gzip_parts(parts) if self._uses_gzip else super()._build_body(parts)

    def _send_and_record(self, request: Any, **options: Any) -> Any:
        # Old exporters follow redirects, and a page to log in at would be an acceptance.
        options["allow_redirects"] = False
        try:
            response = self._session_send(request, **options)
            content = response.content
        except Exception as error:
            self._outcome.record_failure(_describe_error(error))
            raise
        # The exporter takes a redirect for a success.
        if 200 <= response.status_code < 300:
            self._outcome.record_response(content)
        else:
            self._outcome.record_failure(f"HTTP {response.status_code}")
        return response


class GrpcTransport(_SdkTransport):
    """OTLP over gRPC. Messages are compressed inside gRPC, which has one level only."""

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
    """What went wrong, without the message: it may hold addresses and credentials."""
    for cause in _iter_causes(error):
        for kind, reason in _REASON_BY_ERROR:
            if isinstance(cause, kind):
                return reason
    return type(error).__name__


def _iter_causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what is behind it, outermost first; urllib3 hides causes in `reason`, requests in `args`."""
    seen = [error]
    for each in seen:
        yield each
        behind = (each.__cause__, each.__context__, getattr(each, "reason", None), *each.args)
        seen += [one for one in behind if isinstance(one, BaseException) and one not in seen]
