"""`otel-infer report`: a tape as a page and as a trace, whatever is on it."""

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
from otel_infer.analysis.diagnosis.rules import diagnose
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
from tests.support.served_load import Asked, Served
from tests.support.story import Story, ids, ms, ns
from tests.support.trace_events import read_as_trace

MS = 1_000_000
QUOTES = '"' * 500  # the letter that becomes longest in a page
HOSTILE = (
    "</script><script>alert(1)</script>",
    '"><img src=http://127.0.0.1:9/x onerror=alert(1)>',
    "' autofocus onfocus='alert(1)",
    "<!--", "-->", "]]>", "{{verdict}}", "javascript:alert(1)", "\ud800 \u202e\x00\x1b[31m", "𝔪" * 5000,
)  # fmt: skip


def stutter(requests: int = 80, seed: int = 7) -> tuple[Served, list[Asked]]:
    """Now and then a long prompt, and two garbage collections."""
    draw = random.Random(seed)
    at, asked = 0.0, []
    for _ in range(requests):
        at += draw.expovariate(1 / 70)
        asked.append(Asked(at, draw.randint(16, 64), draw.randint(24, 90)))
    for one in draw.sample(asked, requests // 12):
        one.prompt = draw.randint(1500, 3500)
    return Served(prompt_token=0.06, seed=5, pauses=[(at * 0.3, 120), (at * 0.7, 90)]), asked


def recorded(path: Path, said: list[RecordedEvent]) -> Path:
    writer = file.RecordingWriter(path)
    for begin in range(0, len(said), 500):
        piece = said[begin : begin + 500]
        writer.write(piece, piece[-1].event.at)
    writer.close()
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    served, asked = stutter()
    return recorded(tmp_path_factory.mktemp("tapes") / "stutter.tape", served.facts(asked))


@pytest.fixture(scope="module")
def told(path: Path) -> RecordingContents:
    return report.read_recording(path)


@pytest.fixture(scope="module")
def page(told: RecordingContents) -> Page:
    return Page(report_page.render_page(build_view(told), "stutter.tape"))


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_page_and_a_trace_are_written_and_said(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(path), "--perfetto", "trace.json"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"stutter\.html  \d+ KiB  stutter; 80 requests, 80 of them one by one", said[0])
    assert "ui.perfetto.dev" in said[1]
    Page((tmp_path / "stutter.html").read_text()).whole()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_the_same_tape_gives_the_same_files_in_any_process(path: Path, tmp_path: Path) -> None:
    written = set()
    for seed in ("1", "2"):
        out, trace = tmp_path / f"{seed}.html", tmp_path / f"{seed}.json"
        command = [sys.executable, "-m", "otel_infer", "report", str(path), "--out", out, "--perfetto", trace]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True)
        written.add(out.read_bytes() + trace.read_bytes())
    assert len(written) == 1


def test_what_is_no_tape_is_an_error_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x").write_text("not a tape")
    out = tmp_path / "out.html"
    assert main(["report", str(tmp_path / "x"), "--out", str(out)]) == 2
    assert main(["report", str(tmp_path / "gone"), "--out", str(out)]) == 2
    assert capsys.readouterr().err.count("otel-infer report: ") == 2
    assert not out.exists()


