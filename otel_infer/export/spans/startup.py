"""Builds the spans of a process start, which are a separate trace, as in `docs/read-a-trace.md`."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer.assembly.records.process import Phase, StartRecord
from otel_infer.export.otlp import Span, SpanEvent
from otel_infer.export.spans.tree import INTERNAL, STATUS_ERROR, STATUS_UNSET, derive_span_ids
from otel_infer.ringbuffer.events import Value

MAX_PHASES = 64
"""Maximum phase spans of one start. The longest phases are exported."""


def build_start_spans(record: StartRecord) -> list[Span]:
    """Returns the root span and the spans of its phases.

    They are always exported, because a server has one such trace.
    """
    longest = sorted(record.phases, key=lambda phase: phase.started_at - phase.ended_at)[:MAX_PHASES]
    attributes: dict[str, Value] = {
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
        {key: value for key, value in attributes.items() if value},
        status=STATUS_ERROR if record.error_type else STATUS_UNSET,
    )
    exported = [phase for phase in record.phases if phase in longest]
    ids = derive_span_ids(record.span_id, "phase", len(exported))
    return [root, *(_build_phase_span(record, span_id, phase) for span_id, phase in zip(ids, exported))]


def start_name(record: StartRecord) -> str:
    """Returns the span name of a start: of the server, or of one of its processes."""
    return (
        semconv.SPAN_PROCESS_START.get(record.role, semconv.SPAN_SERVER_START)
        if record.parent_span_id
        else semconv.SPAN_SERVER_START
    )


def _build_phase_span(record: StartRecord, span_id: bytes, phase: Phase) -> Span:
    attributes: dict[str, Value] = {semconv.REQUEST_MODEL: phase.model, semconv.ERROR_TYPE: phase.error_type}
    return Span(
        record.trace_id,
        span_id,
        record.span_id,
        phase.name,
        INTERNAL,
        phase.started_at + record.wall_offset,
        phase.ended_at + record.wall_offset,
        {key: value for key, value in attributes.items() if value},
        _build_import_events(record, phase) if phase.name == semconv.SPAN_IMPORTS else (),
        status=STATUS_ERROR if phase.error_type else STATUS_UNSET,
    )


def _build_import_events(record: StartRecord, phase: Phase) -> list[SpanEvent]:
    return [
        SpanEvent(at + record.wall_offset, semconv.EVENT_IMPORTED, {semconv.MODULE: name})
        for at, name in record.imported
        if phase.started_at < at <= phase.ended_at
    ]
