"""What the readers of requests felt: spans of `otel_infer.instrumentation.httpx` out of a file, beside what the server knows of the same.

Both ends measure lengths by their own clock, so no two clocks are compared: what the reader waited longer than the server
took is outside of it. The file is what the Collector's `file` exporter writes (OTLP as JSON), or the SDK's
`ConsoleSpanExporter`; spans of others in it are passed over.
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
    """The file is not one of spans that we can read; the message says why."""


class ClientRequest(NamedTuple):
    """One request at its reader's end; ns, 0 = there was none."""

    trace_id: str
    span_id: str
    duration: int
    first_token: int


class ClientLatency(NamedTuple):
    """How long readers waited, for the first token or, where there is none, for all of it; ms. `requests`: known at both ends.

    `share`: of what the slowest tenth of them waited, the part outside of this server, 0 to 1. `to_first_token`: of how many
    requests it is the wait for that.
    """

    requests: int
    felt_p50_ms: float
    felt_p95_ms: float
    server_p95_ms: float
    outside_p50_ms: float
    outside_p95_ms: float
    share: float
    to_first_token: int

    def to_sentence(self) -> str:
        until = "to the end"
        if self.to_first_token:
            until = "to the first token"
        if 0 < self.to_first_token < self.requests:
            until += f", or to the end of the {self.requests - self.to_first_token} that do not stream"
        return (
            f"what the readers of {self.requests} requests felt: p95 {self.felt_p95_ms:.0f} ms {until}, of which "
            f"the server knows {self.server_p95_ms:.0f} ms; {self.share:.0%} of what the slowest tenth waited is outside of "
            f"it (median {self.outside_p50_ms:.0f} ms): network, proxies, connections"
        )


def read_client_requests(path: Path) -> list[ClientRequest]:
    """The spans of our client in a file; raises `BadSpans`, or `OSError`."""
    try:
        found = [felt for said in _decode_objects(path.read_text("utf-8")) for felt in _parse_spans(said)]
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as reason:
        raise InvalidSpanFile(
            f"{path}: no OTLP JSON, nor what ConsoleSpanExporter writes: {reason!r}"
        ) from None
    if not found:
        raise InvalidSpanFile(f"{path}: no span of otel_infer.instrumentation.httpx is in it")
    return found


def compare_latency(records: Sequence[RequestRecord], felt: Sequence[ClientRequest]) -> ClientLatency | None:
    """What the requests come to that are known at both ends; None if there is none."""
    import numpy as np

    joined = list(_match_requests(records, felt))
    pairs = [_paired_durations(record, one) for record, one in joined]
    if not pairs:
        return None
    to_first_token = sum(_has_first_token(record, one) for record, one in joined)
    theirs, ours = np.array(pairs, float).T / 1e6
    more = np.maximum(theirs - ours, 0)
    slowest = np.argsort(theirs, kind="stable")[-max(round(len(theirs) * SLOWEST_SHARE), 1) :]
    felt_p50, felt_p95 = np.percentile(theirs, (50, 95)).tolist()
    more_p50, more_p95 = np.percentile(more, (50, 95)).tolist()
    share = float(more[slowest].sum() / max(theirs[slowest].sum(), 1e-9))
    server_p95 = float(np.percentile(ours, 95))
    return ClientLatency(
        len(pairs), felt_p50, felt_p95, server_p95, more_p50, more_p95, share, to_first_token
    )


def _match_requests(
    records: Sequence[RequestRecord], felt: Sequence[ClientRequest]
) -> Iterator[tuple[RequestRecord, ClientRequest]]:
    """By the span that called; where another's server span lies between, by the trace, if it has one of each."""
    by_span = {(one.trace_id, one.span_id): one for one in felt}
    calls, served = Counter(one.trace_id for one in felt), Counter(r.trace_id.hex() for r in records)
    by_trace = {one.trace_id: one for one in felt if calls[one.trace_id] == 1}
    for record in records:
        trace_id = record.trace_id.hex()
        alone = by_trace.get(trace_id) if served[trace_id] == 1 else None
        found = by_span.get((trace_id, record.parent_span_id.hex()), alone)
        if found is not None:
            yield record, found


def _has_first_token(record: RequestRecord, felt: ClientRequest) -> bool:
    """Whether both ends know when it came."""
    return bool(felt.first_token and record.ttft_ns)


def _paired_durations(record: RequestRecord, felt: ClientRequest) -> tuple[int, int]:
    if _has_first_token(record, felt):
        return felt.first_token, record.ttft_ns
    return felt.duration, record.duration_ns


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _decode_objects(text: str) -> Iterator[Any]:
    """JSON objects one after the other, on one line each or not."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        said, at = decoder.raw_decode(text, at)
        yield said


def _parse_spans(said: Any) -> Iterator[ClientRequest]:
    if "resourceSpans" in said:
        scopes = [scope for one in said["resourceSpans"] for scope in one.get("scopeSpans", ())]
        for span in (span for scope in scopes for span in scope.get("spans", ())):
            pairs = {
                one["key"]: next(iter(one["value"].values()), None) for one in span.get("attributes", ())
            }
            length = int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"])
            yield from _parse_client_span(span["traceId"], span["spanId"], length, pairs)
    elif "context" in said:
        begin, end = (
            datetime.fromisoformat(said[key].replace("Z", "+00:00")) for key in ("start_time", "end_time")
        )
        trace_id, span_id = (said["context"][key].removeprefix("0x") for key in ("trace_id", "span_id"))
        yield from _parse_client_span(
            trace_id, span_id, round((end - begin).total_seconds() * 1e9), said["attributes"] or {}
        )


def _parse_client_span(
    trace_id: str, span_id: str, duration: int, attributes: dict[str, Any]
) -> Iterator[ClientRequest]:
    """Ours if it says when the headers were there."""
    if semconv.CLIENT_TIME_TO_HEADERS in attributes:
        first_token = round(float(attributes.get(semconv.CLIENT_TIME_TO_FIRST_TOKEN, 0)) * 1e9)
        yield ClientRequest(trace_id.lower(), span_id.lower(), duration, first_token)
