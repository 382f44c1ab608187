"""`otel-infer explain`: from a tape to the complaint."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from otel_infer import semconv
from otel_infer.cli import main
from otel_infer.ringbuffer import events
from otel_infer.sidecar.recording import file
from tests.support.served_load import Asked, Served
from tests.unit.analysis.diagnosis.test_rules import before_the_engine, healthy


def recorded(path: Path, served: Served, asked: list[Asked]) -> Path:
    writer = file.RecordingWriter(path)
    said = served.facts(asked)
    writer.write(said, said[-1].event.at)
    writer.close()
    return path


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    return recorded(tmp_path / "slow.tape", *before_the_engine(random.Random(2)))


@pytest.fixture
def fine(tmp_path: Path) -> Path:
    return recorded(tmp_path / "fine.tape", *healthy(random.Random(2)))


def test_a_tape_is_explained_with_its_evidence_and_what_to_change(
    slow: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(slow), "--worst", "2"]) == 0
    said = capsys.readouterr().out
    assert "“slow even for tiny prompts”: time goes before inference starts" in said
    assert "change first: look at what runs before the engine" in said
    assert "the slowest 2" in said
    assert "  ingress " in said


def test_a_server_that_is_fine_is_told_so(fine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(fine)]) == 0
    assert "healthy: the slow requests did their own work" in capsys.readouterr().out


def test_the_same_as_json(slow: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(slow), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["verdict"], said["requests"], len(said["worst"])) == ("pre_engine", 60, 5)
    assert said["findings"][0]["cause"] == "ingress"
    worst = said["worst"][0]
    assert sum(worst["causes_ms"].values()) == pytest.approx(worst["duration_ms"])


def test_one_request_is_found_by_the_beginning_of_its_trace_id(
    slow: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace_id = (7).to_bytes(16, "big").hex()
    assert main(["explain", str(slow), "--request", trace_id]) == 0
    said = capsys.readouterr().out
    assert f"trace {trace_id}" in said and "until it is handed to the engine" in said
    assert main(["explain", str(slow), "--request", trace_id, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trace_id"] == trace_id


def test_of_several_calls_of_a_trace_one_is_chosen_by_its_span(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served, asked = healthy(random.Random(1))
    said = [
        one._replace(event=one.event._replace(trace_id=b"t" * 16))
        if isinstance(one.event, events.RequestArrived)
        else one
        for one in served.facts(asked[:3])
    ]
    writer = file.RecordingWriter(tmp_path / "a.tape")
    writer.write(said, said[-1].event.at)
    writer.close()
    spans = [one.event.span_id.hex() for one in said if isinstance(one.event, events.RequestArrived)]
    assert main(["explain", str(tmp_path / "a.tape"), "--request", (b"t" * 16).hex()]) == 2
    told = capsys.readouterr().err
    assert all(f"span {span}" in told for span in spans)
    assert main(["explain", str(tmp_path / "a.tape"), "--request", spans[1].upper(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trace_id"] == (b"t" * 16).hex()


def test_requests_that_ended_before_the_time_of_a_tape_are_counted_nowhere_and_can_be_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = healthy(random.Random(1))[0].facts(healthy(random.Random(1))[1])
    ends = sorted(one.event.at for one in said if isinstance(one.event, events.RequestEnded))
    writer = file.RecordingWriter(tmp_path / "a.tape", began_at=ends[9])
    writer.write(said, said[-1].event.at)
    writer.close()
    assert main(["explain", str(tmp_path / "a.tape"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == len(ends) - 10
    (first,) = [one for one in said if one.event.at == ends[0] and isinstance(one.event, events.RequestEnded)]
    (trace,) = [
        one.event.trace_id.hex()
        for one in said
        if isinstance(one.event, events.RequestArrived) and one[:2] == first[:2]
    ]
    assert main(["explain", str(tmp_path / "a.tape"), "--request", trace]) == 0


def test_a_tape_whose_end_is_missing_is_explained_and_that_is_said(
    slow: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slow.write_bytes(slow.read_bytes()[:-20])
    assert main(["explain", str(slow)]) == 0
    assert f"{slow}: its end is missing" in caplog.text


@pytest.mark.parametrize(
    ("wanted", "said"), [("f" * 32, "none of its 60 requests"), ("0", "several requests")]
)
def test_one_that_is_not_there_or_not_one_is_an_error_that_says_so(
    slow: Path, wanted: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(slow), "--request", wanted]) == 2
    assert said in capsys.readouterr().err


def test_what_is_no_tape_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_text("not a tape")
    assert main(["explain", str(tmp_path / "x")]) == 2
    assert main(["explain", str(tmp_path / "gone")]) == 2
    assert "otel-infer explain: " in capsys.readouterr().err


def test_two_tapes_are_compared_stage_by_stage(
    slow: Path, fine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(fine), "--against", str(slow), "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["ingress"]["verdict"] == rows["time to first token"]["verdict"] == "better"
    assert rows["decode"]["verdict"] == "no difference seen"
    assert rows["ingress"]["high"] < 0
    assert main(["explain", str(fine), "--against", str(slow)]) == 0
    assert "better" in capsys.readouterr().out


def test_what_is_not_bounded_is_null_in_json(
    slow: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served, asked = healthy(random.Random(1))
    few = recorded(tmp_path / "few.tape", served, asked[:3])
    assert main(["explain", str(few), "--against", str(slow), "--json"]) == 0
    said = capsys.readouterr().out
    assert "Infinity" not in said
    assert {(row["low"], row["high"]) for row in json.loads(said)} == {(None, None)}


def test_a_tape_without_requests_is_no_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served, asked = healthy(random.Random(1))
    path = recorded(tmp_path / "few.tape", served, asked[:3])
    assert main(["explain", str(path)]) == 0
    assert "insufficient: 3 requests; at least 12 are needed" in capsys.readouterr().out


def test_where_tenants_are_told_those_with_the_most_requests_have_a_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served, asked = before_the_engine(random.Random(2))
    said = served.facts(asked)
    names = ["[acme]", "b", "c", "d", "e", "f", "[acme]"]
    arrived = [one for one in said if isinstance(one.event, events.RequestArrived)]
    told = [
        events.RecordedEvent(
            one.ring, one.handle, events.AttributeSet(one.event.at, semconv.TENANT, names[i % 7])
        )
        for i, one in enumerate(arrived)
    ]
    writer = file.RecordingWriter(tmp_path / "a.tape")
    writer.write(sorted([*said, *told], key=lambda one: one.event.at), said[-1].event.at)
    writer.close()
    assert main(["explain", str(tmp_path / "a.tape")]) == 0
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("tenant ")]
    assert len(lines) == 5
    assert re.match(r"tenant \[acme\]: 17 requests, p95 to first token \d+ ms, end to end \d+ ms; ", lines[0])
    assert "of the time is " in out
    assert main(["explain", str(tmp_path / "a.tape"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["tenants"]
    assert [row["tenant"] for row in rows] == ["[acme]", "b", "c", "d", "e"]
    assert 0 < rows[0]["top_cause_share"] <= 1


def test_without_tenants_explain_says_nothing_of_them(slow: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(slow)]) == 0
    assert "tenant" not in capsys.readouterr().out


def test_where_a_device_was_timed_what_held_it_back_is_said_with_what_makes_it_quicker(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of the demo on an H100: a tiny model, whose kernels are done before the next one is launched."""
    (path,) = (Path(__file__).parents[3] / "tapes").glob("demo-nvidia-*.tape")
    assert main(["explain", str(path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"the device, in decode: launch-bound in (\d+) of \d+: launching its kernels takes as long", said
    )
    assert "makes it quicker: CUDA graphs or torch.compile" in said
    assert main(["explain", str(path), "--json"]) == 0
    decode, prefill = json.loads(capsys.readouterr().out)["devices"]
    assert (prefill["stage"], decode["stage"], decode["bottleneck"]) == ("prefill", "decode", "launch-bound")
    assert 0 < decode["requests"] <= decode["timed"]


def test_without_a_device_explain_says_nothing_of_one(slow: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(slow)]) == 0
    assert "the device" not in capsys.readouterr().out
