"""The request log: a line for each request that is kept for a reason; its fields, destinations and rate limit."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace

from otel_infer import semconv
from otel_infer.analysis.attribution.breakdown import attribute_latency
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.export.request_log import BURST, MAX_PER_SECOND, RequestLog
from otel_infer.export.sampling.tail_sampler import Decision
from otel_infer.ringbuffer import events
from tests.support.story import Story

SLO = Decision(True, 5, "slo", missed=("e2e",))
SECOND = 1_000_000_000


def slow() -> RequestRecord:
    story = Story()
    a = story.arrives(0)
    story.stage("tokenize", 2, 4, a)
    story.submitted(4, a, input_tokens=5)
    story.step(10, 30, [a])
    story.step(30, 1040, [a])
    story.ends(1045, a, chunks=2)
    records = story.records()
    attribute_latency(records)
    return records[0]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_log_line_has_ids_stages_and_causes(tmp_path: Path) -> None:
    record = slow()
    RequestLog(str(tmp_path / "a.log")).log_request(record, SLO)
    (line,) = lines(tmp_path / "a.log")
    assert line["trace_id"] == record.trace_id.hex() and line["span_id"] == record.span_id.hex()
    assert (line["keep_reason"], line["missed"], line["outcome"]) == ("slo", ["e2e"], "ok")
    assert line["stages_ms"] == {"ingress": 2.0, "tokenize": 2.0, "queue": 6.0, "prefill": 20.0,
                                 "decode": 1010.0, "postprocess": 5.0}  # fmt: skip
    assert (line["duration_ms"], line["ttft_ms"], line["output_tokens"]) == (1045.0, 30.0, 2)
    assert sum(line["causes_ms"].values()) == pytest.approx(1045.0)
    assert line["top_cause"] == max(line["causes_ms"], key=line["causes_ms"].__getitem__)
    assert line["message"].startswith("ca978112  chat toy  ok  1045 ms")
    assert "error_type" not in line


@pytest.mark.parametrize("reason", semconv.KEEP_REASONS)
def test_only_listed_reasons_are_logged(tmp_path: Path, reason: str) -> None:
    RequestLog(str(tmp_path / "a.log")).log_request(slow(), Decision(True, 0, reason))
    assert len(lines(tmp_path / "a.log")) == (reason in semconv.NOTABLE_REASONS)


def test_logger_receives_fields_and_trace_context(
    caplog: pytest.LogCaptureFixture,
) -> None:
    record = slow()
    seen: list[int] = []

    def context(line: logging.LogRecord) -> bool:
        seen.append(trace.get_current_span().get_span_context().trace_id)
        return True

    logger = logging.getLogger("otel_infer.requests")
    logger.addFilter(context)
    try:
        RequestLog().log_request(record, SLO)
        assert caplog.records == []  # INFO is disabled in most programs
        with caplog.at_level(logging.INFO, "otel_infer.requests"):
            RequestLog().log_request(record, SLO)
    finally:
        logger.removeFilter(context)
    (line,) = caplog.records
    assert vars(line)["trace_id"] == record.trace_id.hex()
    assert vars(line)["top_cause"] == "decode"
    assert seen == [int.from_bytes(record.trace_id, "big")]
    assert not trace.get_current_span().get_span_context().is_valid


def test_failure_storm_is_rate_limited_and_counted(tmp_path: Path) -> None:
    record, log = slow(), RequestLog(str(tmp_path / "a.log"))
    record.outcome = events.ERROR
    for number in range(1000):
        record.ended_at = 5 * SECOND + number
        log.log_request(record, Decision(True, 0, "error"))
    assert len(lines(tmp_path / "a.log")) == BURST
    record.ended_at += SECOND
    for _ in range(MAX_PER_SECOND + 5):
        log.log_request(record, Decision(True, 0, "error"))
    logged = lines(tmp_path / "a.log")
    assert len(logged) == BURST + MAX_PER_SECOND
    assert [line["dropped_before"] for line in logged if "dropped_before" in line] == [1000 - BURST]


def test_rotated_file_is_reopened(tmp_path: Path) -> None:
    log = RequestLog(str(tmp_path / "a.log"))
    log.log_request(slow(), SLO)
    (tmp_path / "a.log").rename(tmp_path / "a.log.1")
    log.log_request(slow(), SLO)
    assert len(lines(tmp_path / "a.log.1")) == len(lines(tmp_path / "a.log")) == 1


def test_lines_can_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    RequestLog("stderr").log_request(slow(), SLO)
    captured = capsys.readouterr()
    assert json.loads(captured.err)["keep_reason"] == "slo" and captured.out == ""


def test_unwritable_or_full_file_is_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    RequestLog(str(tmp_path / "no" / "a.log")).log_request(slow(), SLO)
    assert "request log" in caplog.text and str(tmp_path) in caplog.text
    full = RequestLog("/dev/full")
    full.log_request(slow(), SLO)
    full.close()
    assert "Traceback" not in capsys.readouterr().err


def test_rotated_file_that_cannot_be_reopened_is_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    log = RequestLog(str(folder / "a.log"))
    folder.rename(tmp_path / "old")
    log.log_request(slow(), SLO)
    folder.mkdir()
    log.log_request(slow(), SLO)
    assert len(lines(folder / "a.log")) == 1
