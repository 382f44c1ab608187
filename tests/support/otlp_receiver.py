"""A real OTLP receiver on loopback for tests: what a collector would receive, and its responses.

with OtlpReceiver("grpc") as receiver:
    receiver.answer(status(503, retry_after=0), then=ok())
    ...
    assert receiver.wait_for(lambda it: len(it.spans) == 3)
"""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo

from tests.support.otlp_messages import decoded, response

HTTP, GRPC = "http/protobuf", "grpc"
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.UNIMPLEMENTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
}
_SIGNALS = {
    "/v1/traces": "traces",
    "/v1/metrics": "metrics",
    "/opentelemetry.proto.collector.trace.v1.TraceService/Export": "traces",
    "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export": "metrics",
}


class Answer(NamedTuple):
    """The response to a request. `delay`, `retry_after`: s. `code`: HTTP, translated for gRPC.

    `body` replaces the standard response. `location`: target of a redirect, which serves a page.
    """

    code: int = 200
    delay: float = 0.0
    retry_after: float | None = None
    rejected: int = 0
    message: str = ""
    body: bytes | None = None
    location: str = ""


def ok() -> Answer:
    return Answer()


def slow(seconds: float) -> Answer:
    """Accepts after `seconds`; the sender may have timed out by then."""
    return Answer(delay=seconds)


def status(code: int, retry_after: float | None = None) -> Answer:
    """Refuses with this HTTP status, or the matching gRPC status."""
    return Answer(code, retry_after=retry_after)


def partial_success(rejected: int, message: str = "") -> Answer:
    """Accepts all but the last `rejected` spans or metrics."""
    return Answer(rejected=rejected, message=message)


class Received(NamedTuple):
    """One request. `raw_bytes`: uncompressed. `wire_bytes`: as sent; 0 over gRPC, where it is unknown."""

    signal: str
    headers: dict[str, str]
    raw_bytes: int
    wire_bytes: int
    answer: Answer


class OtlpReceiver:
    """Listens for one protocol on a free loopback port until closed; takes traces and metrics."""

    def __init__(self, protocol: str = HTTP) -> None:
        self.protocol = protocol
        self.port = 0
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._answer, self._first = ok(), list[Answer]()
        self._requests: list[Received] = []
        self._spans: list[dict[str, Any]] = []
        self._metrics: list[dict[str, Any]] = []
        self._stop: Callable[[], None] | None = None
        self.listen()

    @property
    def endpoint(self) -> str:
        """Returns the value for OTEL_EXPORTER_OTLP_ENDPOINT."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def environ(self) -> dict[str, str]:
        """Returns the environment with which a child process exports here."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": self.protocol}

    @property
    def spans(self) -> list[dict[str, Any]]:
        """Returns all accepted spans: ids in hex, `start` and `end` in unix ns, with `resource` and `scope`."""
        with self._changed:
            return list(self._spans)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Returns all accepted metrics, export by export, with their `points`, `resource` and `scope`."""
        with self._changed:
            return list(self._metrics)

    @property
    def requests(self) -> list[Received]:
        """Returns every readable request, accepted or not."""
        with self._changed:
            return list(self._requests)

    def answer(self, *answers: Answer, then: Answer | None = None) -> None:
        """Answers the next requests with `answers`, all others with `then` (default: the last of `answers`)."""
        with self._changed:
            self._first, self._answer = list(answers), then or answers[-1]

    def wait_for(self, predicate: Callable[[OtlpReceiver], object], timeout: float = 10.0) -> bool:
        """Returns whether `predicate(self)` became true within `timeout` s; checked at each request."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(predicate(self)), timeout)

    def listen(self) -> None:
        """Accepts connections (again), on the same port."""
        self._stop = _serve_grpc(self) if self.protocol == GRPC else _serve_http(self)

    def refuse(self) -> None:
        """Closes all connections and refuses new ones, until `listen`."""
        if self._stop is not None:
            self._stop()
            self._stop = None

    def close(self) -> None:
        self._closed.set()
        self.refuse()

    def __enter__(self) -> OtlpReceiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(
        self, signal: str, headers: Mapping[str, str], raw: bytes, wire_bytes: int
    ) -> tuple[Answer, bytes]:
        """Stores one request; returns the answer, and its body."""
        with self._changed:
            answer = self._first.pop(0) if self._first else self._answer
        self._closed.wait(answer.delay)
        items, body = decoded(signal, raw), response(signal, answer.rejected, answer.message)
        with self._changed:
            self._requests.append(Received(signal, dict(headers), len(raw), wire_bytes, answer))
            if answer.code == 200:
                store = self._spans if signal == "traces" else self._metrics
                store += items[: len(items) - answer.rejected]
            self._changed.notify_all()
        return answer, body if answer.body is None else answer.body


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    receiver: OtlpReceiver

    def do_POST(self) -> None:
        wire = self.rfile.read(int(self.headers["Content-Length"]))
        signal = _SIGNALS.get(self.path)
        if signal is None:
            return self._say(404)
        try:
            raw = _uncompressed(wire, self.headers.get("Content-Encoding", ""))
            headers = {name.lower(): value for name, value in self.headers.items()}
            answer, body = self.receiver.take(signal, headers, raw, len(wire))
        except (DecodeError, OSError, zlib.error):
            return self._say(400)
        body = body if answer.code == 200 else b""
        return self._say(answer.code, body, answer.retry_after, answer.location)

    def do_GET(self) -> None:
        self._say(200, b"<html>")

    def _say(
        self, code: int, body: bytes = b"", retry_after: float | None = None, location: str = ""
    ) -> None:
        self.send_response(code)
        if location:
            self.send_header("Location", location)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(body)))
        if retry_after is not None:
            self.send_header("Retry-After", f"{retry_after:g}")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


class _HttpServer(ThreadingHTTPServer):
    def __init__(self, port: int, handler: type[_Handler]) -> None:
        self.open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores a sender that disconnected."""


def _uncompressed(wire: bytes, encoding: str) -> bytes:
    if encoding == "gzip":
        return gzip.decompress(wire)
    return zlib.decompress(wire) if encoding == "deflate" else wire


def _serve_http(receiver: OtlpReceiver) -> Callable[[], None]:
    server = _HttpServer(receiver.port, type("Handler", (_Handler,), {"receiver": receiver}))
    receiver.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), name="otlp-receiver", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()
        for connection in list(server.open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    return stop


def _serve_grpc(receiver: OtlpReceiver) -> Callable[[], None]:
    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
            signal = _SIGNALS.get(call.method)
            if signal is None:
                return None
            return grpc.unary_unary_rpc_method_handler(lambda raw, context: export(signal, raw, context))

    def export(signal: str, raw: bytes, context: grpc.ServicerContext) -> bytes:
        headers = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        answer, body = receiver.take(signal, headers, raw, 0)
        if answer.retry_after is not None:
            delay = Duration(seconds=int(answer.retry_after), nanos=int(answer.retry_after % 1 * 1e9))
            info = RetryInfo(retry_delay=delay).SerializeToString()
            context.set_trailing_metadata((("google.rpc.retryinfo-bin", info),))
        if answer.code != 200:
            context.abort(_CODES.get(answer.code, grpc.StatusCode.UNKNOWN), "set by the test")
        return body

    # Without SO_REUSEPORT two receivers never share a port.
    server = grpc.server(ThreadPoolExecutor(4), (Handler(),), options=(("grpc.so_reuseport", 0),))
    receiver.port = server.add_insecure_port(f"127.0.0.1:{receiver.port}")
    server.start()
    return lambda: server.stop(None).wait() and None
