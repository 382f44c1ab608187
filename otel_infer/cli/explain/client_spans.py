"""Client-side latency, from a file with the spans of `otel_infer.instrumentation.httpx`.

Each side measures lengths by its own clock, so the clocks are never compared. The time by which the client
waited longer than the server took was spent outside the server. The file is written by the Collector's `file`
exporter (OTLP JSON) or by the SDK's `ConsoleSpanExporter`. Other spans in it are skipped.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from otel_infer import semconv
from otel_infer.assembly.records.request import RequestRecord

SLOWEST_SHARE = 0.1


class InvalidSpanFile(ValueError):
    """The file holds no readable client spans; the message gives the reason."""


class ClientRequest(NamedTuple):
    """One request as its client measured it. `duration`, `first_token`: ns; 0 = no token came."""

    trace_id: str
    span_id: str
    duration: int
    first_token: int


class ClientLatency(NamedTuple):
    """Client-side latency in ms: to the first token, or to the end of requests without one.

    `requests`: how many were found on both sides. `to_first_token`: for how many the latency is to the first
    token. `client_*`: measured by the client. `server_*`: measured by the server. `outside_*`: the difference,
    at least 0. `share`: the part (0 to 1) of the slowest tenth's latency outside the server.
    """

    requests: int
    client_p50_ms: float
    client_p95_ms: float
    server_p95_ms: float
    outside_p50_ms: float
    outside_p95_ms: float
    share: float
    to_first_token: int

    def to_sentence(self) -> str:
        """Returns the comparison as one sentence for the terminal."""
        until = "to the end"
        if self.to_first_token:
            until = "to the first token"
        if 0 < self.to_first_token < self.requests:
            until += f", or to the end of the {self.requests - self.to_first_token} that do not stream"
        return (
            f"client-side latency of {self.requests} requests: p95 {self.client_p95_ms:.0f} ms {until}, of which "
            f"{self.server_p95_ms:.0f} ms in the server (p95); {self.share:.0%} of the slowest tenth's wait was outside it "
            f"(median {self.outside_p50_ms:.0f} ms): network, proxies, connections"
        )


def read_client_requests(path: Path) -> list[ClientRequest]:
    """Returns the client spans of `otel_infer.instrumentation.httpx` in a file.

    Raises `InvalidSpanFile` or `OSError`.
    """
    try:
        requests = [
            request for value in _decode_objects(path.read_text("utf-8")) for request in _parse_spans(value)
        ]
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as reason:
        raise InvalidSpanFile(
            f"{path}: no OTLP JSON, and not written by ConsoleSpanExporter: {reason!r}"
        ) from None
    if not requests:
        raise InvalidSpanFile(f"{path}: no span of otel_infer.instrumentation.httpx in it")
    return requests


def compare_latency(records: Sequence[RequestRecord], calls: Sequence[ClientRequest]) -> ClientLatency | None:
    """Compares client-side and server-side latency of the requests found on both sides.

    None if there are none.
    """
    import numpy as np

    matches = list(_match_requests(records, calls))
    pairs = [_paired_durations(record, call) for record, call in matches]
    if not pairs:
        return None
    to_first_token = sum(_has_first_token(record, call) for record, call in matches)
    client, server = np.array(pairs, float).T / 1e6
    outside = np.maximum(client - server, 0)
    slowest = np.argsort(client, kind="stable")[-max(round(len(client) * SLOWEST_SHARE), 1) :]
    client_p50, client_p95 = np.percentile(client, (50, 95)).tolist()
    outside_p50, outside_p95 = np.percentile(outside, (50, 95)).tolist()
    share = float(outside[slowest].sum() / max(client[slowest].sum(), 1e-9))
    server_p95 = float(np.percentile(server, 95))
    return ClientLatency(
        len(pairs), client_p50, client_p95, server_p95, outside_p50, outside_p95, share, to_first_token
    )


def _match_requests(
    records: Sequence[RequestRecord], calls: Sequence[ClientRequest]
) -> Iterator[tuple[RequestRecord, ClientRequest]]:
    """Yields the pairs of record and client span of the same request.

    The client span is the parent of the record. If another library's server span lies between them, they are
    matched by trace, provided that the trace has exactly one of each.
    """
    by_span = {(call.trace_id, call.span_id): call for call in calls}
    calls_in, records_in = (
        Counter(call.trace_id for call in calls),
        Counter(r.trace_id.hex() for r in records),
    )
    by_trace = {call.trace_id: call for call in calls if calls_in[call.trace_id] == 1}
    for record in records:
        trace_id = record.trace_id.hex()
        only_call = by_trace.get(trace_id) if records_in[trace_id] == 1 else None
        call = by_span.get((trace_id, record.parent_span_id.hex()), only_call)
        if call is not None:
            yield record, call


def _has_first_token(record: RequestRecord, call: ClientRequest) -> bool:
    """Returns whether both sides measured the first token."""
    return bool(call.first_token and record.ttft_ns)


def _paired_durations(record: RequestRecord, call: ClientRequest) -> tuple[int, int]:
    if _has_first_token(record, call):
        return call.first_token, record.ttft_ns
    return call.duration, record.duration_ns


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _decode_objects(text: str) -> Iterator[Any]:
    """Yields the JSON values of a text, on separate lines or not."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        value, at = decoder.raw_decode(text, at)
        yield value


def _parse_spans(value: Any) -> Iterator[ClientRequest]:
    if "resourceSpans" in value:
        scopes = [scope for each in value["resourceSpans"] for scope in each.get("scopeSpans", ())]
        for span in (span for scope in scopes for span in scope.get("spans", ())):
            pairs = {
                attribute["key"]: next(iter(attribute["value"].values()), None)
                for attribute in span.get("attributes", ())
            }
            length = int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"])
            yield from _parse_client_span(span["traceId"], span["spanId"], length, pairs)
    elif "context" in value:
        begin, end = (
            datetime.fromisoformat(value[key].replace("Z", "+00:00")) for key in ("start_time", "end_time")
        )
        trace_id, span_id = (value["context"][key].removeprefix("0x") for key in ("trace_id", "span_id"))
        yield from _parse_client_span(
            trace_id, span_id, round((end - begin).total_seconds() * 1e9), value["attributes"] or {}
        )


def _parse_client_span(
    trace_id: str, span_id: str, duration: int, attributes: dict[str, Any]
) -> Iterator[ClientRequest]:
    """Yields the request if the span is ours, which the time to headers marks."""
    if semconv.CLIENT_TIME_TO_HEADERS in attributes:
        first_token = round(float(attributes.get(semconv.CLIENT_TIME_TO_FIRST_TOKEN, 0)) * 1e9)
        yield ClientRequest(trace_id.lower(), span_id.lower(), duration, first_token)
