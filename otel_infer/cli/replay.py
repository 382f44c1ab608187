"""Read a tape: print its requests, one line each, or send them where the standard variables say.

The same rooms as live: what is sent has the same trace and span ids as when it was recorded.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_infer import semconv
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.config import environment
from otel_infer.sidecar.recording import file

if TYPE_CHECKING:
    from otel_infer.assembly.assembler import Assembler

SEND_TIMEOUT_S = 30.0
_NEVER = 1 << 63


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `replay`."""
    parser.add_argument("tape", help="a file that `otel-infer run --tape` or `otel-infer dump` wrote")
    parser.add_argument("--send", action="store_true", help="export spans over OTLP instead of printing")
    parser.add_argument("--json", action="store_true", help="one JSON object per request")


def run(arguments: argparse.Namespace) -> int:
    """Replays one tape."""
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
    """The finished requests of a tape, in the order in which they ended.

    What it tells of starts stays in `assembler`, with `keeps_steps` that of steps and pauses too, of which there are many.
    """
    from otel_infer.analysis.finish import finish_requests
    from otel_infer.assembly.assembler import GRACE_NS, Assembler

    assembler = assembler or Assembler()
    horizon = 0
    for passage in file.read_batches(path):
        horizon = passage.horizon
        assembler.feed_events(passage.recorded_events)
        _discard_unused(assembler, keeps_steps)
        yield from finish_requests(assembler, horizon)
    yield from finish_requests(assembler, horizon + GRACE_NS)


def _discard_unused(assembler: Assembler, keeps_steps: bool) -> None:
    """What nobody asks for, lest a tape of a day need the memory of a day."""
    assembler.drain_marks()
    assembler.workers.drain_executions()
    if not keeps_steps:
        assembler.drain_steps()
        assembler.drain_pauses()


def read_recent_records(
    path: Path, assembler: Assembler | None = None, *, keeps_steps: bool = False
) -> list[RequestRecord]:
    """As `records`, but for what ended before the time that the tape is of: a flight recorder keeps that to explain others."""
    began_at = file.read_began_at(path)
    told = read_records(path, assembler, keeps_steps=keeps_steps)
    return [record for record in told if record.ended_at > began_at]


def running_since(assembler: Assembler) -> list[int]:
    """Since when each request runs that has not ended, as far as the tape tells."""
    taken_up = [one for one in assembler.open_requests.values() if one.is_running and not one.ended_at]
    return [one.scheduled_at or one.arrived_at for one in taken_up]


def record_to_dict(record: RequestRecord) -> dict[str, Any]:
    """A request as plain data; lengths in ms."""
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
        "decode_steps": max(len(steps) - 1, 0) if steps is not None else 0,
        semconv.TELEMETRY_LOST: record.telemetry_lost,
    }


def _stage_durations_ms(record: RequestRecord) -> dict[str, float]:
    """ms per stage; a stage that was there several times is the sum."""
    lengths: dict[str, float] = {}
    for stage in record.stages:
        lengths[stage.name] = lengths.get(stage.name, 0.0) + (stage.ended_at - stage.started_at) / 1e6
    return lengths


def _print_starts(assembler: Assembler, horizon: int) -> None:
    """The servers that had started by then, before the requests they served."""
    from otel_infer.export.console import format_start

    for start in assembler.drain_starts(horizon):
        print(format_start(start))


def _format_record(record: RequestRecord) -> str:
    from otel_infer.export.console import format_request

    return format_request(record)


def _export_recording(path: Path) -> int:
    from otel_infer import _clock
    from otel_infer._bootstrap.install import detect_resource
    from otel_infer.ringbuffer.merged_reader import MergedReader
    from otel_infer.sidecar.main import make_pipeline

    # Of then and there, nothing of here and now.
    settings = environment.from_env(
        environment.child_environment(
            enabled="on", tape="", request_log="", gpu_metrics="off", metrics_port=""
        )
    )
    pipeline = make_pipeline(settings, detect_resource(), MergedReader(), show=False)
    horizon = 0
    for passage in file.read_batches(path):
        horizon = passage.horizon
        pipeline.assembler.feed_events(passage.recorded_events)
        pipeline.export_requests(horizon)
        for sink in pipeline.exporters:
            sink.flush(horizon)
        if pipeline.sender is not None:
            pipeline.sender.flush(SEND_TIMEOUT_S)  # a tape is read faster than it can be sent
    pipeline.export_without_grace(horizon)
    pipeline.flush(SEND_TIMEOUT_S)
    pipeline.run_cycle(_clock.now(), final=True)
    pipeline.close(SEND_TIMEOUT_S)
    sender = pipeline.sender
    if sender is None:
        print("otel-infer replay: OTEL_TRACES_EXPORTER is none, nothing was sent", file=sys.stderr)
        return 2
    refused = sum(sender.lost.values())
    print(f"{pipeline.requests} requests, {sender.accepted} spans accepted, {refused} refused")
    if refused:
        print(f"otel-infer replay: the destination said: {sender.last_refusal}", file=sys.stderr)
    return 1 if refused else 0
