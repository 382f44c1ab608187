"""Read a tape: print its requests, one line each, or export them as the standard OTEL_* variables configure.

The code is that of a live server, so exported spans have the same trace and span ids as when they were
recorded.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_infer import _clock, semconv
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.config import environment
from otel_infer.sidecar.recording import file

if TYPE_CHECKING:
    from otel_infer.assembly.assembler import Assembler
    from otel_infer.sidecar.pipeline import Pipeline

SEND_TIMEOUT_S = 30.0
_NEVER = 1 << 63


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `replay`."""
    parser.add_argument("tape", help="a file that `otel-infer run --tape` or `otel-infer dump` wrote")
    parser.add_argument("--send", action="store_true", help="export spans over OTLP instead of printing")
    parser.add_argument("--json", action="store_true", help="one JSON object per request")


def run(arguments: argparse.Namespace) -> int:
    """Prints or exports one tape.

    Returns 2 if it cannot be read, 1 if the destination refused spans, else 0.
    """
    from otel_infer.assembly.assembler import Assembler

    try:
        if arguments.send:
            return _export_recording(Path(arguments.tape))
        assembler = Assembler()
        for record in read_records(Path(arguments.tape), assembler):
            if not arguments.json:
                _print_starts(assembler, record.ended_at)
            print(json.dumps(record_to_dict(record)) if arguments.json else _format_record(record))
        if not arguments.json:
            _print_starts(assembler, _NEVER)
    except BrokenPipeError:
        raise
    except (file.InvalidRecording, OSError) as reason:
        print(f"otel-infer replay: {reason}", file=sys.stderr)
        return 2
    return 0


def read_records(
    path: Path, assembler: Assembler | None = None, *, keeps_steps: bool = False
) -> Iterator[RequestRecord]:
    """Yields the finished requests of a tape, in the order in which they ended.

    Process starts stay in `assembler`. Steps and pauses, which are many, stay there only with `keeps_steps`.
    """
    from otel_infer.analysis.finish import finish_requests
    from otel_infer.assembly.assembler import Assembler
    from otel_infer.assembly.requests.ended_requests import SETTLED_NS

    assembler = assembler or Assembler()
    horizon = 0
    for batch in file.read_batches(path):
        horizon = batch.horizon
        assembler.feed_events(batch.recorded_events)
        _discard_unused(assembler, keeps_steps)
        yield from finish_requests(assembler, horizon)
    yield from finish_requests(assembler, horizon + SETTLED_NS)


def _discard_unused(assembler: Assembler, keeps_steps: bool) -> None:
    """Discards results that the caller does not read, which bounds the memory for a long tape."""
    assembler.pauses.drain_marks()
    assembler.workers.drain_executions()
    if not keeps_steps:
        assembler.drain_steps()
        assembler.pauses.drain_pauses()


def read_recent_records(
    path: Path, assembler: Assembler | None = None, *, keeps_steps: bool = False
) -> list[RequestRecord]:
    """Returns the finished requests of a tape, except requests that ended before its period.

    A flight recorder keeps earlier requests only to explain the others.
    """
    began_at = file.read_began_at(path)
    records = read_records(path, assembler, keeps_steps=keeps_steps)
    return [record for record in records if record.ended_at > began_at]


def find_running_since(assembler: Assembler) -> list[int]:
    """Returns for each unfinished running request when it was scheduled, or else arrived (monotonic ns)."""
    running = [
        request for request in assembler.open_requests.values() if request.is_running and not request.ended_at
    ]
    return [request.scheduled_at or request.arrived_at for request in running]


def measure_abandoned_share(assembler: Assembler) -> float:
    """Returns the share of the engines' step time that generated for clients that had left."""
    busy, abandoned = assembler.workers.measure_work()
    return abandoned / max(busy, 1)


def record_to_dict(record: RequestRecord) -> dict[str, Any]:
    """Returns a request as JSON-compatible data; lengths in ms."""
    from otel_infer.analysis.diagnosis.code_places import describe_place

    steps = record.steps
    return {
        "trace_id": record.trace_id.hex(),
        "operation": record.operation,
        "model": record.model,
        "duration_ms": record.duration_ns / 1e6,
        "ttft_ms": record.ttft_ns / 1e6 or None,
        "error_type": record.error_type or None,
        "failed_stage": record.failed_stage or None,
        "input_tokens": record.input_tokens,
        "output_tokens": record.output_tokens,
        "stages": _stage_durations_ms(record),
        "causes_ms": {cause: length / 1e6 for cause, length in record.breakdown.causes.items()}
        if record.breakdown
        else {},
        "code": [describe_place(sample) for sample in record.code_samples],
        "decode_steps": max(len(steps) - 1, 0) if steps is not None else 0,
        semconv.TELEMETRY_LOST: record.telemetry_lost,
    }


def _stage_durations_ms(record: RequestRecord) -> dict[str, float]:
    """Returns the length of each stage in ms; repeated stages are summed."""
    lengths: dict[str, float] = {}
    for stage in record.stages:
        lengths[stage.name] = lengths.get(stage.name, 0.0) + (stage.ended_at - stage.started_at) / 1e6
    return lengths


def _print_starts(assembler: Assembler, horizon: int) -> None:
    """Prints the process starts that were complete before `horizon` (monotonic ns)."""
    from otel_infer.export.console import format_start

    for start in assembler.drain_starts(horizon):
        print(format_start(start))


def _format_record(record: RequestRecord) -> str:
    from otel_infer.export.console import format_request

    return format_request(record)


def _export_recording(path: Path) -> int:
    from otel_infer.config.resource import detect_resource
    from otel_infer.ringbuffer.merged_reader import MergedReader
    from otel_infer.sidecar.main import make_pipeline

    # Disables inputs and outputs of this machine: the tape alone is exported.
    settings = environment.from_env(
        environment.child_environment(
            enabled="on", tape="", request_log="", gpu_metrics="off", metrics_port=""
        )
    )
    pipeline = make_pipeline(settings, detect_resource(), MergedReader(), show=False)
    _feed_recording(path, pipeline)
    sender = pipeline.sender
    if sender is None:
        print("otel-infer replay: OTEL_TRACES_EXPORTER is none, so nothing was sent", file=sys.stderr)
        return 2
    refused = sum(sender.lost.values())
    print(f"{pipeline.requests} requests, {sender.accepted} spans accepted, {refused} refused")
    if refused:
        print(f"otel-infer replay: the destination refused spans: {sender.last_refusal}", file=sys.stderr)
    return 1 if refused else 0


def _feed_recording(path: Path, pipeline: Pipeline) -> None:
    """Exports the events of a tape through the pipeline, and closes it."""

    horizon = 0
    for batch in file.read_batches(path):
        horizon = batch.horizon
        pipeline.assembler.feed_events(batch.recorded_events)
        pipeline.export_requests(horizon)
        for sink in pipeline.exporters:
            sink.flush(horizon)
        if pipeline.sender is not None:
            pipeline.sender.flush(SEND_TIMEOUT_S)  # a tape is read faster than it can be sent
    pipeline.export_without_grace(horizon)
    pipeline.flush(SEND_TIMEOUT_S)
    pipeline.run_cycle(_clock.now(), final=True)
    pipeline.close(SEND_TIMEOUT_S)
