"""A log record for each kept request: what it says, who is told, and how many there may be."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace

from otel_infer import semconv
from otel_infer.analysis.attribution import request
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.export.request_log import BURST, LOGGED_REASONS, MAX_PER_SECOND, RequestLog
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
    request.attribute_latency(records)
    return records[0]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_kept_request_is_a_line_with_its_ids_its_stages_and_where_its_time_went(tmp_path: Path) -> None:
    record = slow()
    RequestLog(str(tmp_path / "a.log")).log_request(record, SLO)
    (said,) = lines(tmp_path / "a.log")
    assert said["trace_id"] == record.trace_id.hex() and said["span_id"] == record.span_id.hex()
    assert (said["keep_reason"], said["missed"], said["outcome"]) == ("slo", ["e2e"], "ok")
    assert said["stages_ms"] == {"ingress": 2.0, "tokenize": 2.0, "queue": 6.0, "prefill": 20.0,
                                 "decode": 1010.0, "postprocess": 5.0}  # fmt: skip
    assert (said["duration_ms"], said["ttft_ms"], said["output_tokens"]) == (1045.0, 30.0, 2)
    assert sum(said["causes_ms"].values()) == pytest.approx(1045.0)
    assert said["top_cause"] == max(said["causes_ms"], key=said["causes_ms"].__getitem__)
    assert said["message"].startswith("ca978112  chat toy  ok  1045 ms")
    assert "error_type" not in said


@pytest.mark.parametrize("reason", semconv.KEEP_REASONS)
def test_only_what_is_kept_for_a_reason_of_its_own_is_told(tmp_path: Path, reason: str) -> None:
    RequestLog(str(tmp_path / "a.log")).log_request(slow(), Decision(True, 0, reason))
    assert len(lines(tmp_path / "a.log")) == (reason in LOGGED_REASONS)


def test_who_listens_to_the_logger_gets_the_same_fields_inside_the_context_of_the_request(
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
        assert caplog.records == []  # as most programs are set up: INFO is nobody's business
        with caplog.at_level(logging.INFO, "otel_infer.requests"):
            RequestLog().log_request(record, SLO)
    finally:
        logger.removeFilter(context)
    (line,) = caplog.records
    assert vars(line)["trace_id"] == record.trace_id.hex()
    assert vars(line)["top_cause"] == "decode"
    assert seen == [int.from_bytes(record.trace_id, "big")]
    assert not trace.get_current_span().get_span_context().is_valid


def test_a_storm_of_failures_is_told_by_its_number(tmp_path: Path) -> None:
    record, told = slow(), RequestLog(str(tmp_path / "a.log"))
    record.outcome = events.ERROR
    for number in range(1000):
        record.ended_at = 5 * SECOND + number
        told.log_request(record, Decision(True, 0, "error"))
    assert len(lines(tmp_path / "a.log")) == BURST
    record.ended_at += SECOND
    for _ in range(MAX_PER_SECOND + 5):
        told.log_request(record, Decision(True, 0, "error"))
    said = lines(tmp_path / "a.log")
    assert len(said) == BURST + MAX_PER_SECOND
    assert [line["dropped_before"] for line in said if "dropped_before" in line] == [1000 - BURST]


def test_a_file_that_is_rotated_away_is_made_again(tmp_path: Path) -> None:
    told = RequestLog(str(tmp_path / "a.log"))
    told.log_request(slow(), SLO)
    (tmp_path / "a.log").rename(tmp_path / "a.log.1")
    told.log_request(slow(), SLO)
    assert len(lines(tmp_path / "a.log.1")) == len(lines(tmp_path / "a.log")) == 1


def test_lines_may_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    RequestLog("stderr").log_request(slow(), SLO)
    said = capsys.readouterr()
    assert json.loads(said.err)["keep_reason"] == "slo" and said.out == ""


def test_a_file_that_cannot_be_had_or_is_full_costs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    RequestLog(str(tmp_path / "no" / "a.log")).log_request(slow(), SLO)
    assert "there is no log of requests" in caplog.text
    full = RequestLog("/dev/full")
    full.log_request(slow(), SLO)
    full.close()
    assert "Traceback" not in capsys.readouterr().err


def test_a_file_that_is_rotated_away_and_cannot_be_made_again_costs_no_request(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    told = RequestLog(str(folder / "a.log"))
    folder.rename(tmp_path / "old")
    told.log_request(slow(), SLO)
    folder.mkdir()
    told.log_request(slow(), SLO)
    assert len(lines(folder / "a.log")) == 1
