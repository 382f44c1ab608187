"""Say which complaint about latency the requests of a server amount to, with the evidence, and what to change first.

otel-infer explain                                  the last two minutes of the one server that runs here; leaves no file
otel-infer explain --server 4711                    of several, the one with this process
otel-infer explain --request chatcmpl-abc           one request, by its response id, or by the beginning of its trace id
otel-infer explain demo.tape                        the requests of a tape, now or later, here or elsewhere
otel-infer explain after.tape --against before.tape
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from otel_infer import semconv
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.cli import running_server
from otel_infer.cli.explain import client_spans
from otel_infer.cli.explain.client_spans import ClientLatency
from otel_infer.sidecar.recording import dump_request, file

SHOWN_CAUSES = 4
SHOWN_TENANTS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `explain`."""
    parser.add_argument(
        "tape",
        nargs="?",
        help="a file that `otel-infer run --tape` or `otel-infer dump` wrote; without one, a running server is asked",
    )
    running_server.add_arguments(parser)
    parser.add_argument(
        "--request",
        metavar="ID",
        help="only this one: a trace id, its beginning, a span id, or a response id",
    )
    parser.add_argument(
        "--against", metavar="TAPE", help="compare with the requests of another tape, stage by stage"
    )
    parser.add_argument(
        "--client",
        metavar="FILE",
        help="spans of `otel_infer.instrumentation.httpx` (OTLP JSON, or of ConsoleSpanExporter): how long the readers waited elsewhere",
    )
    parser.add_argument(
        "--worst", type=int, default=5, metavar="N", help="how many slow requests to show (5)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Explains a tape, or what a sidecar holds; 2 where that cannot be had or holds no such request."""
    try:
        told = _read_input(arguments)
        records = told.records
        felt = _read_client_latency(records, arguments.client)
        if felt is not None and (arguments.request or arguments.against):
            raise client_spans.InvalidSpanFile("--client goes with neither --request nor --against")
        if arguments.against:
            return _compare_recordings(
                _read_inferences(Path(arguments.against)).records, records, arguments.json
            )
    except BrokenPipeError:
        raise
    except (dump_request.DumpFailed, file.InvalidRecording, client_spans.InvalidSpanFile, OSError) as reason:
        print(f"otel-infer explain: {reason}", file=sys.stderr)
        return 2
    if arguments.request:
        return _explain_request(records, arguments.request, arguments.json)
    return _explain_all(told, arguments.worst, arguments.json, felt)


class ExplainInput(NamedTuple):
    """`since`: from which instant on everything is told. `running`: since when those run that have not ended."""

    records: list[RequestRecord]
    complete_since: int
    running_since: list[int]


def _read_input(arguments: argparse.Namespace) -> ExplainInput:
    if arguments.tape is None:
        with running_server.open_dump(
            running_server.find_server_folder(arguments.rings, arguments.server)
        ) as told:
            return _read_inferences(told, arguments.request)
    if arguments.rings or arguments.server:
        raise dump_request.DumpFailed("a tape, or a running server by --rings and --server: not both")
    return _read_inferences(Path(arguments.tape), arguments.request)


def _read_client_latency(records: list[RequestRecord], path: str | None) -> ClientLatency | None:
    """What their readers felt; raises `BadSpans`, also where none of these requests is in the file."""
    if not path:
        return None
    felt = client_spans.compare_latency(records, client_spans.read_client_requests(Path(path)))
    if felt is None:
        raise client_spans.InvalidSpanFile(
            f"{path}: none of its spans is of one of these {len(records)} requests"
        )
    return felt


def _read_inferences(path: Path, wanted: str | None = None) -> ExplainInput:
    """Those that were to reach an engine: health checks and the like have no complaint. One that is wanted may be any on the tape."""
    from otel_infer.assembly.assembler import Assembler
    from otel_infer.cli.replay import read_recent_records, read_records, running_since

    assembler = Assembler()
    found = [
        record
        for record in (read_records if wanted else read_recent_records)(path, assembler)
        if record.operation
    ]
    return ExplainInput(found, file.read_began_at(path), running_since(assembler))


# ── all ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _explain_all(told: ExplainInput, worst: int, as_json: bool, felt: ClientLatency | None = None) -> int:
    from otel_infer.analysis.diagnosis.device_bottleneck import find_device_bottlenecks
    from otel_infer.analysis.diagnosis.rules import diagnose
    from otel_infer.analysis.diagnosis.symptoms import SYMPTOMS

    records = told.records
    diagnosis = diagnose(*told)
    slowest = sorted(records, key=lambda record: -record.duration_ns)[: max(worst, 0)]
    if as_json:
        findings = [
            {**finding._asdict(), **SYMPTOMS[finding.symptom]._asdict(), "change": finding.change}
            for finding in diagnosis.findings
        ]
        said = {
            **diagnosis._asdict(),
            "findings": findings,
            "tenants": summarise_tenants(records),
            "devices": [
                {**one._asdict(), **one.advice._asdict()} for one in find_device_bottlenecks(records)
            ],
            "worst": [record_with_interferer(record) for record in slowest],
            "readers": felt._asdict() if felt is not None else None,
        }
        print(json.dumps(said))
        return 0
    from otel_infer.cli import terminal

    out = terminal.make_console()
    out.print(terminal.latency_table(records))
    out.print()
    if not diagnosis.findings:
        out.print(f"{diagnosis.verdict}: {diagnosis.note}", style="bold")
    for number, finding in enumerate(diagnosis.findings):
        row = SYMPTOMS[finding.symptom]
        out.print(f"{'' if number == 0 else 'also: '}“{row.complaint}”: {row.meaning}", style="bold")
        for evidence in finding.evidence:
            out.print(f"  · {evidence}")
        out.print(f"  change first: {finding.change}")
    if felt is not None:
        out.print(felt.to_sentence())
    out.print()
    out.print("where the time of the slowest tenth went", style="bold")
    for cause, share in diagnosis.causes.items():
        if share >= 0.005:
            out.print(f"  {cause:<16} {100 * share:5.1f} %  {semconv.describe_cause(cause)}")
    for line in map(_format_tenant, summarise_tenants(records)):
        out.print(line, markup=False)
    for one in find_device_bottlenecks(records):
        out.print(
            f"the device, in {one.stage}: {one.bottleneck} in {one.requests} of {one.timed}: {one.advice.meaning}"
        )
        out.print(f"  makes it quicker: {one.advice.change}")
    out.print()
    out.print(f"the slowest {len(slowest)}", style="bold")
    for record in slowest:
        out.print("  " + summarise_record(record))
    return 0


def summarise_tenants(records: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    """The tenants with the most requests, where tenants are told; p95 in ms, None where nothing had a first token."""
    by_name: dict[str, list[RequestRecord]] = {}
    for record in records:
        name = record.attributes.get(semconv.TENANT)
        if name:
            by_name.setdefault(str(name), []).append(record)
    most = sorted(by_name.items(), key=lambda item: (-len(item[1]), item[0]))[:SHOWN_TENANTS]
    return [{"tenant": name, **_summarise_requests(theirs)} for name, theirs in most]


def _summarise_requests(records: list[RequestRecord]) -> dict[str, Any]:
    causes: Counter[str] = Counter()
    for record in records:
        causes.update(record.breakdown.causes if record.breakdown is not None else {})
    top, length = causes.most_common(1)[0] if causes else ("", 0)
    return {
        "requests": len(records),
        "ttft_p95_ms": _p95_ms([record.ttft_ns for record in records if record.ttft_ns]),
        "e2e_p95_ms": _p95_ms([record.duration_ns for record in records]),
        "top_cause": top,
        "top_cause_share": length / max(causes.total(), 1),
    }


def _p95_ms(lengths: list[int]) -> float | None:
    import numpy as np

    return float(np.percentile(lengths, 95)) / 1e6 if lengths else None


def _format_tenant(row: dict[str, Any]) -> str:
    ttft = f"{row['ttft_p95_ms']:.0f} ms" if row["ttft_p95_ms"] is not None else "none"
    return (
        f"tenant {row['tenant']}: {row['requests']} requests, p95 to first token {ttft}, end to end "
        f"{row['e2e_p95_ms']:.0f} ms; {row['top_cause_share']:.0%} of the time is {row['top_cause'].replace('_', ' ')}"
    )


def summarise_record(record: RequestRecord) -> str:
    """One request: how long it took, what that went into, and who held it up."""
    from otel_infer.export.console import format_duration

    said = f"{record.trace_id.hex()[:8]}  {format_duration(record.duration_ns)}"
    if record.breakdown is None:
        return said
    largest = sorted(record.breakdown.causes.items(), key=lambda item: -item[1])[:SHOWN_CAUSES]
    said += ": " + ", ".join(
        f"{cause.replace('_', ' ')} {format_duration(length)}" for cause, length in largest
    )
    offender = record.breakdown.interferer
    if offender is not None:
        said += f"; held up {format_duration(offender.length)} by trace {offender.trace_id.hex()[:8]}"
    return said


def record_with_interferer(record: RequestRecord) -> dict[str, Any]:
    """A request as plain data; lengths in ms."""
    from otel_infer.cli.replay import record_to_dict as plain

    offender = record.breakdown.interferer if record.breakdown is not None else None
    by = {"trace_id": offender.trace_id.hex(), "ms": offender.length / 1e6} if offender is not None else None
    return {**plain(record), "interferer": by}


# ── one ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _explain_request(records: Sequence[RequestRecord], wanted: str, as_json: bool) -> int:
    found = [record for record in records if _matches_id(record, wanted)]
    if len(found) != 1:
        several = ", ".join(
            f"trace {record.trace_id.hex()} span {record.span_id.hex()}" for record in found[:5]
        )
        reason = (
            f"several requests: {several}"
            if found
            else f"none of its {len(records)} requests is {wanted}, unless it has not ended"
        )
        print(f"otel-infer explain: {reason}", file=sys.stderr)
        return 2
    (record,) = found
    if as_json:
        print(json.dumps(record_with_interferer(record)))
        return 0
    from otel_infer.cli import terminal

    out = terminal.make_console()
    for line in terminal.render_waterfall(record):
        out.print(line)
    for cause, length in (
        sorted(record.breakdown.causes.items(), key=lambda item: -item[1]) if record.breakdown else ()
    ):
        share = 100 * length / max(record.duration_ns, 1)
        out.print(f"  {cause:<16} {length / 1e6:9.1f} ms {share:5.1f} %  {semconv.describe_cause(cause)}")
    out.print(summarise_record(record))
    return 0


def _matches_id(record: RequestRecord, wanted: str) -> bool:
    is_of_trace = record.trace_id.hex().startswith(wanted.lower())
    return is_of_trace or record.span_id.hex() == wanted.lower() or wanted in record.attributes.values()


# ── two tapes ────────────────────────────────────────────────────────────────────────────────────────────────────


def _compare_recordings(before: list[RequestRecord], after: list[RequestRecord], as_json: bool) -> int:
    from otel_infer.cli.explain.comparison import compare_requests, find_workload_changes

    rows = compare_requests(before, after)
    if as_json:
        print(json.dumps([row.to_dict() for row in rows], allow_nan=False))
        return 0
    print(
        f"{len(before)} requests before, {len(after)} after; p95 in ms, with the 95 % interval of the difference"
    )
    for line in find_workload_changes(before, after):
        print(line)
    for row in rows:
        change = f"{row.low:+.1f} to {row.high:+.1f}"
        print(f"  {row.name:<20} {row.before:9.1f} → {row.after:9.1f}   {change:<22} {row.verdict}")
    return 0
