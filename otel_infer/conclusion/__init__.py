"""What follows from the facts of one request when it is over. Pure.

What the engine computed after the end is no part of a request, and what cannot be known because facts are missing is left
out: a record says less then, never something else.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from otel_infer import facts, semconv
from otel_infer.conclusion.request import Request
from otel_infer.conclusion.stages import Life, died_in, stages_of
from otel_infer.records import PrefillStep, RequestRecord, StepRows
from otel_infer.steplog import Run, StepLog

__all__ = ["Request", "conclude"]

NOT_FINISHED = ("abort", "error")


def conclude(request: Request) -> RequestRecord:
    """The record of an ended request."""
    record = _begun(request)
    _adopt_said(record, request)
    _adopt_steps(record, request)
    life = _life(record, request)
    _adopt_prefill_steps(record, request, life)
    _adopt_tokens(record, request, life)
    record.stages = stages_of(record, request, life)
    if life.died:
        record.died_in = died_in(record, request, life)
    if not record.operation and (_reached_engine(record) or not record.name):
        record.operation = semconv.OPERATION_INFERENCE
    if not record.operation and record.server_span_id:
        # One span is enough, and it is the live one: what ran below it names it as its parent.
        record.server_span_id = record.span_id
    return record


def _begun(request: Request) -> RequestRecord:
    arrived, ended, submitted = request.arrived, request.ended, request.submitted
    assert ended is not None
    return RequestRecord(
        trace_id=arrived.trace_id,
        span_id=arrived.span_id,
        parent_span_id=arrived.parent_span_id if any(arrived.parent_span_id) else b"",
        server_span_id=arrived.server_span_id if arrived.flags & facts.OWN_SERVER_SPAN else b"",
        sampled=bool(arrived.flags & facts.SAMPLED),
        remote_parent=bool(arrived.flags & facts.REMOTE_PARENT),
        name=arrived.name,
        operation=arrived.operation,
        provider=arrived.provider,
        model=arrived.model,
        engine=submitted.engine if submitted else "",
        arrived_at=arrived.at,
        ended_at=request.ended_at,
        wall_offset=arrived.wall_at - arrived.at,
        generative=not arrived.flags & facts.NON_GENERATIVE,
        outcome=ended.outcome,
        error_type=ended.error_type,
        status_code=ended.status_code,
        chunks=ended.chunks,
        ring=request.ring,
        handle=request.handle,
    )


def _adopt_said(record: RequestRecord, request: Request) -> None:
    """What user code and the integrations said of the request; the conventions' own keys win a field each."""
    attributes = dict(request.attributes)
    record.operation = str(attributes.pop(semconv.OPERATION_NAME, record.operation))
    record.provider = str(attributes.pop(semconv.PROVIDER_NAME, record.provider))
    record.model = str(attributes.pop(semconv.REQUEST_MODEL, record.model))
    record.attributes = attributes
    record.events, record.links = request.events, request.links
    record.span_name, record.tracestate = request.span_name, request.tracestate
    record.telemetry_lost = request.telemetry_lost
    record.preemptions = len(request.preempted)
    record.finish_reasons = tuple(fact.reason for fact in request.finished if fact.reason)
    record.sequences = request.sequences
    if request.submitted:
        record.input_tokens, record.max_tokens = request.submitted.input_tokens, request.submitted.max_tokens


# ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _adopt_steps(record: RequestRecord, request: Request) -> None:
    by_log: dict[StepLog, list[Run]] = {}
    for run in request.all_runs():
        by_log.setdefault(run.log, []).append(run)
    parts: list[StepRows] = []
    is_last_known = False
    for log, runs in by_log.items():
        own = {step: chunk.tokens for step, chunk in request.chunks.get(log, {}).items()}
        ordered = sorted(runs, key=lambda run: run.first)
        rows, forgotten = log.rows(ordered, request.deltas.get(log, {}), own)
        record.steps_forgotten += forgotten
        parts.append(rows)
        is_last_known = is_last_known or (len(rows) > 0 and request.is_last(log, int(rows.step[-1])))
    inside = _inside(record, request, _joined(parts)) if parts else None
    if inside is not None and len(inside):
        record.steps = inside
        record.last_token_at = int(inside.ended_at[-1]) if is_last_known else 0
    record.discarded = request.discarded


def _joined(parts: list[StepRows]) -> StepRows:
    """Rows of one or several engines as one, in the order in which they were done."""
    whole = parts[0] if len(parts) == 1 else StepRows(np.concatenate([part.table for part in parts], axis=1))
    at = whole.ended_at
    return whole if (at[1:] >= at[:-1]).all() else whole.take(np.argsort(at, kind="stable"))


