"""Records are formatted as tables and waterfalls for the terminal."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from otel_infer.assembly.engine.step_rows import RequestSteps
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.cli import terminal
from otel_infer.ringbuffer import events
from tests.support.story import BASE, MS, Story, text


def rendered(*parts: Any) -> str:
    """Returns the text as it is printed to a pipe."""
    out = io.StringIO()
    Console(file=out, width=110, no_color=True, highlight=False).print(*parts, sep="\n")
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def served() -> Story:
    """Returns three requests. One fails, and the last prompt runs during the decode of the first request."""
    story = Story()
    a = story.arrives(0)
    story.stage("tokenize", 2, 4, a)
    story.submitted(4, a, input_tokens=5)
    story.step(10, 30, [a], {a: 5})
    for at in range(30, 60, 5):
        story.step(at, at + 5, [a])
    c = story.arrives(50, "c")
    story.submitted(51, c, input_tokens=900)
    story.step(60, 100, [a, c], {c: 900})
    story.step(100, 106, [a, c])
    story.ends(110, a, chunks=8)
    story.ends(120, c, chunks=2)
    story.ends(20, story.arrives(15, "b"), events.ERROR, "ValueError")
    return story


def test_stages_table_has_percentiles_and_time_share() -> None:
    assert rendered(terminal.make_stages_table(served().records())) == text("""
        where the time went
        stage        requests     p50     p95     p99     max  share of all time
        ingress             3  2.0 ms  4.7 ms  4.9 ms  5.0 ms              4.3 %
        tokenize            1  2.0 ms  2.0 ms  2.0 ms  2.0 ms              1.1 %
        queue               2  7.5 ms  8.8 ms  9.0 ms  9.0 ms              8.1 %
        prefill             2   30 ms   39 ms   40 ms   40 ms             32.4 %
        decode              2   41 ms   72 ms   75 ms   76 ms             44.3 %
        postprocess         2  9.0 ms   14 ms   14 ms   14 ms              9.7 %
    """)


def test_custom_stages_follow_the_built_in_stages() -> None:
    story = Story()
    a = story.arrives(0, http=False)
    for name in ("rerank", "guard", "tokenize"):
        story.stage(name, 1, 2, a)
    story.ends(10, a)
    rows = rendered(terminal.make_stages_table(story.records())).splitlines()[2:]
    assert [row.split()[0] for row in rows] == ["tokenize", "guard", "rerank"]


def test_latency_table_covers_successful_requests_only() -> None:
    assert rendered(terminal.make_latency_table(served().records())) == text("""
        client-side latency
        latency              values     p50     p95     p99     max
        time to first token       2   40 ms   49 ms   50 ms   50 ms
        between tokens            9  5.0 ms   26 ms   37 ms   40 ms
        end to end                2   90 ms  108 ms  110 ms  110 ms
    """)


def test_tables_without_requests_have_no_rows() -> None:
    lines = rendered(terminal.make_stages_table([]), terminal.make_latency_table([])).splitlines()
    assert [line.split()[0] for line in lines] == ["where", "stage", "client-side", "latency"]


def test_lost_steps_are_no_gap_between_tokens() -> None:
    story = Story()
    a = story.arrives(0)
    story.step(10, 20, [a])
    story.step(20, 30, [a])
    story.scheduled(40, [a], lost=True)
    story.steps_lost(41)
    story.keyframe_next()
    story.step(2000, 2010, [a])
    story.ends(2011, a)
    (row,) = [
        row for row in rendered(terminal.make_latency_table(story.records())).splitlines() if "tokens" in row
    ]
    assert row.split() == ["between", "tokens", "1", *["10", "ms"] * 4]


def test_waterfall_has_a_bar_per_decode_step() -> None:
    a = served().records()[1]
    assert rendered(*terminal.render_waterfall(a, width=40)) == text("""
        chat toy  trace ca978112ca1bbdcafac231b39a23dc4d  110 ms  5 → 9 tokens
          ingress        █                                          2.0 ms
          tokenize       █                                          2.0 ms
          queue           ██                                        6.0 ms
          prefill           ███████                                  20 ms
          decode                   ████████████████████████████      76 ms
          postprocess                                          █    4.0 ms
          8 decode steps, one bar each: median 5.0 ms, longest 40 ms; ▲ = another request's prompt in the same step
                         ▂▂▂▂▂▂█▂
                               ▲
    """)


def test_waterfall_without_steps_has_no_strip() -> None:
    b = served().records()[0]
    assert rendered(*terminal.render_waterfall(b, width=20)) == text("""
        chat toy  trace 3e23e8160039594a33894f6564e1b134  5.0 ms  0 → 0 tokens
          ingress        ████████████████████   5.0 ms
    """)


def test_overlapping_and_short_stages_stay_inside_the_picture() -> None:
    story = Story()
    a = story.arrives(0, http=False)
    story.stage("first", 0, 0.0001, a)
    story.stage("whole", 0, 1000, a)
    story.stage("last", 999.9999, 1000, a)
    story.ends(1000, a)
    bars = [line.plain[17:37] for line in list(terminal.render_waterfall(story.record(), width=20))[1:]]
    assert bars == ["█" + " " * 19, "█" * 20, " " * 19 + "█"]


def strip_of(lengths: list[int], width: int) -> list[str]:
    story = Story()
    a = story.arrives(0)
    story.step(10, 20, [a])
    story.step(20, 30, [a])
    story.ends(31, a)
    record: RequestRecord = story.record()
    ended_at = BASE + np.cumsum([10, *lengths]) * MS
    ones = np.ones(len(ended_at), np.int64)
    record.steps = RequestSteps(
        np.array([ones, ended_at - np.array([10, *lengths]) * MS, ended_at, ones, ones, 0 * ones])
    )
    return [
        line.plain[17:] for line in list(terminal.render_waterfall(record, width))[len(record.stages) + 2 :]
    ]


def test_strip_continues_in_the_next_line() -> None:
    assert strip_of([1] * 25, 10) == ["█" * 10, "█" * 10, "█" * 5]


def test_bar_height_is_the_step_length() -> None:
    assert strip_of([1, 8, 15, 29, 43, 57, 71, 100], 64) == ["▁▂▂▃▄▅▆█"]


@pytest.mark.parametrize("length", [0, 1])
def test_steps_of_equal_length_have_bars(length: int) -> None:
    """This includes steps of length 0."""
    assert len(strip_of([length] * 3, 64)[0]) == 3


def test_piped_output_has_no_colours_or_line_breaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    line = "a long line without a break, " * 20 + "and its end"
    terminal.make_console().print(line, style="bold red")
    assert capsys.readouterr().out == line + "\n"


def test_gpu_time_is_shown_with_its_error_bound() -> None:
    records = served().records()
    for record in records:
        stage = record.find_stage("decode")
        if stage is not None:
            stage.attributes.update(
                {
                    "infer.device.method": "event", "infer.device.steps": 2, "infer.device.steps.all": 4,
                    "infer.device.duration": 0.01, "infer.device.clock_error": 0.000012, "infer.device.bottleneck": "launch-or-sync",
                }
            )  # fmt: skip
    lines = rendered(terminal.make_stages_table(records)).splitlines()
    assert "GPU p50" in lines[1] and "GPU p99" in lines[1]
    rows = {line.split()[0]: line.split() for line in lines[2:]}
    assert rows["decode"][-5:] == ["20", "ms", "20", "ms", "launch-or-sync"]
    assert rows["queue"][-2:] == ["8.1", "%"], "a stage without GPU time has empty cells"
    sentence = terminal.format_device_line(records)
    assert "4 steps" in sentence and "±12 µs" in sentence


def test_gpu_columns_are_absent_without_gpu_timing() -> None:
    records = served().records()
    assert "GPU" not in rendered(terminal.make_stages_table(records))
    assert "no GPU" in terminal.format_device_line(records)
