"""`otel-infer explain` states which server, period and requests it explains."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from time import tzset
from typing import Any

import pytest

from otel_infer.assembly.records.request import RequestRecord
from otel_infer.cli import main
from otel_infer.cli.explain.source import describe_source
from otel_infer.ringbuffer import directory, events
from tests.unit.analysis.diagnosis.test_rules import healthy
from tests.unit.cli.explain.test_explain import recorded

S = 1_000_000_000
NOON = 1_767_268_800 * S
"""2026-01-01 12:00:00 UTC."""


@pytest.fixture(autouse=True)
def time_zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two hours east of UTC."""
    with monkeypatch.context() as context:
        context.setenv("TZ", "EET-2")
        tzset()
        yield
    tzset()


def request(arrived_s: float, ended_s: float, **more: Any) -> RequestRecord:
    names = ("name", "provider", "model")
    ids = dict.fromkeys(("trace_id", "span_id", "parent_span_id", "server_span_id"), b"")
    known = {**ids, **dict.fromkeys(names, ""), "operation": "chat", "engine": "toy", **more}
    return RequestRecord(
        **known,
        sampled=True,
        remote_parent=False,
        arrived_at=round(arrived_s * S),
        ended_at=round(ended_s * S),
        wall_offset=NOON,
    )


FINISHED = [
    request(10, 12),
    request(11, 128.25),
    request(12, 13, outcome=events.ABORTED),
    request(12, 13, outcome=events.ERROR, error_type="TimeoutError"),
    request(12, 13, generative=False),
    request(5, 6, operation="", engine=""),
    request(6, 7, operation="", engine="", outcome=events.ERROR),
]


def test_tape_has_file_name_period_and_counts() -> None:
    source = describe_source(FINISHED, 0, tape=Path("/tapes/slow.tape"))
    assert source.to_sentence() == (
        "slow.tape: 2026-01-01 14:00:05 to 14:02:08 (123 s), 3 requests; "
        "left out: 2 reached no engine, 1 failed (TimeoutError 1), 1 generated nothing"
    )
    assert source.to_dict() == {
        "tape": "slow.tape",
        "service": None,
        "pids": [],
        "engines": ["toy"],
        "begin": "2026-01-01T14:00:05+02:00",
        "end": "2026-01-01T14:02:08+02:00",
        "seconds": 123.25,
        "requests": 3,
        "no_engine": 2,
        "failed": 1,
        "not_generating": 1,
        "errors": {"TimeoutError": 1},
    }


def test_errors_are_counted_by_type_the_most_frequent_first() -> None:
    types = ("503", "CancelledError", "CancelledError", "", "ValueError", "CancelledError", "503")
    failed = [request(10, 11, outcome=events.ERROR, error_type=error_type) for error_type in types]
    source = describe_source(failed, 0, tape=Path("a"))
    assert source.to_sentence().endswith("left out: 7 failed (CancelledError 3, 503 2, _OTHER 1, …)")
    assert source.to_dict()["errors"] == {"CancelledError": 3, "503": 2, "_OTHER": 1, "ValueError": 1}


def test_a_period_begins_when_the_tape_is_complete() -> None:
    source = describe_source(FINISHED[:1], 11 * S, tape=Path("a")).to_dict()
    assert (source["begin"], source["seconds"]) == ("2026-01-01T14:00:11+02:00", 1.0)


def test_a_period_over_midnight_has_both_dates() -> None:
    source = describe_source([request(0, 36_000)], 0, tape=Path("a"))
    assert "2026-01-01 14:00:00 to 2026-01-02 00:00:00" in source.to_sentence()


def test_a_running_server_has_its_service_name_and_pids(tmp_path: Path) -> None:
    for name in ("4711-a.requests", "90-b.requests", "x.steps"):
        (tmp_path / name).touch()
    (tmp_path / directory.SERVICE_FILE).write_text("vllm")
    source = describe_source(FINISHED, 0, folder=tmp_path)
    assert source.to_sentence().startswith("vllm (pids 90, 4711)")
    assert (source.to_dict()["service"], source.to_dict()["pids"]) == ("vllm", [90, 4711])


def test_server_without_service_name_has_pid_and_engine(tmp_path: Path) -> None:
    (tmp_path / "4711-a.requests").touch()
    assert describe_source(FINISHED, 0, folder=tmp_path).to_sentence().startswith("pid 4711 (toy): ")


def test_without_finished_requests_there_is_no_period(tmp_path: Path) -> None:
    source = describe_source([], 7 * S, tape=Path("a.tape"))
    assert "no period" in source.to_sentence()
    assert source.to_dict().items() >= {"begin": None, "end": None, "seconds": 0}.items()


def test_a_clock_out_of_range_is_an_unknown_period() -> None:
    far = request(0, 1)
    far.wall_offset = 1 << 90
    assert "unknown period" in describe_source([far], 0, tape=Path("a")).to_sentence()


def test_explain_prints_its_source_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recorded(tmp_path / "a.tape", *healthy(random.Random(2)))
    assert main(["explain", str(path)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("a.tape: 1970-01-01 ") and "60 requests" in first
    assert main(["explain", str(path), "--json"]) == 0
    source = json.loads(capsys.readouterr().out)["source"]
    assert (source["tape"], source["requests"], source["no_engine"], source["failed"]) == ("a.tape", 60, 0, 0)
    length = datetime.fromisoformat(source["end"]) - datetime.fromisoformat(source["begin"])
    assert abs(length.total_seconds() - source["seconds"]) <= 1
