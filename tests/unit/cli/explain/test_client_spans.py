"""What readers felt, out of files of spans, beside what the server knows."""

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
    engine, asked = healthy(random.Random(2))
    return engine.records(asked)


def otlp(trace_id: str, span_id: str, first_token_ms: float, **more: Any) -> dict[str, Any]:
    """As the Collector's file exporter writes it."""
    said = {
        semconv.CLIENT_TIME_TO_HEADERS: 0.001,
        semconv.CLIENT_TIME_TO_FIRST_TOKEN: first_token_ms / 1e3,
        **more,
    }
    attributes = [{"key": key, "value": {"doubleValue": value}} for key, value in said.items()]
    attributes += [
        {"key": "http.response.status_code", "value": {"intValue": "200"}},
        {"key": "x", "value": {}},
    ]
    span = {"traceId": trace_id, "spanId": span_id, "startTimeUnixNano": "1000", "endTimeUnixNano": "5001000"}
    others = {**span, "spanId": "f" * 16, "attributes": []}
    return {"resourceSpans": [{"scopeSpans": [{"spans": [{**span, "attributes": attributes}, others]}]}, {}]}


def console(trace_id: str, span_id: str, first_token_ms: float) -> dict[str, Any]:
    """As the SDK's ConsoleSpanExporter prints it."""
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
def test_spans_of_our_client_are_found_whoever_wrote_them(
    tmp_path: Path, write: Any, indent: int | None
) -> None:
    spans = [write("ab" * 16, "cd" * 8, 12.5), write("AB" * 16, "ef" * 8, 0.25)]
    (tmp_path / "a").write_text("\n".join(json.dumps(span, indent=indent) for span in spans) + "\n\n")
    assert client_spans.read_client_requests(tmp_path / "a") == [
        ClientRequest("ab" * 16, "cd" * 8, 5 * MS, 12_500_000),
        ClientRequest("ab" * 16, "ef" * 8, 5 * MS, 250_000),
    ]


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "nothing", '{"resourceSpans": 5}', '{"context": {}}', '"context"']
)
def test_a_file_without_such_spans_is_an_error_that_says_so(tmp_path: Path, text: str) -> None:
    (tmp_path / "a").write_text(text)
    with pytest.raises(InvalidSpanFile, match=r"OTLP JSON|no span of otel_infer.instrumentation.httpx"):
        client_spans.read_client_requests(tmp_path / "a")


def test_a_length_that_is_none_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(json.dumps(otlp("ab" * 16, "cd" * 8, float("inf"))))
    with pytest.raises(InvalidSpanFile, match="no OTLP JSON"):
        client_spans.read_client_requests(tmp_path / "a")


def test_what_readers_waited_longer_than_the_server_took_is_outside_of_it() -> None:
    records = served()
    for number, record in enumerate(records):
        record.parent_span_id = number.to_bytes(8, "big")
    felt = [
        ClientRequest(r.trace_id.hex(), r.parent_span_id.hex(), r.duration_ns, r.ttft_ns + 300 * MS)
        for r in records[:40]
    ]
    found = client_spans.compare_latency(records, felt)
    assert found is not None
    assert found.requests == 40
    assert found.outside_p50_ms == pytest.approx(300) and found.outside_p95_ms == pytest.approx(300)
    assert found.felt_p95_ms == pytest.approx(found.server_p95_ms + 300)
    assert 0.5 < found.share < 1 and f"{found.share:.0%}" in found.to_sentence()
    assert found.to_first_token == 40 and "to the first token, of which" in found.to_sentence()
    some_whole = client_spans.compare_latency(
        records, [*felt[:30], *(one._replace(first_token=0) for one in felt[30:])]
    )
    assert some_whole is not None
    assert "to the first token, or to the end of the 10 that do not stream, of" in some_whole.to_sentence()


def test_without_tokens_it_is_the_whole_that_was_waited_for_and_never_less_than_nothing() -> None:
    (record, *_) = served()
    whole = ClientRequest(record.trace_id.hex(), "00" * 8, record.duration_ns + 7 * MS, 0)
    found = client_spans.compare_latency([record], [whole])
    assert found is not None and found.outside_p50_ms == pytest.approx(7)
    assert "to the end, of which" in found.to_sentence()
    quicker = client_spans.compare_latency([record], [whole._replace(duration=1)])
    assert quicker is not None and (quicker.outside_p50_ms, quicker.share) == (0, 0)


def test_a_trace_with_several_requests_is_joined_by_the_calling_span_alone() -> None:
    one, other, *_ = served()
    other.trace_id = one.trace_id
    one.parent_span_id, other.parent_span_id = b"1" * 8, b"2" * 8
    felt = ClientRequest(one.trace_id.hex(), (b"2" * 8).hex(), 0, other.ttft_ns + MS)
    found = client_spans.compare_latency([one, other], [felt])
    assert found is not None and (found.requests, round(found.outside_p50_ms, 3)) == (1, 1.0)
    assert client_spans.compare_latency([one, other], [felt._replace(span_id="3" * 16)]) is None
    assert (
        client_spans.compare_latency([one], [felt._replace(span_id="3" * 16)]) is not None
    )  # somebody's server span between


def test_explain_tells_what_readers_felt_if_it_is_given_their_spans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recorded(tmp_path / "a.tape", *healthy(random.Random(2)))
    spans = [otlp(r.trace_id.hex(), "ab" * 8, r.ttft_ns / MS + 250) for r in served()]
    (tmp_path / "spans").write_text("\n".join(map(json.dumps, spans)))
    assert main(["explain", str(path), "--client", str(tmp_path / "spans")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "what the readers of 60 requests felt" in out and "(median 250 ms)" in out
    assert main(["explain", str(path), "--client", str(tmp_path / "spans"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["readers"]["requests"] == 60
    (tmp_path / "others").write_text(json.dumps(otlp("ab" * 16, "ab" * 8, 1)))
    assert main(["explain", str(path), "--client", str(tmp_path / "others")]) == 2
    assert "none of its spans is of one of these 60 requests" in capsys.readouterr().err
    assert main(["explain", str(path), "--client", str(tmp_path / "nowhere")]) == 2
    assert main(["explain", str(path), "--client", str(tmp_path / "spans"), "--against", str(path)]) == 2
    assert "neither" in capsys.readouterr().err
