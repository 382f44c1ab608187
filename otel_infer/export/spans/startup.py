"""The spans of one start of a process, as `docs/read-a-trace.md` draws them: a trace of its own."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer.assembly.records.process import Phase, StartRecord
from otel_infer.export.otlp import Span, SpanEvent
from otel_infer.export.spans.tree import INTERNAL, STATUS_ERROR, STATUS_UNSET, derive_span_ids
from otel_infer.ringbuffer.events import Value

MAX_PHASES = 64
"""Phases of one start that become spans; the longest do."""


def build_start_spans(record: StartRecord) -> list[Span]:
    """The root and its phases, in this order. Always exported: there is one such trace for each server."""
    longest = sorted(record.phases, key=lambda phase: phase.started_at - phase.ended_at)[:MAX_PHASES]
    told: dict[str, Value] = {
        semconv.PROCESS_PID: record.pid,
        semconv.READY_BY: record.ready_by,
        semconv.ERROR_TYPE: record.error_type,
        semconv.FAILED_STAGE: record.failed_phase,
        semconv.PHASES_DROPPED: len(record.phases) - len(longest),
    }
    root = Span(
        record.trace_id,
        record.span_id,
        record.parent_span_id,
        start_name(record),
        INTERNAL,
        record.started_at + record.wall_offset,
        record.ended_at + record.wall_offset,
        {key: value for key, value in told.items() if value},
        status=STATUS_ERROR if record.error_type else STATUS_UNSET,
    )
    chosen = [phase for phase in record.phases if phase in longest]
    ids = derive_span_ids(record.span_id, "phase", len(chosen))
    return [root, *(_build_phase_span(record, span_id, phase) for span_id, phase in zip(ids, chosen))]


def start_name(record: StartRecord) -> str:
    """Whose start it is."""
    return (
        semconv.SPAN_PROCESS_START.get(record.role, semconv.SPAN_SERVER_START)
        if record.parent_span_id
        else semconv.SPAN_SERVER_START
    )


def _build_phase_span(record: StartRecord, span_id: bytes, phase: Phase) -> Span:
    told: dict[str, Value] = {semconv.REQUEST_MODEL: phase.model, semconv.ERROR_TYPE: phase.error_type}
    return Span(
        record.trace_id,
        span_id,
        record.span_id,
        phase.name,
        INTERNAL,
        phase.started_at + record.wall_offset,
        phase.ended_at + record.wall_offset,
        {key: value for key, value in told.items() if value},
        _build_import_events(record) if phase.name == semconv.SPAN_IMPORTS else (),
        status=STATUS_ERROR if phase.error_type else STATUS_UNSET,
    )


def _build_import_events(record: StartRecord) -> list[SpanEvent]:
    return [
        SpanEvent(at + record.wall_offset, semconv.EVENT_IMPORTED, {semconv.MODULE: name})
        for at, name in record.imported
    ]
