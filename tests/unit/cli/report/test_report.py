"""`otel-infer report` renders any tape as a page and as a Perfetto trace."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from otel_infer import semconv
from otel_infer.analysis.diagnosis.rules import diagnose_requests
from otel_infer.assembly.engine.step_rows import RequestSteps
from otel_infer.assembly.engine.types import StepRecord
from otel_infer.assembly.records.process import Pause
from otel_infer.assembly.records.request import Interferer, LatencyBreakdown, RequestRecord, Stage
from otel_infer.cli import main
from otel_infer.cli.report import command as report
from otel_infer.cli.report import html_helpers, perfetto, request, summary
from otel_infer.cli.report import page as report_page
from otel_infer.cli.report.perfetto import TraceSlice, assign_lanes
from otel_infer.cli.report.summary import RecordingContents, build_view
from otel_infer.config import slo as objectives
from otel_infer.export.console import format_duration
from otel_infer.ringbuffer.events import ERROR, AttributeSet, EngineSeen, RecordedEvent
from otel_infer.sidecar.recording import file
from tests.support.pages import Page
from tests.support.served_load import ClientRequest, SimulatedServer
from tests.support.story import Story, ids, ms, ns
from tests.support.trace_events import read_as_trace

MS = 1_000_000
QUOTES = '"' * 500  # the character with the longest HTML escape
HOSTILE = (
    "</script><script>alert(1)</script>",
    '"><img src=http://127.0.0.1:9/x onerror=alert(1)>',
    "' autofocus onfocus='alert(1)",
    "<!--", "-->", "]]>", "{{verdict}}", "javascript:alert(1)", "\ud800 \u202e\x00\x1b[31m", "𝔪" * 5000,
)  # fmt: skip


def stutter(requests: int = 80, seed: int = 7) -> tuple[SimulatedServer, list[ClientRequest]]:
    """Returns a load with rare long prompts and two garbage collections."""
    draw = random.Random(seed)
    at, load = 0.0, []
    for _ in range(requests):
        at += draw.expovariate(1 / 70)
        load.append(ClientRequest(at, draw.randint(16, 64), draw.randint(24, 90)))
    for arrival in draw.sample(load, requests // 12):
        arrival.prompt = draw.randint(1500, 3500)
    return SimulatedServer(prompt_token=0.06, seed=5, pauses=[(at * 0.3, 120), (at * 0.7, 90)]), load


def recorded(path: Path, recorded_events: list[RecordedEvent]) -> Path:
    writer = file.RecordingWriter(path)
    for begin in range(0, len(recorded_events), 500):
        batch = recorded_events[begin : begin + 500]
        writer.write(batch, batch[-1].event.at)
    writer.close()
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    server, load = stutter()
    return recorded(tmp_path_factory.mktemp("tapes") / "stutter.tape", server.simulate(load))


@pytest.fixture(scope="module")
def contents(path: Path) -> RecordingContents:
    return report.read_recording(path)


@pytest.fixture(scope="module")
def page(contents: RecordingContents) -> Page:
    return Page(report_page.render_page(build_view(contents), "stutter.tape"))


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_page_and_trace_are_written_and_listed(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(path), "--perfetto", "trace.json"]) == 0
    page_line, trace_line = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"stutter\.html  \d+ KiB  stutter; 80 requests, 80 of them one by one", page_line)
    assert "ui.perfetto.dev" in trace_line
    Page((tmp_path / "stutter.html").read_text()).whole()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_same_tape_gives_identical_files(path: Path, tmp_path: Path) -> None:
    """The hash seed of the process does not matter."""
    written = set()
    for seed in ("1", "2"):
        out, trace = tmp_path / f"{seed}.html", tmp_path / f"{seed}.json"
        command = [sys.executable, "-m", "otel_infer", "report", str(path), "--out", out, "--perfetto", trace]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True)
        written.add(out.read_bytes() + trace.read_bytes())
    assert len(written) == 1


def test_invalid_tape_is_an_error_without_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_text("not a tape")
    out = tmp_path / "out.html"
    assert main(["report", str(tmp_path / "x"), "--out", str(out)]) == 2
    assert main(["report", str(tmp_path / "gone"), "--out", str(out)]) == 2
    assert capsys.readouterr().err.count("otel-infer report: ") == 2
    assert not out.exists()


@pytest.mark.parametrize("name", ["", "."])
def test_tape_without_a_file_name_is_an_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", name]) == 2
    assert capsys.readouterr().err.startswith("otel-infer report: ")
    assert list(tmp_path.iterdir()) == []


def test_requests_before_the_tape_period_are_not_counted(tmp_path: Path) -> None:
    """They only complete the state of the requests in the period."""
    story = Story()
    probe, old, young = (
        story.arrives(0, "probe", operation=""),
        story.arrives(0, "old"),
        story.arrives(1, "young"),
    )
    story.step(2, 8, [old], {old: 4})
    story.step(30, 40, [young], {young: 4})
    story.paused(1, 4)
    story.ends(5, probe)
    story.ends(10, old)
    story.ends(40, young)
    recorded_events = story.in_order()
    for options, names in (
        ({}, ["old", "young"]),
        ({"began_at": recorded_events[-1].event.at - 1}, ["young"]),
    ):
        writer = file.RecordingWriter(tmp_path / "a.tape", **options)
        writer.write(recorded_events, recorded_events[-1].event.at)
        writer.close()
        contents = report.read_recording(tmp_path / "a.tape")
        assert [record.span_id for record in contents.records] == [ids(name)[1] for name in names]
        assert contents.non_engine_requests == len(names) - 1
        assert (len(contents.steps), len(contents.pauses)) == (len(names), len(names) - 1)


def test_page_and_trace_cover_only_the_tape_period(tmp_path: Path) -> None:
    """Requests may be longer than the period.

    Before the period only requests in flight are known, so a drawing of that time would show an idle server.
    """
    story = Story()
    old, queued = story.arrives(0, "old"), story.arrives(100, "queued")
    story.submitted(110, queued)
    story.step(10_000, 10_010, [old], {old: 4})
    story.step(595_000, 595_010, [queued], {queued: 4})
    story.step(610_000, 610_010, [old])
    story.ends(611_000, old)
    story.ends(612_000, queued)
    recorded_events = story.in_order()
    writer = file.RecordingWriter(tmp_path / "a.tape", began_at=ns(600_000))
    writer.write(recorded_events, recorded_events[-1].event.at)
    writer.close()
    contents = report.read_recording(tmp_path / "a.tape")
    view = build_view(contents)
    assert (ms(view.began), ms(view.ended)) == (600_000, 612_000)
    assert view.bins[0][:2] == (2, 0)
    drawn = perfetto.build_events(contents)
    assert min(event["ts"] for event in drawn) == 0
    assert max(event["ts"] + event.get("dur", 0) for event in drawn) == 12_000_000
    assert "queue" not in {event["name"] for event in drawn if event["ph"] == "X"}


def test_unwritable_output_fails_and_keeps_the_tape(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = path.read_bytes()
    assert main(["report", str(path), "--out", str(path)]) == 2
    assert main(["report", str(path), "--out", str(tmp_path / "x.html"), "--perfetto", str(path)]) == 2
    assert main(["report", str(path), "--out", str(tmp_path / "gone" / "x.html")]) == 2
    errors = capsys.readouterr().err
    assert errors.count("the tape itself") == 2 and "gone" in errors
    assert path.read_bytes() == before


def test_tape_without_requests_has_insufficient_evidence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = Story()
    story.ends(5, story.arrives(0, "probe", operation=""))
    for name, recorded_events in (("empty", story.in_order()[:1]), ("probes", story.in_order())):
        tape, out = recorded(tmp_path / f"{name}.tape", recorded_events), tmp_path / f"{name}.html"
        trace = tmp_path / f"{name}.json"
        assert main(["report", str(tape), "--out", str(out), "--perfetto", str(trace)]) == 0
        page = Page(out.read_text())
        page.whole()
        assert page.text("verdict") == "Insufficient evidence"
        read_as_trace(trace.read_text())
    assert "1 that reached no engine" in page.text()


def test_requests_in_flight_at_the_end_are_counted(tmp_path: Path) -> None:
    story = Story()
    a, b = story.arrives(0, "a"), story.arrives(10, "b")
    for member in (a, b):
        story.submitted(12, member, input_tokens=5)
    story.step(20, 30, [a, b], prompt={a: 5, b: 5})
    story.ends(40, a)
    contents = report.read_recording(recorded(tmp_path / "a.tape", story.in_order()))
    assert (len(contents.records), len(contents.unfinished_arrivals)) == (1, 1)
    view = build_view(contents)
    assert [view.bins[i].running + view.bins[i].queued for i in (0, 100, 199)] == [1, 2, 2]
    page = Page(report_page.render_page(view, "a.tape"))
    assert "1 still in flight" in page.text()


# ── the content of the page ───────────────────────────────────────────────────────────────────────────────────────────


def test_page_is_complete_and_loads_nothing(page: Page) -> None:
    page.whole()
    (policy,) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy["content"].startswith("default-src 'none'; ")
    assert "http" not in policy["content"]


def test_content_policy_allows_only_the_pages_script(contents: RecordingContents) -> None:
    text = report_page.render_page(build_view(contents), "stutter.tape")
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert f"script-src 'sha256-{report_page._script_hash(script)}';" in text


def test_verdict_has_evidence_and_a_first_change(page: Page, contents: RecordingContents) -> None:
    finding, *_ = diagnose_requests(contents.records).findings
    assert page.text("verdict") == "“starts, then freezes or stutters”: the work of the model is interrupted"
    for shown in (*finding.evidence, finding.change):
        assert " ".join(shown.split()) in page.text()


def test_percentiles_match_the_requests(page: Page, contents: RecordingContents) -> None:
    ttft = [record.ttft_ns for record in contents.records]
    cells = [format_duration(value) for value in (*np.percentile(ttft, (50, 95, 99)), max(ttft))]
    assert f"time to first token {len(ttft)} {' '.join(cells)}" in page.text()
    for name in ("between tokens", "end to end", "ingress", "queue", "prefill", "decode", "postprocess"):
        assert re.search(rf"{name} [\d,]+ [\d.]+ m?s", page.text()), name


def test_causes_are_described_and_sum_to_all_time(page: Page, contents: RecordingContents) -> None:
    rows = build_view(contents).causes
    assert (
        sum(row.slowest_share for row in rows) == pytest.approx(1) == sum(row.overall_share for row in rows)
    )
    for row in rows:
        assert semconv.describe_cause(row.cause) in page.text()


def test_request_details_have_stages_and_latency_breakdown(page: Page, contents: RecordingContents) -> None:
    assert len(page.all("tr", class_="detail")) == len(contents.records)
    for record in contents.records:
        key = f"r-{record.span_id.hex()}"
        detail = page.text(key)
        assert record.trace_id.hex() in detail and "the parts sum to its duration" in detail
        for stage in record.stages:
            assert stage.name in detail


def test_strip_has_length_batch_and_prompts_per_step(page: Page, contents: RecordingContents) -> None:
    for record in contents.records[:20]:
        drawn, rows = page.data(f"r-{record.span_id.hex()}"), record.steps
        assert rows is not None
        assert np.cumsum(drawn["step"]).tolist() == rows.step[1:].tolist()
        assert drawn["length"] == ((rows.ended_at - rows.started_at)[1:] // 1000).tolist()
        assert drawn["batch"] == rows.batch_size[1:].tolist()
        assert drawn["others"] == rows.others_prefill_tokens[1:].tolist()
        assert np.cumsum(drawn["at"]).tolist() == ((rows.ended_at[1:] - record.arrived_at) // 1000).tolist()


def test_pauses_are_marked_on_steps_and_timeline(page: Page, contents: RecordingContents) -> None:
    paused = [record for record in contents.records if any(p.cause == "gc" for p in record.pauses)]
    assert paused
    for record in paused:
        detail = page.text(f"r-{record.span_id.hex()}")
        assert "pause: gc" in detail
    assert any(page.data(f"r-{record.span_id.hex()}")["paused"] for record in paused)
    assert len(page.all("rect", class_="pause")) == len(contents.pauses) == 2


def test_interferers_are_listed_with_links_to_requests(page: Page, contents: RecordingContents) -> None:
    rows = build_view(contents).interferers
    delayed = [r for r in contents.records if r.breakdown is not None and r.breakdown.interferer is not None]
    assert sum(row.affected_requests for row in rows) == len(delayed)
    assert sum(row.total_delay_ns for row in rows) == sum(r.breakdown.interferer.length for r in delayed)  # type: ignore[union-attr]
    assert [row.total_delay_ns for row in rows] == sorted((row.total_delay_ns for row in rows), reverse=True)
    assert all(row.record is not None and row.record.input_tokens > 1000 for row in rows[:3])
    assert page.all("a", href=f"#r-{rows[0].span_id.hex()}")


def test_interferer_outside_the_tape_has_no_link() -> None:
    record = make_record(1, 10)
    record.breakdown = LatencyBreakdown(
        {"interference": 9 * MS, "decode": MS}, Interferer(b"\xab" * 16, b"\xcd" * 8, 9 * MS)
    )
    page = Page(report_page.render_page(build_view(RecordingContents([record], [], [], [], 0)), "x"))
    page.whole()
    assert "abababab not on this tape 1 9.0 ms" in page.text()
    assert not page.all("a", href=f"#r-{'cd' * 8}")


def test_failed_request_has_its_outcome_and_stage() -> None:
    story = Story()
    a = story.arrives(0)
    story.submitted(4, a, input_tokens=5)
    story.aborts(40, a)
    contents = RecordingContents([story.record(a)], [], [], [], 0)
    page = Page(report_page.render_page(build_view(contents), "x"))
    page.whole()
    for words in ("1 aborted", "aborted (client_disconnect)", "failed in queue", "No decode steps"):
        assert words in page.text()


# ── untrusted content ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", HOSTILE)
def test_untrusted_names_are_escaped_everywhere(name: str) -> None:
    story = Story()
    story.add_event(20, 0, EngineSeen(0, 1, 1, name))
    a = story.arrives(0, http=False)
    story.recorded_events[-1] = story.recorded_events[-1]._replace(
        event=story.recorded_events[-1].event._replace(model=name, operation=name)
    )
    story.add_request_event(a, AttributeSet(story.recorded_events[-1].event.at, "infer." + name, name))
    story.add_request_event(a, AttributeSet(story.recorded_events[-1].event.at, semconv.RESPONSE_ID, name))
    story.stage(name, 1, 3, a)
    story.submitted(4, a, input_tokens=5)
    story.paused(12, 14, name)
    for begin in (10, 20, 30):
        story.step(begin, begin + 10, [a])
    story.finished(40, a, reason=name)
    story.ends(45, a, ERROR, name)
    records = story.records()
    records[0].stages.append(Stage(name, records[0].arrived_at, records[0].ended_at, {name: name}))
    contents = RecordingContents(
        records, [], [Pause(records[0].arrived_at, records[0].ended_at, name)], [], 0
    )
    text = report_page.render_page(build_view(contents), name)
    text.encode()
    page = Page(text)
    page.whole()
    assert len(page.all("script")) == 1 + len(page.all("script", type="application/json")) == 2
    assert len(page.all("h2", id="verdict")) == 1
    assert len(text) < 80_000
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e]", text)
    read_as_trace(perfetto.render_trace(contents))
    assert page.text("verdict") == "Insufficient evidence"


@pytest.mark.parametrize("name", HOSTILE)
def test_script_data_cannot_end_the_script(name: str) -> None:
    text = html_helpers.json_for_script([name])
    assert not set("<>&\u2028") & set(text) and json.loads(text) == [name]


def test_custom_attributes_are_in_neither_page_nor_trace() -> None:
    story = Story()
    a = story.arrives(0)
    story.add_request_event(a, AttributeSet(story.recorded_events[-1].event.at, "app.user", "CANARY"))
    story.ends(5, a)
    contents = RecordingContents(story.records(), [], [], [], 0)
    assert "CANARY" not in report_page.render_page(build_view(contents), "x") + perfetto.render_trace(
        contents
    )


# ── limits of size ────────────────────────────────────────────────────────────────────────────────────────


def make_record(number: int, steps: int, length: int = 987_654_321) -> RequestRecord:
    """A request with long numbers in every column."""
    span_id = hashlib.sha256(str(number).encode()).digest()[:8]
    table = np.zeros((6, steps + 1), np.int64)
    table[0] = np.arange(steps + 1) * 3 + 1_000_000_000
    table[2] = 1 << 50
    table[2] += np.arange(steps + 1) * 2 * length
    table[1] = table[2] - length + np.arange(steps + 1) % 7
    table[3:] = 99_999
    begin, end = int(table[1, 0]) - number, int(table[2, -1]) + 5
    record = RequestRecord(
        span_id * 2, span_id, bytes(8), bytes(8), True, False, "", "chat", "toy", QUOTES, "toy", begin, end, 1
    )  # fmt: skip
    record.stages = [
        Stage(QUOTES, begin + i, end - i, {str(i) + QUOTES: QUOTES for i in range(9)}) for i in range(256)
    ]
    record.steps, record.first_token_at, record.input_tokens = RequestSteps(table), int(table[2, 0]), 10**9
    record.pauses = tuple(Pause(begin + i, begin + i + 1, f"cause {i}") for i in range(1000))
    record.breakdown = LatencyBreakdown(dict.fromkeys(semconv.CAUSES, 10**12), None)
    return record


def test_drawn_pause_is_clipped_to_its_request() -> None:
    record = make_record(1, 10)
    record.arrived_at, record.ended_at = 1_000 * MS, 1_400 * MS
    record.stages, record.pauses = [], (Pause(750 * MS, 1_050 * MS, "gc"),)
    waterfall = request._render_waterfall(record)
    assert re.findall(r'<rect x="([\d.]+)" width="([\d.]+)"', waterfall) == [("0.0", "125.0")]
    assert "50 ms" in waterfall


def test_large_tape_gives_page_below_10_mb() -> None:
    """The tape has 220 requests of 1000 steps and 1000 pauses each."""
    pauses = [Pause(i, i + 1, f"cause {i}") for i in range(5000)]
    contents = RecordingContents([make_record(number, 1000) for number in range(220)], [], pauses, [], 0)
    text = report_page.render_page(build_view(contents), "x" * 1000)
    assert len(text.encode()) < 10_000_000
    page = Page(text)
    page.whole()
    assert len(page.all("tr", class_="detail")) == summary.MAX_REQUESTS == 200
    assert "200 of 220, longest first" in page.text()
    strips = re.findall(r'<script type="application/json">(.*?)</script>', text)
    assert {len(json.loads(strip)["length"]) for strip in strips} == {request.MAX_BARS_PER_PAGE // 200}


def test_bar_shows_the_slowest_step_of_its_group() -> None:
    draw = np.random.default_rng(1)
    lengths = draw.integers(1, 1000, 4321)
    drawn = request.slowest_per_group(lengths, 1000)
    assert len(drawn) == 1000 and (np.diff(drawn) > 0).all()
    assert int(lengths[drawn].max()) == int(lengths.max())
    assert np.median(lengths[drawn]) > np.median(lengths)


def test_shown_requests_include_the_slowest_and_their_interferers() -> None:
    """The slowest are chosen by each latency, here by duration and by time to first token."""
    records = [make_record(number, 2, length=1000 + number) for number in range(260)]
    interferer = records[0]
    records[259].breakdown = LatencyBreakdown(
        {"interference": 10}, Interferer(interferer.trace_id, interferer.span_id, 10)
    )
    late = records[5]
    late.first_token_at = late.arrived_at + 10**9
    shown = build_view(RecordingContents(records, [], [], [], 0)).shown
    assert len(shown) == 200
    assert interferer in shown and late in shown and records[259] in shown
    lengths = [record.duration_ns for record in shown]
    assert lengths == sorted(lengths, reverse=True)


def test_missed_objectives_come_first_and_are_named() -> None:
    records = [make_record(number, 2, length=1000 + number) for number in range(260)]
    late = records[5]
    late.first_token_at = late.arrived_at + 10**9
    view = build_view(RecordingContents(records, [], [], [], 0, objectives.parse_objectives("ttft=999ms")))
    assert view.missed_objectives == {late.span_id: ("ttft",)}
    assert view.shown[0] is late and view.shown[1] is records[259]
    page = Page(report_page.render_page(view, "x"))
    page.whole()
    assert "1 missed an objective" in page.text("header") and "ok, missed ttft" in page.text()
    assert len(page.all("line", class_="missed")) == 1


def test_invalid_objectives_of_a_tape_are_ignored(tmp_path: Path) -> None:
    objectives_by_tape = {"a": "e2e=1s", "b": "<nonsense>", "c": ""}
    for name, slo in objectives_by_tape.items():
        file.RecordingWriter(tmp_path / name, slo=slo).close()
    counts = [len(report.read_recording(tmp_path / name).objectives.sections) for name in objectives_by_tape]
    assert counts == [1, 0, 0]


def test_stages_outside_their_request_are_drawn() -> None:
    """This includes a stage that ends before it begins, and a pause before the request."""
    story = Story()
    a = story.arrives(10)
    story.ends(40, a)
    (record,) = story.records()
    at = record.arrived_at
    record.stages += [Stage("early", at - 8 * MS, at + MS, {}), Stage("queue", at + 5 * MS, at + MS, {})]
    contents = RecordingContents([record], [], [Pause(at - 9 * MS, at - 7 * MS, "gc")], [], 0)
    Page(report_page.render_page(build_view(contents), "x")).whole()
    events = read_as_trace(perfetto.render_trace(contents))
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0


def test_short_peak_is_visible_in_its_bin() -> None:
    records = [make_record(number, 2) for number in range(4)]
    for number, record in enumerate(records):
        record.stages, record.pauses = [], ()
        record.arrived_at, record.ended_at = 1000 + number, 1010 + number
    records[0].arrived_at, records[0].ended_at = 0, 1_000_000
    bins = build_view(RecordingContents(records, [], [], [], 0)).bins
    assert [bins[i].running for i in (0, 1, 199)] == [4, 1, 1]


def test_running_and_queued_peaks_are_independent() -> None:
    records = [make_record(number, 2) for number in range(5)]
    for number, record in enumerate(records):
        record.stages, record.pauses = [], ()
        record.arrived_at, record.ended_at = 0, 1_000_000
        if number:  # four wait for a moment, then all five run
            record.stages = [Stage("queue", 100, 200, {})]
    bins = build_view(RecordingContents(records, [], [], [], 0)).bins
    assert (bins[0].running, bins[0].queued) == (5, 4)
    assert (bins[1].running, bins[1].queued) == (5, 0)


def test_concurrency_counts_open_intervals_and_ends_at_0() -> None:
    at, level = summary.count_concurrent([(0, 10), (5, 10), (10, 12), (3, 3)])
    assert dict(zip(at.tolist(), level.tolist())) == {0: 1, 3: 1, 5: 2, 10: 1, 12: 0}


# ── trace events ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_trace_has_every_step_request_stage_and_pause(contents: RecordingContents) -> None:
    events = read_as_trace(perfetto.render_trace(contents))
    slices = [event for event in events if event["ph"] == "X"]
    assert sum("batch_size" in event["args"] for event in slices) == len(contents.steps)
    assert sum("trace_id" in event["args"] for event in slices) == len(contents.records)
    stages = sum(event["name"] == "decode" and event["pid"] == perfetto.REQUESTS for event in slices)
    assert stages == sum(record.find_stage("decode") is not None for record in contents.records)
    assert sum(event["name"] == "gc" for event in slices) == 2
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"steps of toy (pid 1)", "pauses: gc"} <= tracks


def test_trace_counters_end_at_0(contents: RecordingContents) -> None:
    events = read_as_trace(perfetto.render_trace(contents))
    for name in ("in flight", "waiting"):
        values = [event["args"][name] for event in events if event["ph"] == "C" and event["name"] == name]
        assert values[-1] == 0 and max(values) > 0
    (engine_counter,) = {e["name"] for e in events if e["ph"] == "C" and e["pid"] == perfetto.ENGINES}
    assert engine_counter == "scheduler of toy (pid 1)"


def test_overlapping_slices_get_separate_lanes() -> None:
    def make_slice(name: str, begin: int, end: int) -> TraceSlice:
        return TraceSlice(name, begin, end, {})

    lanes = assign_lanes(
        [
            make_slice("c", 5, 15),
            make_slice("a", 0, 10),
            make_slice("b", 2, 5),
            make_slice("d", 10, 12),
            make_slice("e", 14, 20),
        ]
    )
    assert [[trace_slice.name for trace_slice in lane] for lane in lanes] == [["a", "b", "d", "e"], ["c"]]


def test_overlapping_steps_are_not_cut() -> None:
    steps = [StepRecord("toy", 1, i, i * 10_000, i * 10_000 + 15_000, 4, 0, 4, 0, 0, 4, 0) for i in range(50)]
    events = read_as_trace(perfetto.render_trace(RecordingContents([], steps, [], [], 0)))
    lengths = [event["dur"] for event in events if event["ph"] == "X"]
    assert lengths == [15.0] * 50


def test_overlapping_stage_is_beside_its_request() -> None:
    story = Story()
    a = story.arrives(0)
    story.stage("search", 5, 20, a)
    story.stage("rank", 10, 30, a)
    story.ends(40, a)
    events = read_as_trace(perfetto.render_trace(RecordingContents(story.records(), [], [], [], 0)))
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    short = ids("a")[0].hex()[:8]
    assert names == [f"{short} chat toy", f"{short} chat toy (beside)"]
