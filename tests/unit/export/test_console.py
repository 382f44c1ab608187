"""The console output: one line for each request."""

from __future__ import annotations

import contextlib
import io
import os

import pytest

from otel_infer.export.console import NO_STAGES, Console, format_duration, format_request, format_start
from otel_infer.ringbuffer import events
from tests.support.starts import Starting, server
from tests.support.story import Story


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0.0 ms"),
        (49_000, "0.0 ms"),
        (400_000, "0.4 ms"),
        (9_940_000, "9.9 ms"),
        (9_960_000, "10 ms"),
        (12_300_000, "12 ms"),
        (9_999_400_000, "9999 ms"),
        (9_999_600_000, "10.0 s"),
        (12_340_000_000, "12.3 s"),
    ],
)
def test_duration_has_only_significant_digits(ns: int, text: str) -> None:
    assert format_duration(ns) == text


def lines(story: Story) -> str:
    out = io.StringIO()
    console = Console(out)
    for record in story.records():
        console.on_request(record)
    return out.getvalue()


def test_request_line_has_its_stages() -> None:
    story = Story()
    a = story.arrives(0)
    story.stage("tokenize", 2, 4, a)
    story.submitted(4, a, input_tokens=5)
    story.step(10, 30, [a])
    story.step(30, 1040, [a])
    story.ends(1045, a, chunks=2)
    assert lines(story) == (
        "ca978112  chat toy  ok  1045 ms  first token 30 ms  5 → 2 tokens  "
        "[ingress 2.0 ms · tokenize 2.0 ms · queue 6.0 ms · prefill 20 ms · decode 1010 ms · postprocess 5.0 ms]\n"
    )


@pytest.mark.parametrize(
    ("http", "outcome", "error", "expected"),
    [
        (True, events.ABORTED, "client_disconnect", "aborted (client_disconnect in queue)"),
        (True, events.ABORTED, "", "aborted (in queue)"),
        (True, events.ERROR, "ValueError", "error (ValueError in queue)"),
        (False, events.ERROR, "ValueError", "error (ValueError)"),
    ],
)
def test_failed_request_line_has_error_and_stage(http: bool, outcome: int, error: str, expected: str) -> None:
    story = Story()
    a = story.arrives(0, http=http)
    if http:
        story.submitted(2, a)
    story.ends(9, a, outcome, error)
    assert f"chat toy  {expected}  9.0 ms  [" in format_request(story.record())


def test_http_request_without_stages_has_a_line() -> None:
    story = Story()
    story.ends(3, story.arrives(0, operation=""))
    assert lines(story) == f"ca978112  POST /health  ok  3.0 ms  [{NO_STAGES}]\n"


def test_start_line_has_its_phases() -> None:
    (record,) = server().starts()
    out = io.StringIO()
    Console(out).on_start(record)
    assert out.getvalue() == (
        f"{record.trace_id.hex()[:8]}  server start  ready by lifespan  9000 ms  "
        "[imports 3000 ms · weights 3500 ms · ready 1800 ms · compile 1000 ms · capture 500 ms]\n"
    )


def test_failed_start_line_has_error_and_phase() -> None:
    story = Starting()
    story.begins(100, events.WEIGHTS)
    story.died(900)
    assert "server start  error (process_died in weights)  900 ms  []" in format_start(*story.starts())


def test_closed_terminal_is_ignored() -> None:
    story = Story()
    story.ends(3, story.arrives(0))
    out = io.StringIO()
    out.close()
    Console(out).on_request(story.record())


def test_full_pipe_does_not_block() -> None:
    story = Story()
    a = story.arrives(0)
    story.step(2, 10, [a], {a: 4})
    story.ends(12, a)
    record = story.record(a)
    reader, writer = os.pipe()
    try:
        with open(writer, "w") as out:
            console = Console(out)
            console.on_request(record)
            os.set_blocking(writer, False)
            with contextlib.suppress(BlockingIOError):
                while os.write(writer, b"x" * 4096):
                    pass
            os.set_blocking(writer, True)
            console.on_request(record)
            assert os.read(reader, 4096).endswith(b"x")
            while len(os.read(reader, 1 << 16)) == 1 << 16:
                pass
            console.on_request(record)
            assert os.read(reader, 4096).startswith(record.trace_id.hex()[:8].encode())
    finally:
        os.close(reader)
