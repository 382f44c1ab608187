"""Sends ready OTLP bytes through the SDK's own exporters, and reads what the receiver answers.

Retry, TLS, headers, timeouts, proxies and the OTEL_EXPORTER_OTLP_* variables stay the exporters'. They ignore
`partial_success` and say no more than that an export failed; so answers and errors are noted on their way back.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from otel_infer.export.otlp import Encoded, gzip1, sdk_adapter
from otel_infer.export.otlp.sdk_adapter import SeamDrift

__all__ = ["GrpcTransport", "HttpTransport", "SeamDrift", "Sent", "Transport", "transport"]

HTTP, GRPC = "http/protobuf", "grpc"

_MESSAGE_LENGTH = 100
_NOT_SENT = "not sent"
_FAILURES: tuple[tuple[type[BaseException], str], ...] = (
    (ConnectionRefusedError, "connection refused"),
    (ConnectionResetError, "connection reset"),
    (BrokenPipeError, "connection reset"),
    (socket.gaierror, "name not resolved"),
    (ssl.SSLError, "TLS error"),
    (TimeoutError, "timeout"),
)


class Sent(NamedTuple):
    """How many spans of a batch the receiver took, how many not, and why not or what it warned of.

    What stands before the first colon of `reason` is one of a few dozen texts ("connection refused", "HTTP 401",
    "DEADLINE_EXCEEDED", "partial success"); what follows, if anything, is the receiver's own message, cut short.
    """

    accepted: int
    rejected: int
    reason: str | None


class Transport(Protocol):
    """Where batches go. For one thread; `shutdown` may be called from another."""

    def send_spans(self, parts: Sequence[Encoded], count: int) -> Sent:
        """Sends an uncompressed ExportTraceServiceRequest, in parts, of `count` spans. Blocks while the exporter retries, at most
        its timeout (10 s unless configured; old releases of the SDK up to a minute). Never raises."""

    def shutdown(self) -> None:
        """Ends a retry that is waiting, and closes connections. What is sent later is rejected."""


def transport(protocol: str, compression: str = "") -> Transport:
    """A transport for `http/protobuf` or `grpc`, configured by the environment as the SDK's exporter would be.

    `compression`: what the user asked for, `none`, `gzip` or `deflate`; anything else is gzip, at level 1 over HTTP.
    Raises ValueError for another protocol, ImportError where its exporter is not installed, and `SeamDrift`.
    """
    if protocol == HTTP:
        return HttpTransport(compression)
    if protocol == GRPC:
        return GrpcTransport(compression)
    raise ValueError(f"OTLP protocol {protocol!r}: expected {HTTP} or {GRPC}")


class _Outcome:
    """What the last attempt of an export came to: each attempt overwrites the one before."""

    def __init__(self) -> None:
        self.accepted, self.rejected = False, 0
        self.reason: str | None = _NOT_SENT

    def failed(self, reason: str) -> None:
        self.accepted, self.rejected, self.reason = False, 0, reason

    def took(self, response: bytes) -> None:
        """The receiver took the batch; `response` is an ExportTraceServiceResponse, or else nothing we know."""
        self.accepted, self.rejected, self.reason = True, 0, None
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

        try:
            partial = ExportTraceServiceResponse.FromString(response).partial_success
        except Exception:  # some receivers answer in JSON, or with a page
            return
        self.rejected = partial.rejected_spans
        if partial.rejected_spans or partial.error_message:
            message = partial.error_message[:_MESSAGE_LENGTH]
            self.reason = f"partial success: {message}" if message else "partial success"


class _SdkTransport:
    """What both protocols share: an exporter of the SDK, and an outcome that its innermost call notes."""

    _exporter: Any

    def __init__(self) -> None:
        self._outcome = _Outcome()
        self._shut = False

    def send_spans(self, parts: Sequence[Encoded], count: int) -> Sent:
        """See `Transport`."""
        if self._shut:
            return Sent(0, count, "shut down")
        outcome = self._outcome
        outcome.failed(_NOT_SENT)
        try:
            self._exporter.export(sdk_adapter.Ready(self._packed(parts), count))
        except Exception as error:
            # Old releases let connection errors out, which the outcome has by then.
            if outcome.reason == _NOT_SENT:
                outcome.failed(_short(error))
        if not outcome.accepted:
            return Sent(0, count, outcome.reason)
        rejected = min(max(outcome.rejected, 0), count)
        return Sent(count - rejected, rejected, outcome.reason)

    def shutdown(self) -> None:
        """See `Transport`."""
        if not self._shut:
            self._shut = True
            self._exporter.shutdown()

    def _packed(self, parts: Sequence[Encoded]) -> bytes:
        return b"".join(parts)


class HttpTransport(_SdkTransport):
    """OTLP over HTTP. We compress bodies ourselves: the exporter would at level 9, for seven times the CPU."""

    def __init__(self, compression: str = "") -> None:
        super().__init__()
        self._gzip = compression not in ("none", "deflate")
        session = sdk_adapter.http_session()
        self._exporter = sdk_adapter.http_exporter("none" if self._gzip else compression, session)
        if self._gzip:
            session.headers["Content-Encoding"] = "gzip"
        self._send = session.send
        # Around `send` and no response hook, for hooks do not see a connection fail.
        session.send = self._watched

    def _packed(self, parts: Sequence[Encoded]) -> bytes:
        return gzip1(parts) if self._gzip else super()._packed(parts)

    def _watched(self, request: Any, **options: Any) -> Any:
        # Old exporters follow redirects, and a page to log in at would be an acceptance.
        options["allow_redirects"] = False
        try:
            response = self._send(request, **options)
            content = response.content
        except Exception as error:
            self._outcome.failed(_short(error))
            raise
        # The exporter takes a redirect for a success.
        if 200 <= response.status_code < 300:
            self._outcome.took(content)
        else:
            self._outcome.failed(f"HTTP {response.status_code}")
        return response


class GrpcTransport(_SdkTransport):
    """OTLP over gRPC. Messages are compressed inside gRPC, which has one level only."""

    def __init__(self, compression: str = "") -> None:
        super().__init__()
        chosen = compression if compression in ("none", "deflate") else "gzip"
        self._exporter = sdk_adapter.grpc_exporter(chosen, self._watched)

    def _watched(self, call: Callable[[], bytes]) -> bytes:
        try:
            response = call()
        except Exception as error:
            code = getattr(error, "code", None)
            self._outcome.failed(code().name if callable(code) else _short(error))
            raise
        self._outcome.took(response)
        return response


def _short(error: BaseException) -> str:
    """What went wrong, without the message: it may hold addresses and credentials."""
    for cause in _causes(error):
        for kind, reason in _FAILURES:
            if isinstance(cause, kind):
                return reason
    return type(error).__name__


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what is behind it, outermost first; urllib3 hides causes in `reason`, requests in `args`."""
    seen = [error]
    for each in seen:
        yield each
        behind = (each.__cause__, each.__context__, getattr(each, "reason", None), *each.args)
        seen += [one for one in behind if isinstance(one, BaseException) and one not in seen]