@pytest.mark.parametrize("name", ["", "."])
def test_a_name_that_is_none_is_an_error_too(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", name]) == 2
    assert capsys.readouterr().err.startswith("otel-infer report: ")
    assert list(tmp_path.iterdir()) == []


def test_what_ended_before_the_time_of_a_tape_only_explains_the_rest(tmp_path: Path) -> None:
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
    said = story.in_order()
    for about, names in (({}, ["old", "young"]), ({"began_at": said[-1].event.at - 1}, ["young"])):
        writer = file.RecordingWriter(tmp_path / "a.tape", **about)
        writer.write(said, said[-1].event.at)
        writer.close()
        told = report.read_recording(tmp_path / "a.tape")
        assert [record.span_id for record in told.records] == [ids(name)[1] for name in names]
        assert told.non_engine_requests == len(names) - 1
        assert (len(told.steps), len(told.pauses)) == (len(names), len(names) - 1)


def test_a_tape_of_two_minutes_is_two_minutes_long_however_long_its_requests_were(tmp_path: Path) -> None:
    """Of what came before, only who was still there is known: drawn from then on, it would look like a server that was idle."""
    story = Story()
    old, queued = story.arrives(0, "old"), story.arrives(100, "queued")
    story.submitted(110, queued)
    story.step(10_000, 10_010, [old], {old: 4})
    story.step(595_000, 595_010, [queued], {queued: 4})
    story.step(610_000, 610_010, [old])
    story.ends(611_000, old)
    story.ends(612_000, queued)
    said = story.in_order()
    writer = file.RecordingWriter(tmp_path / "a.tape", began_at=ns(600_000))
    writer.write(said, said[-1].event.at)
    writer.close()
    told = report.read_recording(tmp_path / "a.tape")
    seen = build_view(told)
    assert (ms(seen.began), ms(seen.ended)) == (600_000, 612_000)
    assert seen.bins[0][:2] == (2, 0)
    drawn = perfetto.build_events(told)
    assert min(event["ts"] for event in drawn) == 0
    assert max(event["ts"] + event.get("dur", 0) for event in drawn) == 12_000_000
    assert "queue" not in {event["name"] for event in drawn if event["ph"] == "X"}


def test_what_cannot_be_written_is_an_error_and_the_tape_itself_is_never_written_over(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = path.read_bytes()
    assert main(["report", str(path), "--out", str(path)]) == 2
    assert main(["report", str(path), "--out", str(tmp_path / "x.html"), "--perfetto", str(path)]) == 2
    assert main(["report", str(path), "--out", str(tmp_path / "gone" / "x.html")]) == 2
    said = capsys.readouterr().err
    assert said.count("is the tape itself") == 2 and "gone" in said
    assert path.read_bytes() == before


def test_a_tape_without_requests_has_a_page_that_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story = Story()
    story.ends(5, story.arrives(0, "probe", operation=""))
    for name, said in (("empty", story.in_order()[:1]), ("probes", story.in_order())):
        tapes, out = recorded(tmp_path / f"{name}.tape", said), tmp_path / f"{name}.html"
        trace = tmp_path / f"{name}.json"
        assert main(["report", str(tapes), "--out", str(out), "--perfetto", str(trace)]) == 0
        page = Page(out.read_text())
        page.whole()
        assert page.text("verdict") == "Insufficient evidence"
        assert "There are no requests on this tape." in page.text()
        read_as_trace(trace.read_text())
    assert "1 that reached no engine" in page.text()


def test_requests_still_in_flight_at_the_end_are_counted(tmp_path: Path) -> None:
    story = Story()
    a, b = story.arrives(0, "a"), story.arrives(10, "b")
    for who in (a, b):
        story.submitted(12, who, input_tokens=5)
    story.step(20, 30, [a, b], prompt={a: 5, b: 5})
    story.ends(40, a)
    told = report.read_recording(recorded(tmp_path / "a.tape", story.in_order()))
    assert (len(told.records), len(told.unfinished_arrivals)) == (1, 1)
    seen = build_view(told)
    assert [seen.bins[i].running + seen.bins[i].queued for i in (0, 100, 199)] == [1, 2, 2]
    page = Page(report_page.render_page(seen, "a.tape"))
    assert "1 still in flight at its end" in page.text()


# ── what the page says ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_page_is_whole_and_loads_nothing(page: Page) -> None:
    page.whole()
    (policy,) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy["content"].startswith("default-src 'none'; ")
    assert "http" not in policy["content"]


def test_only_the_script_of_the_page_itself_may_run(told: RecordingContents) -> None:
    text = report_page.render_page(build_view(told), "stutter.tape")
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert f"script-src 'sha256-{report_page._script_hash(script)}';" in text


def test_the_verdict_comes_with_its_evidence_and_what_to_change_first(
    page: Page, told: RecordingContents
) -> None:
    finding, *_ = diagnose(told.records).findings
    assert page.text("verdict") == "“starts, then freezes or stutters”: decode is interrupted"
    for evidence in finding.evidence:
        assert evidence in page.text()
    assert "Change first: chunked prefill with fewer prompt tokens a step" in page.text()


def test_the_percentiles_are_those_of_the_requests(page: Page, told: RecordingContents) -> None:
    ttft = [record.ttft_ns for record in told.records]
    cells = [format_duration(value) for value in (*np.percentile(ttft, (50, 95, 99)), max(ttft))]
    assert f"time to first token {len(ttft)} {' '.join(cells)}" in page.text()
    for name in ("between tokens", "end to end", "ingress", "queue", "prefill", "decode", "postprocess"):
        assert re.search(rf"{name} [\d,]+ [\d.]+ m?s", page.text()), name


def test_every_cause_has_its_meaning_and_they_sum_to_all_of_the_time(
    page: Page, told: RecordingContents
) -> None:
    rows = build_view(told).causes
    assert (
        sum(row.slowest_share for row in rows) == pytest.approx(1) == sum(row.overall_share for row in rows)
    )
    for row in rows:
        assert semconv.describe_cause(row.cause) in page.text()


def test_every_request_opens_to_its_stages_its_steps_and_its_blame(
    page: Page, told: RecordingContents
) -> None:
    assert len(page.all("tr", class_="detail")) == len(told.records)
    for record in told.records:
        key = f"r-{record.span_id.hex()}"
        said = page.text(key)
        assert record.trace_id.hex() in said and "the parts sum to its duration" in said
        for stage in record.stages:
            assert stage.name in said


def test_a_strip_holds_every_decode_step_with_its_length_batch_and_prompts(
    page: Page, told: RecordingContents
) -> None:
    for record in told.records[:20]:
        drawn, rows = page.data(f"r-{record.span_id.hex()}"), record.steps
        assert rows is not None
        assert np.cumsum(drawn["step"]).tolist() == rows.step[1:].tolist()
        assert drawn["length"] == ((rows.ended_at - rows.started_at)[1:] // 1000).tolist()
        assert drawn["batch"] == rows.batch_size[1:].tolist()
        assert drawn["others"] == rows.others_prefill_tokens[1:].tolist()
        assert np.cumsum(drawn["at"]).tolist() == ((rows.ended_at[1:] - record.arrived_at) // 1000).tolist()


def test_a_pause_is_marked_on_the_steps_it_happened_in_and_over_the_tape(
    page: Page, told: RecordingContents
) -> None:
    paused = [record for record in told.records if any(p.cause == "gc" for p in record.pauses)]
    assert paused
    for record in paused:
        said = page.text(f"r-{record.span_id.hex()}")
        assert "pause: gc" in said
    assert any(page.data(f"r-{record.span_id.hex()}")["paused"] for record in paused)
    assert len(page.all("rect", class_="pause")) == len(told.pauses) == 2


def test_who_held_up_whom_is_a_table_whose_links_lead_to_the_requests(
    page: Page, told: RecordingContents
) -> None:
    rows = build_view(told).interferers
    held = [r for r in told.records if r.breakdown is not None and r.breakdown.interferer is not None]
    assert sum(row.affected_requests for row in rows) == len(held)
    assert sum(row.total_delay_ns for row in rows) == sum(r.breakdown.interferer.length for r in held)  # type: ignore[union-attr]
    assert [row.total_delay_ns for row in rows] == sorted((row.total_delay_ns for row in rows), reverse=True)
    assert all(row.record is not None and row.record.input_tokens > 1000 for row in rows[:3])
    assert page.all("a", href=f"#r-{rows[0].span_id.hex()}")


def test_an_offender_that_is_not_on_the_tape_is_named_without_a_link() -> None:
    record = made(1, 10)
    record.breakdown = LatencyBreakdown(
        {"interference": 9 * MS, "decode": MS}, Interferer(b"\xab" * 16, b"\xcd" * 8, 9 * MS)
    )
    page = Page(report_page.render_page(build_view(RecordingContents([record], [], [], [], 0)), "x"))
    page.whole()
    assert "abababab not on this tape 1 9.0 ms" in page.text()
    assert not page.all("a", href=f"#r-{'cd' * 8}")


def test_a_failed_request_says_how_it_ended_and_where_it_died() -> None:
    story = Story()
    a = story.arrives(0)
    story.submitted(4, a, input_tokens=5)
    story.aborts(40, a)
    told = RecordingContents([story.record(a)], [], [], [], 0)
    page = Page(report_page.render_page(build_view(told), "x"))
    page.whole()
    said = page.text()
    assert "1 aborted" in said and "aborted (client_disconnect)" in said and "died in queue" in said
    assert "No decode steps of this request are on the tape." in said


# ── what comes from outside ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", HOSTILE)
def test_names_from_outside_are_text_wherever_they_stand(name: str) -> None:
    story = Story()
    story.tell(20, 0, EngineSeen(0, 1, 1, name))
    who = story.arrives(0, http=False)
    story.said[-1] = story.said[-1]._replace(event=story.said[-1].event._replace(model=name, operation=name))
    story.state(who, AttributeSet(story.said[-1].event.at, "infer." + name, name))
    story.state(who, AttributeSet(story.said[-1].event.at, semconv.RESPONSE_ID, name))
    story.stage(name, 1, 3, who)
    story.submitted(4, who, input_tokens=5)
    story.paused(12, 14, name)
    for begin in (10, 20, 30):
        story.step(begin, begin + 10, [who])
    story.finished(40, who, reason=name)
    story.ends(45, who, ERROR, name)
    records = story.records()
    records[0].stages.append(Stage(name, records[0].arrived_at, records[0].ended_at, {name: name}))
    told = RecordingContents(records, [], [Pause(records[0].arrived_at, records[0].ended_at, name)], [], 0)
    text = report_page.render_page(build_view(told), name)
    text.encode()
    page = Page(text)
    page.whole()
    assert len(page.all("script")) == 1 + len(page.all("script", type="application/json")) == 2
    assert len(page.all("h2", id="verdict")) == 1
    assert len(text) < 80_000
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e]", text)
    read_as_trace(perfetto.render_trace(told))
    assert page.text("verdict") == "Insufficient evidence"


@pytest.mark.parametrize("name", HOSTILE)
def test_data_inside_a_script_cannot_end_it(name: str) -> None:
    text = html_helpers.json_for_script([name])
    assert not set("<>&\u2028") & set(text) and json.loads(text) == [name]


def test_an_applications_own_attributes_stay_on_the_tape() -> None:
    story = Story()
    who = story.arrives(0)
    story.state(who, AttributeSet(story.said[-1].event.at, "app.user", "CANARY"))
    story.ends(5, who)
    told = RecordingContents(story.records(), [], [], [], 0)
    assert "CANARY" not in report_page.render_page(build_view(told), "x") + perfetto.render_trace(told)


# ── however much there is ────────────────────────────────────────────────────────────────────────────────────────


def made(number: int, steps: int, length: int = 987_654_321) -> RequestRecord:
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


def test_of_a_pause_that_began_before_a_request_what_lies_inside_is_drawn() -> None:
    record = made(1, 10)
    record.arrived_at, record.ended_at = 1_000 * MS, 1_400 * MS
    record.stages, record.pauses = [], (Pause(750 * MS, 1_050 * MS, "gc"),)
    drawn = request._render_waterfall(record)
    assert re.findall(r'<rect x="([\d.]+)" width="([\d.]+)"', drawn) == [("0.0", "125.0")]
    assert "50 ms" in drawn


def test_a_tape_of_thousands_of_long_requests_gives_a_page_below_ten_megabytes() -> None:
    pauses = [Pause(i, i + 1, f"cause {i}") for i in range(5000)]
    told = RecordingContents([made(number, 1000) for number in range(220)], [], pauses, [], 0)
    text = report_page.render_page(build_view(told), "x" * 1000)
    assert len(text.encode()) < 10_000_000
    page = Page(text)
    page.whole()
    assert len(page.all("tr", class_="detail")) == summary.MAX_REQUESTS == 200
    assert "200 of 220, longest first" in page.text()
    strips = re.findall(r'<script type="application/json">(.*?)</script>', text)
    assert {len(json.loads(strip)["length"]) for strip in strips} == {request.MAX_BARS_PER_PAGE // 200}


def test_of_more_steps_than_bars_the_slowest_of_each_group_is_drawn() -> None:
    draw = np.random.default_rng(1)
    lengths = draw.integers(1, 1000, 4321)
    kept = request.slowest_per_group(lengths, 1000)
    assert len(kept) == 1000 and (np.diff(kept) > 0).all()
    assert int(lengths[kept].max()) == int(lengths.max())
    assert np.median(lengths[kept]) > np.median(lengths)


def test_of_more_requests_than_rows_the_slowest_of_each_kind_and_their_offenders_are_shown() -> None:
    records = [made(number, 2, length=1000 + number) for number in range(260)]
    quick = records[0]
    records[259].breakdown = LatencyBreakdown(
        {"interference": 10}, Interferer(quick.trace_id, quick.span_id, 10)
    )
    late = records[5]
    late.first_token_at = late.arrived_at + 10**9
    shown = build_view(RecordingContents(records, [], [], [], 0)).shown
    assert len(shown) == 200
    assert quick in shown and late in shown and records[259] in shown
    lengths = [record.duration_ns for record in shown]
    assert lengths == sorted(lengths, reverse=True)


def test_what_missed_an_objective_stands_first_and_says_which() -> None:
    records = [made(number, 2, length=1000 + number) for number in range(260)]
    late = records[5]
    late.first_token_at = late.arrived_at + 10**9
    seen = build_view(RecordingContents(records, [], [], [], 0, objectives.parse_objectives("ttft=999ms")))
    assert seen.missed_objectives == {late.span_id: ("ttft",)}
    assert seen.shown[0] is late and seen.shown[1] is records[259]
    page = Page(report_page.render_page(seen, "x"))
    page.whole()
    assert "1 missed an objective" in page.text("header") and "ok, missed ttft" in page.text()
    assert len(page.all("line", class_="missed")) == 1


def test_what_a_tape_says_of_objectives_is_taken_if_it_is_understood(tmp_path: Path) -> None:
    said = {"a": "e2e=1s", "b": "<nonsense>", "c": ""}
    for name, slo in said.items():
        file.RecordingWriter(tmp_path / name, slo=slo).close()
    found = [len(report.read_recording(tmp_path / name).objectives.sections) for name in said]
    assert found == [1, 0, 0]


def test_what_lies_outside_its_request_or_ends_before_it_begins_is_drawn_all_the_same() -> None:
    story = Story()
    who = story.arrives(10)
    story.ends(40, who)
    (record,) = story.records()
    at = record.arrived_at
    record.stages += [Stage("early", at - 8 * MS, at + MS, {}), Stage("queue", at + 5 * MS, at + MS, {})]
    told = RecordingContents([record], [], [Pause(at - 9 * MS, at - 7 * MS, "gc")], [], 0)
    Page(report_page.render_page(build_view(told), "x")).whole()
    events = read_as_trace(perfetto.render_trace(told))
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0


def test_what_rises_and_falls_within_a_moment_of_the_tape_is_seen() -> None:
    records = [made(number, 2) for number in range(4)]
    for number, record in enumerate(records):
        record.stages, record.pauses = [], ()
        record.arrived_at, record.ended_at = 1000 + number, 1010 + number
    records[0].arrived_at, records[0].ended_at = 0, 1_000_000
    bins = build_view(RecordingContents(records, [], [], [], 0)).bins
    assert [bins[i].running for i in (0, 1, 199)] == [4, 1, 1]


def test_the_most_running_and_the_most_queued_are_each_of_their_own_instant() -> None:
    records = [made(number, 2) for number in range(5)]
    for number, record in enumerate(records):
        record.stages, record.pauses = [], ()
        record.arrived_at, record.ended_at = 0, 1_000_000
        if number:  # four wait for a moment, then all five run
            record.stages = [Stage("queue", 100, 200, {})]
    bins = build_view(RecordingContents(records, [], [], [], 0)).bins
    assert (bins[0].running, bins[0].queued) == (5, 4)
    assert (bins[1].running, bins[1].queued) == (5, 0)


def test_levels_are_how_many_intervals_hold_and_end_at_none() -> None:
    at, level = summary.count_concurrent([(0, 10), (5, 10), (10, 12), (3, 3)])
    assert dict(zip(at.tolist(), level.tolist())) == {0: 1, 3: 1, 5: 2, 10: 1, 12: 0}


# ── trace events ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_trace_is_valid_and_has_every_step_request_stage_and_pause(told: RecordingContents) -> None:
    events = read_as_trace(perfetto.render_trace(told))
    slices = [event for event in events if event["ph"] == "X"]
    assert sum("batch_size" in event["args"] for event in slices) == len(told.steps)
    assert sum("trace_id" in event["args"] for event in slices) == len(told.records)
    stages = sum(event["name"] == "decode" and event["pid"] == perfetto.REQUESTS for event in slices)
    assert stages == sum(record.find_stage("decode") is not None for record in told.records)
    assert sum(event["name"] == "gc" for event in slices) == 2
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"steps of toy (pid 1)", "pauses: gc"} <= tracks


def test_the_counters_of_a_trace_end_at_none_in_flight_and_none_waiting(told: RecordingContents) -> None:
    events = read_as_trace(perfetto.render_trace(told))
    for name in ("in flight", "waiting"):
        values = [event["args"][name] for event in events if event["ph"] == "C" and event["name"] == name]
        assert values[-1] == 0 and max(values) > 0
    (of_engine,) = {e["name"] for e in events if e["ph"] == "C" and e["pid"] == perfetto.ENGINES}
    assert of_engine == "scheduler of toy (pid 1)"


def test_slices_that_cut_each_other_are_on_tracks_of_their_own() -> None:
    def one(name: str, begin: int, end: int) -> TraceSlice:
        return TraceSlice(name, begin, end, {})

    lanes = assign_lanes(
        [one("c", 5, 15), one("a", 0, 10), one("b", 2, 5), one("d", 10, 12), one("e", 14, 20)]
    )
    assert [[piece.name for piece in lane] for lane in lanes] == [["a", "b", "d", "e"], ["c"]]


def test_two_steps_in_flight_at_once_are_whole_slices() -> None:
    steps = [StepRecord("toy", 1, i, i * 10_000, i * 10_000 + 15_000, 4, 0, 4, 0, 0, 4, 0) for i in range(50)]
    events = read_as_trace(perfetto.render_trace(RecordingContents([], steps, [], [], 0)))
    lengths = [event["dur"] for event in events if event["ph"] == "X"]
    assert lengths == [15.0] * 50


def test_a_stage_that_another_cuts_is_beside_its_request() -> None:
    story = Story()
    who = story.arrives(0)
    story.stage("search", 5, 20, who)
    story.stage("rank", 10, 30, who)
    story.ends(40, who)
    events = read_as_trace(perfetto.render_trace(RecordingContents(story.records(), [], [], [], 0)))
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    short = ids("a")[0].hex()[:8]
    assert names == [f"{short} chat toy", f"{short} chat toy (beside)"]
