"""Name the symptom of slow requests, with the evidence, and what to change first.

otel-infer explain                                  the last two minutes of the only server here; leaves no file
otel-infer explain --server 4711                    the server with this process, if several run
otel-infer explain --request chatcmpl-abc           one request, by response id or beginning of trace id
otel-infer explain demo.tape --since 14:05          the requests of a tape, also on another machine
otel-infer explain after.tape --against before.tape
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_infer import semconv
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.cli import running_server
from otel_infer.cli.errors import CommandError
from otel_infer.cli.explain import client_spans, period
from otel_infer.cli.explain.client_spans import ClientLatency
from otel_infer.cli.explain.input import ExplainInput, read_inferences, read_input
from otel_infer.cli.explain.tenants import format_tenant, summarise_tenants
from otel_infer.sidecar.recording import dump_request, file

if TYPE_CHECKING:
    from rich.console import Console

    from otel_infer.analysis.diagnosis.rules import Diagnosis

SHOWN_CAUSES = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `explain`."""
    parser.add_argument(
        "tape",
        nargs="?",
        help="a file that `otel-infer run --tape` or `otel-infer dump` wrote; default: a running server",
    )
    running_server.add_arguments(parser)
    period.add_arguments(parser)
    parser.add_argument(
        "--request",
        metavar="ID",
        help="one request: a trace id or its beginning, a span id, or a response id",
    )
    parser.add_argument(
        "--against", metavar="TAPE", help="compare with the requests of another tape, stage by stage"
    )
    parser.add_argument(
        "--client",
        metavar="FILE",
        help="spans of `otel_infer.instrumentation.httpx` (OTLP JSON, or by ConsoleSpanExporter): adds the latency outside the server",
    )
    parser.add_argument(
        "--worst", type=int, default=5, metavar="N", help="how many slow requests to show (5)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Explains a tape or a running server. Returns 2 if it cannot be read or has no such request, else 0."""
    try:
        data = read_input(arguments)
        records = data.records
        latency = _read_client_latency(records, arguments.client)
        if latency is not None and (arguments.request or arguments.against):
            raise CommandError("--client can be combined with neither --request nor --against")
        if arguments.against:
            return _compare_recordings(
                read_inferences(Path(arguments.against)).records, records, arguments.json
            )
    except BrokenPipeError:
        raise
    except (dump_request.DumpFailed, file.InvalidRecording, client_spans.InvalidSpanFile, OSError) as reason:
        print(f"otel-infer explain: {reason}", file=sys.stderr)
        return 2
    if arguments.request:
        return _explain_request(records, arguments.request, arguments.json)
    return _explain_all(data, arguments.worst, arguments.json, latency)


def _read_client_latency(records: list[RequestRecord], path: str | None) -> ClientLatency | None:
    """Returns the client-side latency.

    None without a file. Raises `InvalidSpanFile`, also if no request matches.
    """
    if not path:
        return None
    latency = client_spans.compare_latency(records, client_spans.read_client_requests(Path(path)))
    if latency is None:
        raise client_spans.InvalidSpanFile(
            f"{path}: none of its spans matches one of these {len(records)} requests"
        )
    return latency


# ── all requests ─────────────────────────────────────────────────────────────────────────────────────────────────


def _explain_all(data: ExplainInput, worst: int, as_json: bool, latency: ClientLatency | None = None) -> int:
    records, diagnosis = data.records, data.diagnose()
    slowest = sorted(records, key=lambda record: -record.duration_ns)[: max(worst, 0)]
    if as_json:
        print(json.dumps(_explanation_to_dict(data, diagnosis, slowest, latency)))
        return 0
    from otel_infer.cli import terminal

    out = terminal.make_console()
    out.print(data.source.to_sentence(), markup=False)
    out.print(*data.hang, sep="\n", markup=False)
    if records:
        out.print(terminal.make_latency_table(records))
    out.print()
    _print_findings(out, diagnosis)
    if latency is not None:
        out.print(latency.to_sentence())
    if diagnosis.causes:
        out.print()
        _print_causes(out, diagnosis, data)
    if slowest:
        out.print(f"\nthe slowest {len(slowest)}", style="bold")
    for record in slowest:
        out.print("  " + summarise_record(record))
    return 0


def _explanation_to_dict(
    data: ExplainInput, diagnosis: Diagnosis, slowest: Sequence[RequestRecord], latency: ClientLatency | None
) -> dict[str, Any]:
    from otel_infer.analysis.diagnosis.device_bottleneck import find_device_bottlenecks
    from otel_infer.analysis.diagnosis.symptoms import SYMPTOMS

    findings = [
        {**finding._asdict(), **SYMPTOMS[finding.symptom]._asdict(), "change": finding.change}
        for finding in diagnosis.findings
    ]
    for finding in findings:
        del finding["advice"]  # `change` states it
    devices = [
        {**limit._asdict(), **limit.advice._asdict()} for limit in find_device_bottlenecks(data.records)
    ]
    return {
        "source": data.source.to_dict(),
        "hang": [*data.hang],
        **diagnosis._asdict(),
        "findings": findings,
        "tenants": summarise_tenants(data.records),
        "devices": devices,
        "worst": [record_with_interferer(record) for record in slowest],
        "client_latency": latency._asdict() if latency is not None else None,
    }


def _print_findings(out: Console, diagnosis: Diagnosis) -> None:
    from otel_infer.analysis.diagnosis.symptoms import SYMPTOMS

    if not diagnosis.findings:
        out.print(f"{diagnosis.verdict}: {diagnosis.note}", style="bold")
    for number, finding in enumerate(diagnosis.findings):
        row = SYMPTOMS[finding.symptom]
        out.print(f"{'' if number == 0 else 'also: '}“{row.complaint}”: {row.meaning}", style="bold")
        for evidence in (diagnosis.describe_share(finding), *finding.evidence):
            out.print(f"  · {evidence}")
        out.print(f"  change first: {finding.change}")


def _print_causes(out: Console, diagnosis: Diagnosis, data: ExplainInput) -> None:
    """Prints the causes of the slowest requests, the tenants, and the limits of the device or of the CPU."""
    from otel_infer.analysis.diagnosis.rules import HEALTHY
    from otel_infer.analysis.diagnosis.slow_model import describe_model_limits

    out.print("where the time of the slowest tenth went", style="bold")
    for cause, share in diagnosis.causes.items():
        if share >= 0.005:
            out.print(f"  {cause:<16} {100 * share:5.1f} %  {semconv.describe_cause(cause)}")
    for line in map(format_tenant, summarise_tenants(data.records)):
        out.print(line, markup=False)
    is_fine = diagnosis.verdict == HEALTHY  # else the change of the symptom comes first
    for limit, change in describe_model_limits(data.records, data.cpu_usage if is_fine else ()):
        out.print(limit)
        out.print(f"  makes it faster: {change}")


def summarise_record(record: RequestRecord) -> str:
    """Returns one line: trace id, duration, largest causes and interferer of a request."""
    from otel_infer.export.console import format_duration

    line = f"{record.trace_id.hex()[:8]}  {format_duration(record.duration_ns)}"
    if record.breakdown is None:
        return line
    largest = sorted(record.breakdown.causes.items(), key=lambda item: -item[1])[:SHOWN_CAUSES]
    line += ": " + ", ".join(
        f"{cause.replace('_', ' ')} {format_duration(length)}" for cause, length in largest
    )
    interferer = record.breakdown.interferer
    if interferer is not None:
        line += f"; delayed {format_duration(interferer.length)} by trace {interferer.trace_id.hex()[:8]}"
    return line


def record_with_interferer(record: RequestRecord) -> dict[str, Any]:
    """Returns a request and its interferer as JSON-compatible data; lengths in ms."""
    from otel_infer.cli.replay import record_to_dict

    interferer = record.breakdown.interferer if record.breakdown is not None else None
    interference = (
        {"trace_id": interferer.trace_id.hex(), "ms": interferer.length / 1e6}
        if interferer is not None
        else None
    )
    return {**record_to_dict(record), "interferer": interference}


# ── one request ──────────────────────────────────────────────────────────────────────────────────────────────────


def _explain_request(records: Sequence[RequestRecord], request_id: str, as_json: bool) -> int:
    matches = [record for record in records if _matches_id(record, request_id)]
    if len(matches) != 1:
        several = ", ".join(
            f"trace {record.trace_id.hex()} span {record.span_id.hex()}" for record in matches[:5]
        )
        reason = (
            f"{request_id} matches several requests: {several}"
            if matches
            else f"no finished request of {len(records)} matches {request_id}; it may still be running"
        )
        print(f"otel-infer explain: {reason}", file=sys.stderr)
        return 2
    (record,) = matches
    if as_json:
        print(json.dumps(record_with_interferer(record)))
        return 0
    from otel_infer.analysis.diagnosis.code_places import describe_place
    from otel_infer.cli import terminal

    out = terminal.make_console()
    for line in terminal.render_waterfall(record):
        out.print(line)
    for cause, length in (
        sorted(record.breakdown.causes.items(), key=lambda item: -item[1]) if record.breakdown else ()
    ):
        share = 100 * length / max(record.duration_ns, 1)
        out.print(f"  {cause:<16} {length / 1e6:9.1f} ms {share:5.1f} %  {semconv.describe_cause(cause)}")
    for sample in record.code_samples:
        out.print(f"  late {sample.reason.replace('_', ' ')}: {describe_place(sample)}", markup=False)
    out.print(summarise_record(record))
    return 0


def _matches_id(record: RequestRecord, request_id: str) -> bool:
    is_in_trace = record.trace_id.hex().startswith(request_id.lower())
    return (
        is_in_trace or record.span_id.hex() == request_id.lower() or request_id in record.attributes.values()
    )


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
