"""Read a tape and write one HTML page that opens offline, and optionally a trace for Perfetto.

otel-infer report demo.tape                          writes demo.html here
otel-infer report demo.tape --perfetto demo.json     writes demo.json, for ui.perfetto.dev or chrome://tracing

The page loads nothing. It shows the verdict of `otel-infer explain`, percentiles, where the time went, a
timeline, and at most 200 requests one by one: the slowest by end to end, first token and gap between tokens,
and their interferers.
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
    """Adds the options of `report`."""
    parser.add_argument("tape", help="a file that `otel-infer run --tape` or `otel-infer dump` wrote")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="the page to write (default: the name of the tape with .html, in this folder)",
    )
    parser.add_argument(
        "--perfetto", metavar="FILE", help="also write engines and requests as Chrome trace events to FILE"
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the page, and the trace if given.

    Returns 2 if the tape cannot be read or a file not written, else 0.
    """
    from otel_infer.cli.report import page as report_page
    from otel_infer.cli.report import perfetto
    from otel_infer.cli.report.summary import build_view

    source = Path(arguments.tape)
    page = Path(arguments.out or f"{source.stem}.html")
    trace = Path(arguments.perfetto) if arguments.perfetto else None
    try:
        recording = read_recording(source)
        view = build_view(recording)
        _write_file(page, report_page.render_page(view, source.name), source)
        if trace is not None:
            _write_file(trace, perfetto.render_trace(recording), source)
    except (file.InvalidRecording, OSError) as reason:
        print(f"otel-infer report: {reason}", file=sys.stderr)
        return 2
    for path, note in (
        (page, _summarise_report(view)),
        (trace, "open it in ui.perfetto.dev or chrome://tracing"),
    ):
        if path is not None:
            print(f"{path}  {path.stat().st_size / 1024:.0f} KiB  {note}")
    return 0


def read_recording(path: Path) -> RecordingContents:
    """Returns the contents of a tape within its period; raises `InvalidRecording` or `OSError`."""
    from otel_infer.analysis.diagnosis.unfollowed import describe_unfollowed, select_explained
    from otel_infer.assembly.assembler import Assembler
    from otel_infer.cli.replay import find_running_since, measure_abandoned_share, read_recent_records
    from otel_infer.cli.report.summary import RecordingContents

    assembler = Assembler()
    objectives = file.read_objectives(path)
    finished = list(read_recent_records(path, assembler, keeps_steps=True))
    unfollowed = describe_unfollowed(finished)
    shown = select_explained(finished, unfollowed)
    began = file.read_began_at(path)
    arrived = [request.arrived_at for request in assembler.open_requests.values() if request.submitted]
    unfinished = sorted(max(at, began) for at in arrived)
    steps = [step for step in assembler.drain_steps() if step.ended_at > began]
    pauses = [pause for pause in assembler.pauses.drain_pauses() if pause.ended_at > began]
    non_engine = sum(not record.operation for record in finished) - sum(
        not record.operation for record in shown
    )
    return RecordingContents(
        shown, steps, pauses, unfinished, non_engine, objectives, began, find_running_since(assembler),
        assembler.processes.cpu_usage, measure_abandoned_share(assembler), unfollowed,
    )  # fmt: skip


def _write_file(path: Path, text: str, source: Path) -> None:
    if path.exists() and path.samefile(source):
        raise OSError(f"{path} is the tape itself; give another file")
    path.write_text(text, encoding="utf-8")


def _summarise_report(view: ReportView) -> str:
    requests = f"{len(view.recording.records)} requests, {len(view.shown)} of them one by one"
    return f"{view.diagnosis.verdict}; {requests}"
