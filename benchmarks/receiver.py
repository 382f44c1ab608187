"""An OTLP/HTTP receiver in a separate process. It stores request bodies, and counts spans on request, after the load.

python -m benchmarks.receiver        prints its port, ends with its standard input
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STEP = "decode step"


class Receiver:
    """Starts a receiver process and reads its counts."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.receiver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.pid = self._process.pid
        self.endpoint = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    def read_counts(self) -> dict[str, Any]:
        """Returns the counts since the last call: spans, unique ids, spans by name, raw and sent bytes.

        `metrics` has the values of the last export by metric and attribute values.
        """
        with urllib.request.urlopen(f"{self.endpoint}/counts", timeout=300) as response:
            counts: dict[str, Any] = json.load(response)
        return counts

    def delay_responses(self, seconds: float) -> None:
        """Delays the response to each export from now on."""
        with urllib.request.urlopen(f"{self.endpoint}/delay/{seconds}", timeout=30):
            pass

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Bodies:
    """Bodies of trace exports in order of arrival, and of the last export of metrics."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._traces: list[tuple[bytes, str]] = []
        self.metrics = b""

    def add_traces(self, body: bytes, encoding: str) -> None:
        with self._lock:
            self._traces.append((body, encoding))

    def take_traces(self) -> list[tuple[bytes, str]]:
        with self._lock:
            taken, self._traces = self._traces, []
        return taken


def count_spans(bodies: list[tuple[bytes, str]]) -> dict[str, Any]:
    """Returns the number of spans, of unique (trace id, span id) pairs, spans by name, server spans by scope, and bytes.

    `plain` counts step spans with at most two attributes.
    """
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    names: Counter[str] = Counter()
    servers: Counter[str] = Counter()
    unique: set[bytes] = set()
    step_sizes: dict[bool, list[int]] = {True: [], False: []}
    wire = 0
    for body, encoding in bodies:
        text = _decompress(body, encoding)
        wire += len(body)
        lengths = measure_spans(text)
        for of_resource in ExportTraceServiceRequest.FromString(text).resource_spans:
            for of_scope in of_resource.scope_spans:
                for span, length in zip(of_scope.spans, lengths):
                    names[span.name] += 1
                    servers[of_scope.scope.name] += span.kind == span.SPAN_KIND_SERVER
                    unique.add(span.trace_id + span.span_id)
                    if span.name == STEP:
                        step_sizes[len(span.attributes) <= 2].append(length)
    return {
        "spans": sum(names.values()),
        "unique": len(unique),
        "names": names,
        "servers": servers,
        "steps": names[STEP],
        "plain": len(step_sizes[True]),
        "plain_raw": sum(step_sizes[True]),
        "other_raw": sum(step_sizes[False]),
        "wire": wire,
    }


def _decompress(body: bytes, encoding: str) -> bytes:
    return gzip.decompress(body) if encoding == "gzip" else body


def read_points(body: bytes) -> dict[str, dict[str, float]]:
    """Returns the value of each point (of a histogram its count) by metric and attribute values."""
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    values: dict[str, dict[str, float]] = {}
    for of_resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
        for of_scope in of_resource.scope_metrics:
            for metric in of_scope.metrics:
                kind = metric.WhichOneof("data")
                for point in getattr(metric, kind).data_points:
                    key = ",".join(str(_read_value(pair.value)) for pair in point.attributes)
                    value = point.count if kind.endswith("histogram") else _read_value(point)
                    values.setdefault(metric.name, {})[key] = value
    return values


def _read_value(value: Any) -> Any:
    """Returns the value of an AnyValue or a number point."""
    return getattr(value, value.WhichOneof("value"))


def measure_spans(request: bytes) -> Iterator[int]:
    """Yields the encoded size of each span of an ExportTraceServiceRequest, with tag and length."""
    for _, _, begin, end in _iterate_fields(request, 0, len(request)):
        for number, _, begin_scope, end_scope in _iterate_fields(request, begin, end):
            if number == 2:
                for inner, start, _, stop in _iterate_fields(request, begin_scope, end_scope):
                    if inner == 2:
                        yield stop - start


def _iterate_fields(message: bytes, at: int, until: int) -> Iterator[tuple[int, int, int, int]]:
    """Yields the number, start, start of content and end of each field. All fields here are length-delimited."""
    while at < until:
        start, (tag, at) = at, _read_varint(message, at)
        length, at = _read_varint(message, at)
        yield tag >> 3, start, at, at + length
        at += length


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    bodies = _Bodies()
    delay_s = 0.0

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        encoding = self.headers.get("Content-Encoding", "")
        if self.path == "/v1/traces":
            self.bodies.add_traces(body, encoding)
        elif self.path == "/v1/metrics":
            self.bodies.metrics = _decompress(body, encoding)
        time.sleep(self.delay_s)
        self._respond(b"")

    def do_GET(self) -> None:
        if self.path.startswith("/delay/"):
            _Handler.delay_s = float(self.path.rpartition("/")[2])
            self._respond(b"")
            return
        counts = {**count_spans(self.bodies.take_traces()), "metrics": read_points(self.bodies.metrics)}
        self._respond(json.dumps(counts).encode())

    def _respond(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(body)))
        with contextlib.suppress(ConnectionError):  # the client timed out
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


def main() -> None:
    """Serves until standard input ends, at the lowest priority, because it stands for another machine."""
    os.nice(19)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
