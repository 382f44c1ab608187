"""Prints one line for each finished request, for `otel-infer run --show`."""

from __future__ import annotations

import select
import sys
from typing import Any, TextIO

from otel_infer import semconv
from otel_infer.assembly.records.process import StartRecord
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.export.spans import startup, tree
from otel_infer.ringbuffer import events

NO_STAGES = "no model was seen: `otel-infer doctor` names what is not followed"


def format_duration(ns: float) -> str:
    """Returns `0.4 ms`, `12 ms` or `13.2 s`: seconds from 10 s, one decimal in seconds and below 10 ms."""
    value = ns / 1e6
    if value >= 9_999.5:
        return f"{value / 1000:.1f} s"
    return f"{value:.1f} ms" if value < 9.95 else f"{value:.0f} ms"


def format_request(record: RequestRecord) -> str:
    """Returns one line with the outcome, durations, tokens, top cause and stages of a request."""
    outcome = events.OUTCOME_NAMES[record.outcome]
    where = f"in {record.failed_stage}" if record.failed_stage else ""
    if detail := " ".join(filter(None, (record.error_type, where))):
        outcome += f" ({detail})"
    stages = " · ".join(
        f"{stage.name} {format_duration(stage.ended_at - stage.started_at)}"
        for stage in record.stages
        if stage.name in semconv.STAGES or stage.ended_at - stage.started_at > 0
    )
    parts = [
        record.trace_id.hex()[:8],
        tree.request_name(record),
        outcome,
        format_duration(record.duration_ns),
    ]
    if record.first_token_at:
        parts.append(f"first token {format_duration(record.ttft_ns)}")
    if record.output_tokens:
        parts.append(f"{record.input_tokens} → {record.output_tokens} tokens")
    if record.breakdown is not None and record.operation and record.duration_ns:
        top = record.breakdown.top_cause
        parts.append(
            f"{100 * record.breakdown.causes[top] / record.duration_ns:.0f} % {top.replace('_', ' ')}"
        )
    return f"{'  '.join(parts)}  [{stages or NO_STAGES}]"


def format_start(record: StartRecord) -> str:
    """Returns one line with the outcome, duration and phases of a process start."""
    outcome = f"ready by {record.ready_by}"
    if record.error_type:
        where = f" in {record.failed_phase}" if record.failed_phase else ""
        outcome = f"error ({record.error_type}{where})"
    phases = " · ".join(
        f"{phase.name} {format_duration(phase.ended_at - phase.started_at)}" for phase in record.phases
    )
    parts = [
        record.trace_id.hex()[:8],
        startup.start_name(record),
        outcome,
        format_duration(record.duration_ns),
    ]
    return f"{'  '.join(parts)}  [{phases}]"


def is_writable(out: Any) -> bool:
    """Returns whether a line can be written without waiting.

    A paused terminal, or a pipe without a reader, would otherwise stop the reader of the rings.
    """
    try:
        return bool(select.select((), (out.fileno(),), (), 0)[1])
    except (AttributeError, OSError, ValueError):  # not a file, or closed
        return True


class Console:
    """Prints a line for every start of a process and every request, exported or not."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr

    def on_request(self, record: RequestRecord) -> None:
        """Prints one request."""
        self._print_line(format_request(record))

    def on_start(self, record: StartRecord) -> None:
        """Prints one start."""
        self._print_line(format_start(record))

    def _print_line(self, text: str) -> None:
        """Prints a line; ignores a closed terminal."""
        if not is_writable(self._out):
            return
        try:
            self._out.write(text + "\n")
            self._out.flush()
        except (OSError, ValueError):
            pass
