"""The spans of one start of a process, as `docs/read-a-trace.md` draws them: a trace of its own."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer.assembly.records.process import Phase, StartRecord
from otel_infer.export.otlp import Event, Span
from otel_infer.export.spans.tree import INTERNAL, STATUS_ERROR, STATUS_UNSET, derived_ids
from otel_infer.ringbuffer.events import Value

MOST_PHASES = 64
"""Phases of one start that become spans; the longest do."""


def spans_of(record: StartRecord) -> list[Span]:
    """The root and its phases, in this order. Always exported: there is one such trace for each server."""
    longest = sorted(record.phases, key=lambda phase: phase.started_at - phase.ended_at)[:MOST_PHASES]
    told: dict[str, Value] = {
        semconv.PROCESS_PID: record.pid,
        semconv.READY_BY: record.ready_by,
        semconv.ERROR_TYPE: record.error_type,
        semconv.DIED_IN: record.died_in,
        semconv.PHASES_LEFT_OUT: len(record.phases) - len(longest),
    }
    root = Span(
        record.trace_id,
        record.span_id,
        record.parent_span_id,
        name_of(record),
        INTERNAL,
        record.started_at + record.wall_offset,
        record.ended_at + record.wall_offset,
        {key: value for key, value in told.items() if value},
        status=STATUS_ERROR if record.error_type else STATUS_UNSET,
    )
    chosen = [phase for phase in record.phases if phase in longest]
    ids = derived_ids(record.span_id, "phase", len(chosen))
    return [root, *(_phase(record, span_id, phase) for span_id, phase in zip(ids, chosen))]


def name_of(record: StartRecord) -> str:
    """Whose start it is."""
    return (
        semconv.SPAN_PART_START.get(record.role, semconv.SPAN_START)
        if record.parent_span_id
        else semconv.SPAN_START
    )


def _phase(record: StartRecord, span_id: bytes, phase: Phase) -> Span:
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
        _imported(record) if phase.name == semconv.SPAN_IMPORTS else (),
        status=STATUS_ERROR if phase.error_type else STATUS_UNSET,
    )


def _imported(record: StartRecord) -> list[Event]:
    return [
        Event(at + record.wall_offset, semconv.EVENT_IMPORTED, {semconv.MODULE: name})
        for at, name in record.imported
    ]
