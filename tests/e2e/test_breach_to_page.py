"""From a missed objective to the report: the sidecar writes a tape, and its page shows what happened.

A minute of ordinary load comes first, because the tape includes what preceded the breach. The tests take more than a minute.
"""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from otel_infer.analysis.diagnosis.symptoms import SYMPTOMS
from otel_infer.cli.report import command as report
from otel_infer.sidecar.recording import file
from tests.support.breach import OBJECTIVES, Breach, cause_breach
from tests.support.browser import CHROMIUM, SKIP_REASON, dump_page, offline_prefix
from tests.support.pages import Page
from tests.support.trace_events import read_as_trace

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(300)]

BEFORE_S = 60.0


def command(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "otel_infer", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def breach(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Breach:
    return cause_breach(tmp_path_factory.mktemp("breach"), tiny_llama, BEFORE_S + 4)


@pytest.fixture(scope="module")
def page_path(breach: Breach) -> Path:
    """The page of the tape, from `otel-infer report`."""
    out = breach.tape.parent.parent / "breach.html"
    command("report", str(breach.tape), "--out", str(out))
    return out


def test_breach_tape_includes_the_preceding_minute(breach: Breach) -> None:
    assert len(breach.frozen) >= 3
    assert file.read_header(breach.tape)["by"] == "slo" and file.read_header(breach.tape)["slo"] == OBJECTIVES
    recording = report.read_recording(breach.tape)
    by_trace = {record.trace_id.hex(): record for record in recording.records}
    assert {*breach.ordinary, *breach.frozen} <= set(by_trace)
    breached_at = min(by_trace[trace_id].ended_at for trace_id in breach.frozen)
    first = min(record.arrived_at for record in recording.records)
    assert breached_at - first >= BEFORE_S * 1e9
    assert breached_at - min(step.started_at for step in recording.steps) >= BEFORE_S * 1e9
    assert not any(record.telemetry_lost for record in recording.records)


def test_user_content_is_neither_on_tape_nor_page(breach: Breach, page_path: Path) -> None:
    trace = page_path.with_suffix(".json")
    command("report", str(breach.tape), "--out", str(page_path), "--perfetto", str(trace))
    outputs = {
        "the tape": gzip.decompress(breach.tape.read_bytes()),
        "its name": str(breach.tape).encode(),
        "the page": page_path.read_bytes(),
        "the trace": trace.read_bytes(),
        "output of explain": command("explain", str(breach.tape), "--json").encode(),
    }
    assert len(read_as_trace(trace.read_text())) > 1000
    assert len(outputs["the tape"]) > 10_000 and len(outputs["the page"]) > 10_000
    found = [
        f"{kind} in {where}"
        for where, content in outputs.items()
        for kind, canary in breach.canaries.items()
        if canary.encode() in content
    ]
    assert found == []


@pytest.mark.skipif(CHROMIUM is None, reason=SKIP_REASON)
def test_page_works_offline_and_shows_the_breach_first(
    breach: Breach, page_path: Path, tmp_path: Path
) -> None:
    dom, urls = dump_page(page_path.as_uri(), tmp_path, offline_prefix())
    page = Page(dom)
    assert urls == set()
    assert "scripted" in page.all("html")[0]["class"].split()
    explained = json.loads(command("explain", str(breach.tape), "--json"))
    (verdict,) = page.all("h2", id="verdict")
    assert verdict["data-verdict"] == explained["verdict"] == "stutter"
    assert page.text("verdict").endswith(SYMPTOMS["stutter"].meaning)
    rows = [row["id"] for row in page.all("tr") if "detail" in row.get("class", "").split()]
    traces = [re.search(r"trace ([0-9a-f]{32})", page.text(row))[1] for row in rows]  # type: ignore[index]
    assert set(traces[: len(breach.frozen)]) == set(breach.frozen)
    assert f"{len(breach.frozen)} missed an objective" in page.text("header")
    assert page.text("table").count("missed itl") >= len(breach.frozen)
    assert len(page.all("line", class_="missed")) == len(breach.frozen)
    arrived = {
        trace: float(re.search(r"arrived at ([0-9.]+) s", page.text(row))[1])  # type: ignore[index]
        for trace, row in zip(traces, rows)
    }
    assert set(breach.ordinary) <= set(arrived)
    before = min(arrived[trace] for trace in breach.frozen) - min(arrived[t] for t in breach.ordinary)
    assert before >= BEFORE_S
    ordinary = rows[traces.index(breach.ordinary[0])]
    assert len(page.data(ordinary)["length"]) == 5  # the steps after the first token, a minute earlier
