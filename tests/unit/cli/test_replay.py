"""`otel-infer replay` prints or exports the recorded requests."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_infer.assembly.assembler import Assembler
from otel_infer.cli import main, replay
from otel_infer.export.spans import batch_sender, exporter
from otel_infer.ringbuffer import events
from otel_infer.sidecar.recording import file
from tests.support.otlp_receiver import OtlpReceiver, status
from tests.support.starts import server
from tests.support.story import Story, ids, render_spans, text


def served(requests: int = 1) -> Story:
    story = Story()
    for number in range(requests):
        at = number * 1000
        a = story.arrives(at, f"a{number}")
        story.stage("tokenize", at + 2, at + 4, a)
        story.submitted(at + 4, a, input_tokens=5)
        for begin in range(at + 10, at + 50, 10):
            story.step(begin, begin + 10, [a])
        story.stage("rerank", at + 50, at + 51, a)
        story.stage("rerank", at + 52, at + 54, a)
        story.ends(at + 60, a, chunks=4)
    return story


def recorded(story: Story, path: Path) -> Path:
    """Writes a tape in batches, as the pipeline does."""
    writer, recorded_events = file.RecordingWriter(path), story.in_order()
    for begin in range(0, len(recorded_events), 5):
        batch = recorded_events[begin : begin + 5]
        writer.write(batch, batch[-1].event.at)
    writer.close()
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return recorded(served(), tmp_path / "a.tape")


def test_request_is_printed_as_one_line(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(path)]) == 0
    assert capsys.readouterr().out == (
        f"{ids('a0')[0].hex()[:8]}  chat toy  ok  60 ms  first token 20 ms  5 → 4 tokens  50 % decode  [ingress 2.0 ms · tokenize 2.0 ms · "
        "queue 6.0 ms · prefill 10 ms · decode 30 ms · rerank 1.0 ms · postprocess 10 ms · rerank 2.0 ms]\n"
    )


def test_json_request_has_lengths_in_ms(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--json", str(path)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {
        "trace_id": ids("a0")[0].hex(),
        "operation": "chat",
        "model": "toy",
        "duration_ms": 60.0,
        "ttft_ms": 20.0,
        "error_type": None,
        "failed_stage": None,
        "input_tokens": 5,
        "output_tokens": 4,
        "stages": {
            "ingress": 2.0,
            "tokenize": 2.0,
            "queue": 6.0,
            "prefill": 10.0,
            "decode": 30.0,
            "rerank": 3.0,
            "postprocess": 10.0,
        },
        "causes_ms": {
            "scheduler_queue": 6.0,
            "prefill": 10.0,
            "decode": 30.0,
            "application": 3.0,
            "tokenize": 2.0,
            "ingress": 2.0,
            "egress": 7.0,
        },
        "code": [],
        "decode_steps": 3,
        "infer.telemetry.lost": False,
    }


def test_process_start_is_printed_before_the_first_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """JSON has requests only."""
    story = server()
    story.ends(9600, story.arrives(9500))
    path = recorded(story, tmp_path / "a.tape")
    assert main(["replay", str(path)]) == 0
    start, request = capsys.readouterr().out.splitlines()
    assert "server start" in start and "9000 ms" in start
    assert "chat toy" in request
    assert main(["replay", "--json", str(path)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["operation"] == "chat"


def test_finished_requests_come_in_order_of_their_end(tmp_path: Path) -> None:
    """Requests in flight are not read."""
    story = Story()
    a, b = story.arrives(0), story.arrives(1, "b")
    story.arrives(2, "c")
    story.ends(20, b)
    story.aborts(30, a)
    found = list(replay.read_records(recorded(story, tmp_path / "a.tape")))
    assert [record.span_id for record in found] == [record.span_id for record in story.records()]
    assert [record.outcome for record in found] == [events.OK, events.ABORTED]


def test_steps_are_discarded_unless_requested(path: Path) -> None:
    """Discarding them bounds the memory for a long tape."""
    lean, complete = Assembler(), Assembler()
    assert len(list(replay.read_records(path, lean))) == len(
        list(replay.read_records(path, complete, keeps_steps=True))
    )
    assert (len(lean.drain_steps()), len(complete.drain_steps())) == (0, 4)


@pytest.mark.parametrize("command", ["replay", "explain"])
def test_closed_pipe_exits_with_141_without_an_error(tmp_path: Path, command: str) -> None:
    long_tape = recorded(served(requests=400), tmp_path / "many.tape")
    arguments = [sys.executable, "-m", "otel_infer", command, str(long_tape), "--json"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == (b"", 141)


def test_truncated_tape_yields_its_readable_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recorded(served(300), tmp_path / "a.tape")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert main(["replay", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert 50 < len(lines) < 300
    assert all("decode 30 ms" in line for line in lines)


@pytest.mark.parametrize("options", [[], ["--json"], ["--send"]])
def test_invalid_tape_is_a_one_line_error(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    for content in (b"hello", gzip.compress(b"{}")):
        (tmp_path / "x").write_bytes(content)
        assert main(["replay", *options, str(tmp_path / "x")]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert str(tmp_path / "x") in err


# ── exported spans ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        for name, value in receiver.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
        monkeypatch.setenv("OTEL_INFER_STEPS", "all")
        yield receiver


def test_exported_spans_equal_the_recorded_spans(
    path: Path, receiver: OtlpReceiver, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", "--send", str(path)]) == 0
    assert capsys.readouterr().out == "1 requests, 13 spans accepted, 0 refused\n"
    assert {span["span_id"] for span in receiver.spans} == {span["span_id"] for span in served().spans()}
    assert render_spans(receiver.spans) == text("""
        POST /v1/chat/completions 0–60
          chat toy 0–60 · 5 → 4
            ingress 0–2
            tokenize 2–4
            queue 4–10
            prefill 10–20
            decode 20–50
              decode step 20–30 · step 2, batch 1
              decode step 30–40 · step 3, batch 1
              decode step 40–50 · step 4, batch 1
            rerank 50–51
            postprocess 50–60
            rerank 52–54
    """)
    assert {span["resource"]["service.name"] for span in receiver.spans} == {"toy"}


def test_slow_destination_receives_the_whole_tape(
    tmp_path: Path,
    receiver: OtlpReceiver,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(exporter, "BATCH_BYTES", 10_000)
    monkeypatch.setattr(batch_sender, "QUEUE_BYTES", 15_000)
    monkeypatch.setattr(exporter, "STEPS_PER_CALL", 20)
    path = recorded(served(100), tmp_path / "a.tape")
    assert main(["replay", "--send", str(path)]) == 0
    assert "1300 spans accepted" in capsys.readouterr().out


def test_refused_spans_are_an_error_with_a_reason(
    path: Path, receiver: OtlpReceiver, capsys: pytest.CaptureFixture[str]
) -> None:
    receiver.answer(status(401))
    assert main(["replay", "--send", str(path)]) == 1
    out, err = capsys.readouterr()
    assert "13 refused" in out
    assert "HTTP 401" in err


def test_disabled_trace_exporter_is_an_error(
    path: Path, receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert main(["replay", "--send", str(path)]) == 2
    assert "OTEL_TRACES_EXPORTER" in capsys.readouterr().err


def test_exported_tape_is_not_overwritten(
    path: Path, receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = path.read_bytes()
    monkeypatch.setenv("OTEL_INFER_TAPE", str(path))
    assert main(["replay", "--send", str(path)]) == 0
    assert path.read_bytes() == before


def test_aborted_request_becomes_json_compatible_data() -> None:
    story = Story()
    story.aborts(20, story.arrives(0))
    data: dict[str, Any] = replay.record_to_dict(story.record())
    assert json.loads(json.dumps(data)) == data
    assert (data["error_type"], data["failed_stage"], data["ttft_ms"], data["decode_steps"]) == (
        "client_disconnect",
        "ingress",
        None,
        0,
    )
