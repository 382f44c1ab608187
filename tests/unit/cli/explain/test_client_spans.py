"""Client-side latency from span files is compared with the latency in the server."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from otel_infer import semconv
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.cli import main
from otel_infer.cli.explain import client_spans
from otel_infer.cli.explain.client_spans import ClientRequest, InvalidSpanFile
from tests.unit.analysis.diagnosis.test_rules import healthy
from tests.unit.cli.explain.test_explain import recorded

MS = 1_000_000


def served() -> list[RequestRecord]:
    engine, load = healthy(random.Random(2))
    return engine.records(load)


def otlp(trace_id: str, span_id: str, first_token_ms: float, **more: Any) -> dict[str, Any]:
    """Returns spans in the format of the Collector's file exporter."""
    values = {
        semconv.CLIENT_TIME_TO_HEADERS: 0.001,
        semconv.CLIENT_TIME_TO_FIRST_TOKEN: first_token_ms / 1e3,
        **more,
    }
    attributes = [{"key": key, "value": {"doubleValue": value}} for key, value in values.items()]
    attributes += [
        {"key": "http.response.status_code", "value": {"intValue": "200"}},
        {"key": "x", "value": {}},
    ]
    span = {"traceId": trace_id, "spanId": span_id, "startTimeUnixNano": "1000", "endTimeUnixNano": "5001000"}
    others = {**span, "spanId": "f" * 16, "attributes": []}
    return {"resourceSpans": [{"scopeSpans": [{"spans": [{**span, "attributes": attributes}, others]}]}, {}]}


def console(trace_id: str, span_id: str, first_token_ms: float) -> dict[str, Any]:
    """Returns a span in the format of the SDK's ConsoleSpanExporter."""
    return {
        "name": "POST",
        "context": {"trace_id": f"0x{trace_id}", "span_id": f"0x{span_id}", "trace_state": "[]"},
        "start_time": "2026-01-01T00:00:00.000001Z",
        "end_time": "2026-01-01T00:00:00.005001Z",
        "attributes": {
            semconv.CLIENT_TIME_TO_HEADERS: 0.001,
            semconv.CLIENT_TIME_TO_FIRST_TOKEN: first_token_ms / 1e3,
        },
    }


@pytest.mark.parametrize("indent", [None, 4])
@pytest.mark.parametrize("write", [otlp, console])
def test_client_spans_are_read_from_both_formats(tmp_path: Path, write: Any, indent: int | None) -> None:
    spans = [write("ab" * 16, "cd" * 8, 12.5), write("AB" * 16, "ef" * 8, 0.25)]
    (tmp_path / "a").write_text("\n".join(json.dumps(span, indent=indent) for span in spans) + "\n\n")
    assert client_spans.read_client_requests(tmp_path / "a") == [
        ClientRequest("ab" * 16, "cd" * 8, 5 * MS, 12_500_000),
        ClientRequest("ab" * 16, "ef" * 8, 5 * MS, 250_000),
    ]


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "nothing", '{"resourceSpans": 5}', '{"context": {}}', '"context"']
)
def test_file_without_client_spans_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "a").write_text(text)
    with pytest.raises(InvalidSpanFile, match=r"OTLP JSON|no span of otel_infer.instrumentation.httpx"):
        client_spans.read_client_requests(tmp_path / "a")


def test_infinite_length_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(json.dumps(otlp("ab" * 16, "cd" * 8, float("inf"))))
    with pytest.raises(InvalidSpanFile, match="no OTLP JSON"):
        client_spans.read_client_requests(tmp_path / "a")


def test_additional_client_latency_is_outside_the_server() -> None:
    records = served()
    for number, record in enumerate(records):
        record.parent_span_id = number.to_bytes(8, "big")
    client_requests = [
        ClientRequest(r.trace_id.hex(), r.parent_span_id.hex(), r.duration_ns, r.ttft_ns + 300 * MS)
        for r in records[:40]
    ]
    found = client_spans.compare_latency(records, client_requests)
    assert found is not None
    assert found.requests == 40
    assert found.outside_p50_ms == pytest.approx(300) and found.outside_p95_ms == pytest.approx(300)
    assert found.client_p95_ms == pytest.approx(found.server_p95_ms + 300)
    assert 0.5 < found.share < 1 and f"{found.share:.0%}" in found.to_sentence()
    assert found.to_first_token == 40
    partly_streamed = [request._replace(first_token=0) for request in client_requests[30:]]
    found = client_spans.compare_latency(records, [*client_requests[:30], *partly_streamed])
    assert found is not None and (found.requests, found.to_first_token) == (40, 30)
    assert "the 10 " in found.to_sentence()


def test_without_first_token_the_whole_duration_is_compared() -> None:
    """The latency outside the server is never negative."""
    (record, *_) = served()
    whole = ClientRequest(record.trace_id.hex(), "00" * 8, record.duration_ns + 7 * MS, 0)
    found = client_spans.compare_latency([record], [whole])
    assert found is not None and found.outside_p50_ms == pytest.approx(7)
    assert "to the end" in found.to_sentence()
    shorter = client_spans.compare_latency([record], [whole._replace(duration=1)])
    assert shorter is not None and (shorter.outside_p50_ms, shorter.share) == (0, 0)


def test_calling_span_selects_the_request_of_a_trace() -> None:
    first, second, *_ = served()
    second.trace_id = first.trace_id
    first.parent_span_id, second.parent_span_id = b"1" * 8, b"2" * 8
    client_request = ClientRequest(first.trace_id.hex(), (b"2" * 8).hex(), 0, second.ttft_ns + MS)
    found = client_spans.compare_latency([first, second], [client_request])
    assert found is not None and (found.requests, round(found.outside_p50_ms, 3)) == (1, 1.0)
    assert client_spans.compare_latency([first, second], [client_request._replace(span_id="3" * 16)]) is None
    assert (
        client_spans.compare_latency([first], [client_request._replace(span_id="3" * 16)]) is not None
    )  # a server span of another library may lie between


def test_explain_reports_client_latency_from_a_span_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recorded(tmp_path / "a.tape", *healthy(random.Random(2)))
    spans = [otlp(r.trace_id.hex(), "ab" * 8, r.ttft_ns / MS + 250) for r in served()]
    (tmp_path / "spans").write_text("\n".join(map(json.dumps, spans)))
    assert main(["explain", str(path), "--client", str(tmp_path / "spans")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "client-side latency of 60 requests" in out and "(median 250 ms)" in out
    assert main(["explain", str(path), "--client", str(tmp_path / "spans"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["client_latency"]["requests"] == 60
    (tmp_path / "others").write_text(json.dumps(otlp("ab" * 16, "ab" * 8, 1)))
    assert main(["explain", str(path), "--client", str(tmp_path / "others")]) == 2
    assert "these 60 requests" in capsys.readouterr().err
    assert main(["explain", str(path), "--client", str(tmp_path / "nowhere")]) == 2
    assert main(["explain", str(path), "--client", str(tmp_path / "spans"), "--against", str(path)]) == 2
    assert "neither" in capsys.readouterr().err
