"""An OTLP/HTTP receiver in a process of its own: keeps what arrives as it came and counts it when asked, after the load.

python -m benchmarks.receiver        says its port on standard output, ends with its standard input
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
    """The parent's side: starts one, asks it what arrived."""

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

    def counted(self) -> dict[str, Any]:
        """What arrived since it was last asked: spans, unique ids, spans by name, bytes raw and as sent; `metrics`: what the
        last export said of every series, by metric and the values of its attributes."""
        with urllib.request.urlopen(f"{self.endpoint}/counted", timeout=300) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def answer_after(self, seconds: float) -> None:
        """Every answer to an export takes so long from now on."""
        with urllib.request.urlopen(f"{self.endpoint}/answer_after/{seconds}", timeout=30):
            pass

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Kept:
    """Bodies of trace exports, in order of arrival, and of the last export of metrics."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bodies: list[tuple[bytes, str]] = []
        self.metrics = b""

    def add(self, body: bytes, encoding: str) -> None:
        with self._lock:
            self._bodies.append((body, encoding))

    def taken(self) -> list[tuple[bytes, str]]:
        with self._lock:
            taken, self._bodies = self._bodies, []
        return taken


def count(bodies: list[tuple[bytes, str]]) -> dict[str, Any]:
    """Spans, unique (trace id, span id) pairs, spans by name, server spans by who made them, and bytes; `plain` are step spans with
    two attributes."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    names: Counter[str] = Counter()
    servers: Counter[str] = Counter()
    seen: set[bytes] = set()
    sizes: dict[bool, list[int]] = {True: [], False: []}
    raw = wire = 0
    for body, encoding in bodies:
        text = _text(body, encoding)
        raw, wire = raw + len(text), wire + len(body)
        lengths = span_lengths(text)
        for of_resource in ExportTraceServiceRequest.FromString(text).resource_spans:
            for of_scope in of_resource.scope_spans:
                for span, length in zip(of_scope.spans, lengths):
                    names[span.name] += 1
                    servers[of_scope.scope.name] += span.kind == span.SPAN_KIND_SERVER
                    seen.add(span.trace_id + span.span_id)
                    if span.name == STEP:
                        sizes[len(span.attributes) <= 2].append(length)
    found = {
        "posts": len(bodies),
        "spans": sum(names.values()),
        "unique": len(seen),
        "names": names,
        "servers": servers,
    }
    steps = {
        "steps": names[STEP],
        "plain": len(sizes[True]),
        "plain_raw": sum(sizes[True]),
        "other_raw": sum(sizes[False]),
    }
    return {**found, **steps, "raw": raw, "wire": wire}


def _text(body: bytes, encoding: str) -> bytes:
    return gzip.decompress(body) if encoding == "gzip" else body


def totals(body: bytes) -> dict[str, dict[str, float]]:
    """The value of every point, of a histogram its count, by metric and by the values of its attributes."""
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    found: dict[str, dict[str, float]] = {}
    for of_resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
        for of_scope in of_resource.scope_metrics:
            for metric in of_scope.metrics:
                kind = metric.WhichOneof("data")
                for point in getattr(metric, kind).data_points:
                    key = ",".join(str(_plain(pair.value)) for pair in point.attributes)
                    value = point.count if kind.endswith("histogram") else _plain(point)
                    found.setdefault(metric.name, {})[key] = value
    return found


def _plain(value: Any) -> Any:
    """What an AnyValue or a number point holds."""
    return getattr(value, value.WhichOneof("value"))


def span_lengths(request: bytes) -> Iterator[int]:
    """Bytes of each span of an ExportTraceServiceRequest as they came, tag and length included."""
    for _, _, begin, end in _fields(request, 0, len(request)):
        for number, _, begin_scope, end_scope in _fields(request, begin, end):
            if number == 2:
                for inner, start, _, stop in _fields(request, begin_scope, end_scope):
                    if inner == 2:
                        yield stop - start


def _fields(message: bytes, at: int, until: int) -> Iterator[tuple[int, int, int, int]]:
    """(number, where it starts, where its content starts, where it ends); all fields here are length-delimited."""
    while at < until:
        start, (tag, at) = at, _varint(message, at)
        length, at = _varint(message, at)
        yield tag >> 3, start, at, at + length
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    kept = _Kept()
    answer_after = 0.0

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        encoding = self.headers.get("Content-Encoding", "")
        if self.path == "/v1/traces":
            self.kept.add(body, encoding)
        elif self.path == "/v1/metrics":
            self.kept.metrics = _text(body, encoding)
        time.sleep(self.answer_after)
        self._answer(b"")

    def do_GET(self) -> None:
        if self.path.startswith("/answer_after/"):
            _Handler.answer_after = float(self.path.rpartition("/")[2])
            self._answer(b"")
            return
        found = {**count(self.kept.taken()), "metrics": totals(self.kept.metrics)}
        self._answer(json.dumps(found).encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(body)))
        with contextlib.suppress(ConnectionError):  # who asked has lost patience
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


def main() -> None:
    """Serves until its standard input ends; it stands for another machine, so it takes what is left of this one."""
    os.nice(19)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