def _inside(record: RequestRecord, request: Request, rows: StepRows) -> StepRows:
    """The steps of which the reader could have had something, with what of them lies inside the request.

    Nobody is given a token that is not known yet, so where a success ended before its last step was told to be done, that
    was told late. A step that was scheduled before the first token (two are in flight) is this request's from there on.
    """
    before_end = rows.started_at < record.ended_at
    if record.outcome != facts.OK:
        before_end = rows.ended_at <= record.ended_at
    inside = before_end & (rows.ended_at > record.arrived_at)
    if not inside.all():
        rows = rows.take(inside)
    started_at, ended_at, first_at = rows.started_at, rows.ended_at, _first_at(record, request)
    np.minimum(ended_at, record.ended_at, out=ended_at)
    np.maximum(started_at, record.arrived_at, out=started_at)
    before_first = int(ended_at.searchsorted(first_at, "right"))
    np.maximum(started_at[before_first:], first_at, out=started_at[before_first:])
    # Where the first step is not known, the first token is: those before it are no decode steps.
    return rows.take(slice(max(before_first - 1, 0), None))


def _first_at(record: RequestRecord, request: Request) -> int:
    """When the engine had the first token, or else when it came by; 0 = there was none, or nobody saw it."""
    at = request.first_step_done_at
    if record.outcome == facts.OK:
        at = min(at, record.ended_at)
    return _seen(record, at) or _seen(record, request.token_reached_at)


def _seen(record: RequestRecord, at: int) -> int:
    """This instant, if it is no later than the end."""
    return max(at, record.arrived_at) if 0 < at <= record.ended_at else 0


def _adopt_prefill_steps(record: RequestRecord, request: Request, life: Life) -> None:
    """Chunks of the prompt up to the first token; later ones compute again what a preemption took."""
    if request.steps_lost and not request.first_step_done_at:
        return
    until = life.first_at or record.ended_at
    for log, chunks in request.chunks.items():
        for step, (at, tokens, size) in chunks.items():
            ended_at = log.ended_at(step)
            if record.outcome == facts.OK:
                ended_at = min(ended_at, record.ended_at)
            started_at = max(at, record.arrived_at)
            if started_at < ended_at <= until:
                record.prefill_steps.append(PrefillStep(step, started_at, ended_at, tokens, size))
    record.prefill_steps.sort(key=lambda chunk: chunk.started_at)


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _life(record: RequestRecord, request: Request) -> Life:
    died = record.outcome != facts.OK
    done = [fact for fact in _in_time(record, request) if fact.reason not in NOT_FINISHED]
    said = sum(fact.output_tokens for fact in done)
    # Some engines say once that they are done with all sequences.
    with_all = len(done) >= request.sequences or (0 < said >= _counted(record) and not request.steps_lost)
    finished = bool(done) and with_all
    last_at = record.last_token_at
    if not last_at and finished:
        last_at = min(max(fact.at for fact in done), record.ended_at)
    return Life(
        submitted_at=_seen(record, request.submitted.at) if request.submitted else 0,
        scheduled_at=_seen(record, request.scheduled_at),
        first_at=_first_at(record, request),
        last_at=_seen(record, last_at),
        response_at=_seen(record, request.response_started_at),
        finished=finished,
        died=died,
    )


def _adopt_tokens(record: RequestRecord, request: Request, life: Life) -> None:
    """The first one as near the reader as it was seen; and how many there were, if that is known."""
    instants = (request.first_sent_at, request.token_reached_at, life.first_at)
    record.first_token_at = next((seen for at in instants if (seen := _seen(record, at))), 0)
    said, counted = sum(fact.output_tokens for fact in _in_time(record, request)), _counted(record)
    is_whole = not (request.steps_lost or record.steps_forgotten)
    if not is_whole:
        record.output_tokens = said
    else:
        record.output_tokens = (life.finished and said) or max(said, counted)


def _in_time(record: RequestRecord, request: Request) -> list[facts.EngineFinished]:
    """What the engine was done with by the end; of a success that is all, though it may have been told late."""
    return [fact for fact in request.finished if record.outcome == facts.OK or fact.at <= record.ended_at]


def _counted(record: RequestRecord) -> int:
    return int(record.steps.tokens.sum()) if record.steps is not None else 0


def _reached_engine(record: RequestRecord) -> bool:
    stages: list[Any] = [stage for stage in record.stages if stage.name != semconv.SPAN_INGRESS]
    return bool(stages) or record.steps is not None
