"""`otel-infer explain` diagnoses the slow requests of a tape."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_infer import semconv
from otel_infer.cli import main
from otel_infer.cli.replay import read_records
from otel_infer.ringbuffer import events
from otel_infer.sidecar.recording import file
from tests.support.served_load import ClientRequest, SimulatedServer
from tests.support.story import Story
from tests.unit.analysis.diagnosis.test_rules import before_the_engine, healthy


def write_tape(path: Path, recorded_events: list[events.RecordedEvent], **options: int) -> Path:
    writer = file.RecordingWriter(path, **options)
    writer.write(recorded_events, recorded_events[-1].event.at)
    writer.close()
    return path


def recorded(path: Path, server: SimulatedServer, load: list[ClientRequest]) -> Path:
    return write_tape(path, server.simulate(load))


def iter_kind(recorded_events: list[events.RecordedEvent], kind: type[Any]) -> Iterator[events.RecordedEvent]:
    return (entry for entry in recorded_events if isinstance(entry.event, kind))


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    return recorded(tmp_path / "slow.tape", *before_the_engine(random.Random(2)))


@pytest.fixture
def fine(tmp_path: Path) -> Path:
    return recorded(tmp_path / "fine.tape", *healthy(random.Random(2)))


def test_tape_is_explained_with_evidence_and_first_change(
    slow: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(slow), "--worst", "2"]) == 0
    out = capsys.readouterr().out
    assert "“slow even for tiny prompts”: time is spent before inference starts" in out
    assert "change first: " in out
    assert "the slowest 2" in out
    assert "  ingress " in out
    assert "tenant" not in out and "the device" not in out, "neither was recorded"


@pytest.mark.parametrize(("requests", "verdict"), [(60, "healthy"), (3, "insufficient")])
def test_verdict_without_findings_is_printed(
    requests: int, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, load = healthy(random.Random(1))
    path = recorded(tmp_path / "a.tape", server, load[:requests])
    assert main(["explain", str(path)]) == 0
    assert f"\n{verdict}: " in capsys.readouterr().out


def test_json_has_verdict_findings_and_slowest_requests(
    slow: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(slow), "--json"]) == 0
    explanation = json.loads(capsys.readouterr().out)
    assert (explanation["verdict"], explanation["requests"], len(explanation["worst"])) == (
        "pre_engine",
        60,
        5,
    )
    assert explanation["findings"][0]["cause"] == "ingress"
    worst = explanation["worst"][0]
    assert sum(worst["causes_ms"].values()) == pytest.approx(worst["duration_ms"])


def test_request_is_found_by_its_trace_id(slow: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace_id = (7).to_bytes(16, "big").hex()
    assert main(["explain", str(slow), "--request", trace_id]) == 0
    out = capsys.readouterr().out
    assert trace_id in out and semconv.describe_cause("ingress") in out
    assert main(["explain", str(slow), "--request", trace_id, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trace_id"] == trace_id


def test_span_id_selects_a_request_of_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server, load = healthy(random.Random(1))
    recorded_events = [
        entry._replace(event=entry.event._replace(trace_id=b"t" * 16))
        if isinstance(entry.event, events.RequestArrived)
        else entry
        for entry in server.simulate(load[:3])
    ]
    write_tape(tmp_path / "a.tape", recorded_events)
    spans = [entry.event.span_id.hex() for entry in iter_kind(recorded_events, events.RequestArrived)]
    assert main(["explain", str(tmp_path / "a.tape"), "--request", (b"t" * 16).hex()]) == 2
    error = capsys.readouterr().err
    assert all(f"span {span}" in error for span in spans)
    assert main(["explain", str(tmp_path / "a.tape"), "--request", spans[1].upper(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trace_id"] == (b"t" * 16).hex()


def test_requests_before_the_tape_period_are_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a request can still be explained by its id."""
    server, load = healthy(random.Random(1))
    recorded_events = server.simulate(load)
    ends = sorted(iter_kind(recorded_events, events.RequestEnded), key=lambda entry: entry.event.at)
    path = write_tape(tmp_path / "a.tape", recorded_events, began_at=ends[9].event.at)
    assert main(["explain", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == len(ends) - 10
    (trace,) = [
        entry.event.trace_id.hex()
        for entry in iter_kind(recorded_events, events.RequestArrived)
        if entry[:2] == ends[0][:2]
    ]
    assert main(["explain", str(path), "--request", trace]) == 0


def test_truncated_tape_is_explained_with_a_warning(slow: Path, caplog: pytest.LogCaptureFixture) -> None:
    slow.write_bytes(slow.read_bytes()[:-20])
    assert main(["explain", str(slow)]) == 0
    assert str(slow) in caplog.text and "missing" in caplog.text


@pytest.mark.parametrize(
    ("request_id", "message"),
    [("f" * 32, "no finished request of 60"), ("0", "several")],
    ids=["unknown", "ambiguous"],
)
def test_unknown_or_ambiguous_request_is_an_error(
    slow: Path, request_id: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(slow), "--request", request_id]) == 2
    assert message in capsys.readouterr().err


def test_invalid_tape_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_text("not a tape")
    assert main(["explain", str(tmp_path / "x")]) == 2
    assert main(["explain", str(tmp_path / "gone")]) == 2
    assert "otel-infer explain: " in capsys.readouterr().err


def test_two_tapes_are_compared_by_stage(slow: Path, fine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(fine), "--against", str(slow), "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["ingress"]["verdict"] == rows["time to first token"]["verdict"] == "better"
    assert rows["decode"]["verdict"] == "no difference seen"
    assert rows["ingress"]["high"] < 0
    assert main(["explain", str(fine), "--against", str(slow)]) == 0
    assert "better" in capsys.readouterr().out


def test_infinite_bounds_are_null_in_json(
    slow: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, load = healthy(random.Random(1))
    few = recorded(tmp_path / "few.tape", server, load[:3])
    assert main(["explain", str(few), "--against", str(slow), "--json"]) == 0
    out = capsys.readouterr().out
    assert "Infinity" not in out
    assert {(row["low"], row["high"]) for row in json.loads(out)} == {(None, None)}


def test_tenants_with_most_requests_have_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server, load = before_the_engine(random.Random(2))
    recorded_events = server.simulate(load)
    names = ["[acme]", "b", "c", "d", "e", "f", "[acme]"]
    attributes = [
        events.RecordedEvent(
            entry.ring, entry.handle, events.AttributeSet(entry.event.at, semconv.TENANT, names[i % 7])
        )
        for i, entry in enumerate(iter_kind(recorded_events, events.RequestArrived))
    ]
    write_tape(tmp_path / "a.tape", sorted([*recorded_events, *attributes], key=lambda entry: entry.event.at))
    assert main(["explain", str(tmp_path / "a.tape")]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tenant ")]
    assert len(lines) == 5
    assert re.match(r"tenant \[acme\]: 17 requests, .*\d+ ms.*\d+ ms; \d+%", lines[0])
    assert main(["explain", str(tmp_path / "a.tape"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["tenants"]
    assert [row["tenant"] for row in rows] == ["[acme]", "b", "c", "d", "e"]
    assert 0 < rows[0]["top_cause_share"] <= 1


def test_device_bottleneck_is_printed_with_a_remedy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The demo on an H100 has a tiny model, whose kernels end before the next kernel is launched."""
    (path,) = (Path(__file__).parents[3] / "tapes").glob("demo-nvidia-*.tape")
    assert main(["explain", str(path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(r"in decode: launch-or-sync in \d+ of \d+", out)
    assert 'makes it faster: see which: torch.cuda.set_sync_debug_mode("warn")' in out
    assert main(["explain", str(path), "--json"]) == 0
    decode, prefill = json.loads(capsys.readouterr().out)["devices"]
    assert (prefill["stage"], decode["stage"], decode["bottleneck"]) == (
        "prefill",
        "decode",
        "launch-or-sync",
    )
    assert 0 < decode["requests"] <= decode["timed"]


def test_a_server_whose_model_is_not_seen_shows_its_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A gateway, for example."""
    story = Story()
    for number in range(20):
        story.ends(100 * number + 50, story.arrives(100 * number, "POST", operation=""))
    path = write_tape(tmp_path / "gateway.tape", story.in_order())
    assert main(["explain", str(path)]) == 0
    out = capsys.readouterr().out
    assert "insufficient: 20 HTTP requests (p50 50 ms, p95 50 ms) contain no call of a model" in out
    assert "end to end      20" in out and "the slowest 5" in out and "where the time" not in out
    shown = re.findall(r"^  ([0-9a-f]{8})  50 ms", out, re.MULTILINE)
    assert len(shown) == 5


def test_a_request_without_a_model_can_be_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = Story()
    story.ends(50, story.arrives(0, "POST", operation=""))
    path = write_tape(tmp_path / "one.tape", story.in_order())
    (record,) = read_records(path)
    assert main(["explain", str(path), "--request", record.trace_id.hex()]) == 0
    assert "POST" in capsys.readouterr().out


def test_a_recording_without_requests_has_no_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = Story()
    story.arrives(0, "a")
    assert main(["explain", str(write_tape(tmp_path / "empty.tape", story.in_order()))]) == 0
    out = capsys.readouterr().out
    assert "insufficient: 0 requests" in out
    assert "the slowest" not in out and "client-side latency" not in out and "where the time" not in out
