"""Read a tape and write what it tells as one HTML page that opens offline, and as a trace for Perfetto.

otel-infer report demo.tape                          writes demo.html here
otel-infer report demo.tape --perfetto demo.json     writes demo.json, for ui.perfetto.dev or chrome://tracing

The page loads nothing from anywhere. It shows the verdict of `otel-infer explain`, percentiles, where the time went, the
tape over time, and at most 200 requests one by one: the slowest by end to end, first token and gap between tokens, and
those who held them up.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from otel_infer.sidecar.recording import file

if TYPE_CHECKING:
    from otel_infer.cli.report.summary import RecordingContents, ReportView


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `report`."""
    parser.add_argument("tape", help="a file that `otel-infer run --tape` or `otel-infer dump` wrote")
    parser.add_argument("--out", metavar="FILE", help="the page (the tape's name with .html, in this folder)")
    parser.add_argument(
        "--perfetto", metavar="FILE", help="write this too: engines and requests as Chrome trace events"
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes a page, and a trace if asked for; 2 where the tape cannot be read or a file not be written."""
    from otel_infer.cli.report import page as report_page
    from otel_infer.cli.report import perfetto
    from otel_infer.cli.report.summary import build_view

    source = Path(arguments.tape)
    page = Path(arguments.out or f"{source.stem}.html")
    trace = Path(arguments.perfetto) if arguments.perfetto else None
    try:
        told = read_recording(source)
        seen = build_view(told)
        _write_file(page, report_page.render_page(seen, source.name), source)
        if trace is not None:
            _write_file(trace, perfetto.render_trace(told), source)
    except (file.InvalidRecording, OSError) as reason:
        print(f"otel-infer report: {reason}", file=sys.stderr)
        return 2
    for path, said in (
        (page, _summarise_report(seen)),
        (trace, "open it in ui.perfetto.dev or chrome://tracing"),
    ):
        if path is not None:
            print(f"{path}  {path.stat().st_size / 1024:.0f} KiB  {said}")
    return 0


def read_recording(path: Path) -> RecordingContents:
    """Everything that a tape tells of its time; raises as `tape.read` does."""
    from otel_infer.assembly.assembler import Assembler
    from otel_infer.cli.replay import read_recent_records, running_since
    from otel_infer.cli.report.summary import RecordingContents

    assembler = Assembler()
    promised = file.read_objectives(path)
    told = read_recent_records(path, assembler, keeps_steps=True)
    inferences = [record for record in told if record.operation]
    began = file.read_began_at(path)
    arrived = [request.arrived_at for request in assembler.open_requests.values() if request.submitted]
    unfinished = sorted(max(at, began) for at in arrived)
    steps = [step for step in assembler.drain_steps() if step.ended_at > began]
    pauses = [pause for pause in assembler.drain_pauses() if pause.ended_at > began]
    elsewhere = len(told) - len(inferences)
    return RecordingContents(
        inferences, steps, pauses, unfinished, elsewhere, promised, began, running_since(assembler)
    )


def _write_file(path: Path, text: str, source: Path) -> None:
    if path.exists() and path.samefile(source):
        raise OSError(f"{path} is the tape itself")
    path.write_text(text, encoding="utf-8")


def _summarise_report(seen: ReportView) -> str:
    requests = f"{len(seen.recording.records)} requests, {len(seen.shown)} of them one by one"
    return f"{seen.diagnosis.verdict}; {requests}"
