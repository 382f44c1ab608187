"""Builds the record of each request that is over from its events. Pure.

Work of the engine after the end is no part of a request. Values that cannot be known because events are
missing are left out; a record is never wrong because of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from otel_infer import semconv
from otel_infer.assembly.engine.step_log import EngineStepLog
from otel_infer.assembly.engine.step_rows import RequestSteps, summarize_steps
from otel_infer.assembly.records.request import PrefillStep, RequestRecord
from otel_infer.assembly.requests import device_time
from otel_infer.assembly.requests.open_request import OUTCOME_BY_REASON, OpenRequest
from otel_infer.assembly.requests.record_fields import copy_fields
from otel_infer.assembly.requests.stages import (
    Milestones,
    apply_generation_gaps,
    build_stages,
    stage_at_end,
)
from otel_infer.assembly.requests.steps import DeliveredSteps, collect_steps
from otel_infer.ringbuffer import events

__all__ = ["OpenRequest", "build_records", "build_unrecorded_end"]

PREPARATION = frozenset(
    (
        semconv.SPAN_ACCEPT,
        *semconv.WAIT_STAGES,
        semconv.SPAN_QUEUE_WAIT,
        semconv.SPAN_BATCH_WAIT,
        semconv.SPAN_INGRESS,
        semconv.SPAN_TOKENIZE,
        semconv.SPAN_FETCH_MEDIA,
        semconv.SPAN_PREPARE_MEDIA,
        semconv.SPAN_WEIGHTS,
        semconv.SPAN_POSTPROCESS,
    )
)
"""Stages that alone are no inference: `POST /tokenize` has some of them too."""
_BEFORE_WORK = PREPARATION - {
    semconv.SPAN_TOKENIZE,
    semconv.SPAN_FETCH_MEDIA,
    semconv.SPAN_PREPARE_MEDIA,
    semconv.SPAN_WEIGHTS,
}
"""Stages that alone are no inference even of a request that failed. One that failed in another stage was on its way."""
_MODEL_STAGES = frozenset((semconv.SPAN_FORWARD, semconv.SPAN_DECODE, semconv.SPAN_PREFILL))
MAX_STEPS_AFTER_END = 1024
"""Steps that may begin between the end of a request and its conclusion."""


def build_records(requests: Sequence[OpenRequest]) -> list[RequestRecord]:
    """Returns the records of ended requests."""
    records = [_new_record(request) for request in requests]
    first_token_times = [
        _find_first_token_time(record, request) for record, request in zip(records, requests)
    ]
    deliveries = collect_steps(requests, records, first_token_times)
    # Each phase runs over all requests, which keeps its code in the processor's instruction cache.
    for record, request in zip(records, requests):
        copy_fields(record, request)
    for record, request, delivered in zip(records, requests, deliveries):
        _apply_steps(record, request, delivered)
        if len(request.submissions) > 1:
            apply_generation_gaps(record, request)
    all_milestones = [
        _find_milestones(*arguments) for arguments in zip(records, requests, first_token_times, deliveries)
    ]
    for record, request, milestones in zip(records, requests, all_milestones):
        _apply_prefill_steps(record, request, milestones)
        record.interrupted_step = _find_interrupted_step(record, request) if milestones.is_failed else None
    for record, request, milestones, delivered in zip(records, requests, all_milestones, deliveries):
        _apply_tokens(record, request, milestones, delivered)
        record.stages = build_stages(record, request, milestones)
    for record, request, milestones in zip(records, requests, all_milestones):
        _complete_record(record, request, milestones)
    telemetry_lost = [record.telemetry_lost for record in records]
    for record, summary in zip(
        records, summarize_steps([record.steps for record in records], telemetry_lost)
    ):
        record.summary = summary
    return records


def _complete_record(record: RequestRecord, request: OpenRequest, milestones: Milestones) -> None:
    if record.steps is None:
        record.last_token_at = milestones.last_token_at
    if request.timed_stages or any(run.log.device is not None for run in request.runs):
        device_time.apply_device_time(record, request)
    if milestones.is_failed:
        record.failed_stage = stage_at_end(record, request, milestones)
    _set_operation(record, request)
    record.redundant = request.unseen and _is_redundant(record)
    if not record.operation and record.server_span_id:
        # One span is exported for both: the live one, because its children refer to it as their parent.
        record.server_span_id = record.span_id


def _set_operation(record: RequestRecord, request: OpenRequest) -> None:
    """Names the operation of an inference that has no name, and removes it where nothing was inferred.

    A request that failed on its way to the engine is an inference. A refused one (status 4xx) is none, unless
    an engine had it.
    """
    is_refused = record.outcome == events.OK and 400 <= record.status_code < 500
    if is_refused and not record.telemetry_lost and not _reached_engine(record, request):
        record.operation = ""
    elif not record.operation and (_has_worked(record) or not record.name):
        record.operation = semconv.OPERATION_INFERENCE


def _new_record(request: OpenRequest) -> RequestRecord:
    arrived, ended, submitted = request.arrived, request.ended, request.submitted
    assert ended is not None
    outcome = request.outcome
    # An error without a type gets the default type. An abort by the client is no error.
    error_type = ended.error_type or (semconv.OTHER if outcome == events.ERROR else "")
    return RequestRecord(
        trace_id=arrived.trace_id,
        span_id=arrived.span_id,
        parent_span_id=arrived.parent_span_id if any(arrived.parent_span_id) else b"",
        server_span_id=arrived.server_span_id if arrived.flags & events.OWN_SERVER_SPAN else b"",
        sampled=bool(arrived.flags & events.SAMPLED),
        remote_parent=bool(arrived.flags & events.REMOTE_PARENT),
        name=arrived.name,
        operation=arrived.operation,
        provider=arrived.provider,
        model=arrived.model,
        engine=submitted.engine if submitted else "",
        arrived_at=request.arrived_at,
        ended_at=request.ended_at,
        wall_offset=arrived.wall_at - arrived.at,
        generative=not arrived.flags & events.NON_GENERATIVE,
        outcome=outcome,
        error_type=error_type,
        status_code=ended.status_code,
        chunks=ended.chunks,
        detokenize_ns=ended.detokenize_ns,
        ring=request.ring,
        handle=request.handle,
    )


# ── steps ───────────────────────────────────────────────────────────────────────────────────────────────────


def _apply_steps(record: RequestRecord, request: OpenRequest, delivered: DeliveredSteps) -> None:
    record.steps_evicted = delivered.evicted
    record.discarded = request.discarded
    if delivered.tokens:
        record.steps = delivered.rows
        record.last_token_at = delivered.ended_at if delivered.is_last_known else 0
        record.step_stride = 1 if record.is_multi_engine else _find_step_stride(delivered.rows, request)


def _find_step_stride(rows: RequestSteps, request: OpenRequest) -> int:
    """Returns n if the request is in one of n steps and the steps between are in flight with its own, else 1."""
    steps = rows.step
    if 2 * (steps[-1] - steps[0]) < 3 * len(rows):
        return 1
    is_in_flight = request.runs[-1].log.table.end_times(steps[1:] - 1) > rows.started_at[1:]
    return int(np.median(steps[1:] - steps[:-1])) if 2 * is_in_flight.sum() > len(rows) else 1


def _find_first_token_time(record: RequestRecord, request: OpenRequest) -> int:
    """Returns when the engine had the first token, else when the front end had it; 0 = none, or not seen."""
    at = request.first_step_done_at
    if record.outcome == events.OK:
        at = min(at, record.ended_at)
    return _clip_to_request(record, at) or _clip_to_request(record, request.token_reached_at)


def _clip_to_request(record: RequestRecord, at: int) -> int:
    """Returns the instant, but not before the arrival; 0 if it is 0 or after the end."""
    return max(at, record.arrived_at) if 0 < at <= record.ended_at else 0


def _apply_prefill_steps(record: RequestRecord, request: OpenRequest, milestones: Milestones) -> None:
    """Adds the chunks of the prompt up to the first token.

    Later chunks belong to other sequences, or are computed again after a preemption.
    """
    if not request.chunks or (request.steps_lost and not request.first_step_done_at):
        return
    until = milestones.first_token_at or record.ended_at
    for log, chunks in request.chunks.items():
        for step, (at, tokens, size) in chunks.items():
            ended_at = log.table.ended_at(step)
            if ended_at > request.concluded_at:
                continue
            if record.outcome == events.OK:
                ended_at = min(ended_at, record.ended_at)
            started_at = max(at, record.arrived_at)
            if ended_at > until and not record.is_multi_engine:
                record.later_prefill_tokens[step] = tokens
            if started_at < ended_at <= until:
                record.prefill_steps.append(
                    _build_prefill_step(log, step, started_at, ended_at, tokens, size)
                )
    record.prefill_steps.sort(key=attrgetter("started_at"))


def _build_prefill_step(
    log: EngineStepLog, step: int, started_at: int, ended_at: int, tokens: int, size: int
) -> PrefillStep:
    others = max(log.table.prefill_tokens(step) - tokens, 0)
    chunk = PrefillStep(step, started_at, ended_at, tokens, size, others)
    previous_ended_at = min(log.table.ended_at(step - 1), ended_at)
    if previous_ended_at > started_at:  # two steps were in flight
        previous_prompt_tokens = log.table.prefill_tokens(step - 1)
        chunk = chunk._replace(
            previous_ended_at=previous_ended_at, previous_prompt_tokens=previous_prompt_tokens
        )
    return chunk


def _find_interrupted_step(record: RequestRecord, request: OpenRequest) -> PrefillStep | None:
    """Returns the step that was in flight when the request ended; None where it is not known."""
    if record.is_multi_engine or request.steps_lost or not request.runs:
        return None
    log, first, last, _ = request.runs[-1]
    first = max(first, last - MAX_STEPS_AFTER_END, log.table.oldest)
    if first > last:  # no longer in the table
        return None
    step, started_at, ended_at, _, size, _ = np.concatenate(log.table.get_columns(first, last), axis=1)
    is_open = (ended_at == 0) | (ended_at > record.ended_at)
    open_rows = np.flatnonzero((step >= first) & (started_at < record.ended_at) & is_open)
    if not len(open_rows):
        return None
    row = int(open_rows[0])
    chunk = request.chunks.get(log, {}).get(int(step[row]))
    tokens = chunk.tokens if chunk is not None else 0
    began = max(int(started_at[row]), record.arrived_at)
    return _build_prefill_step(log, int(step[row]), began, record.ended_at, tokens, int(size[row]))


# ── tokens ──────────────────────────────────────────────────────────────────────────────────────────────────


def _find_milestones(
    record: RequestRecord, request: OpenRequest, first_at: int, delivered: DeliveredSteps
) -> Milestones:
    is_failed = record.outcome != events.OK
    # A success includes every end, even one that was recorded late.
    in_time = (
        [event for event in request.finished if event.at <= record.ended_at]
        if is_failed
        else request.finished
    )
    completed = [event for event in in_time if event.reason not in OUTCOME_BY_REASON]
    finished = bool(completed)
    if finished:
        reported = _count_finished_tokens(completed, request)
        # Some engines record one end for all sequences.
        finished = len(completed) >= request.sequences or (
            0 < reported >= delivered.tokens and not request.steps_lost
        )
    last_at = record.last_token_at
    if not last_at and finished:
        last_at = min(max(event.at for event in completed), record.ended_at)
    return Milestones(
        submitted_at=_clip_to_request(record, request.submitted.at) if request.submitted else 0,
        scheduled_at=_clip_to_request(record, request.scheduled_at),
        first_token_at=first_at,
        last_token_at=_clip_to_request(record, last_at),
        response_at=_clip_to_request(record, request.response_started_at),
        finished=finished,
        is_failed=is_failed,
        reported_tokens=_count_finished_tokens(in_time, request),
    )


def _count_finished_tokens(finished: Sequence[events.EngineFinished], request: OpenRequest) -> int:
    """Returns the output tokens of the finished sequences.

    Where the front end stops a sequence that the engine, in another process, ends as well, both record an
    end. The client received the smaller number of tokens, so the smaller numbers count.
    """
    if not finished:
        return 0
    tokens = sorted([event.output_tokens for event in finished])
    return sum(tokens[: request.sequences] if request.fragments else tokens)


def _apply_tokens(
    record: RequestRecord, request: OpenRequest, milestones: Milestones, delivered: DeliveredSteps
) -> None:
    """Sets the first token, as close to the client as it was observed, and the output tokens where known."""
    for at in (request.first_sent_at, request.token_reached_at, milestones.first_token_at):
        record.first_token_at = record.first_token_at or _clip_to_request(record, at)
    is_whole = not (request.steps_lost or record.steps_evicted)
    if not is_whole:
        record.output_tokens = milestones.reported_tokens
    else:
        record.output_tokens = (milestones.finished and milestones.reported_tokens) or max(
            milestones.reported_tokens, delivered.tokens
        )


def _is_redundant(record: RequestRecord) -> bool:
    """Returns whether an HTTP request reached no engine and the span above it, of another library, is enough."""
    attributes = record.attributes.keys() - {semconv.TENANT, semconv.TRAFFIC_CLASS}
    has_content = record.operation or record.span_name or attributes or record.events or record.links
    below_another = record.parent_span_id and not (record.server_span_id or record.remote_parent)
    return bool(below_another and record.outcome == events.OK and not has_content)


def _has_worked(record: RequestRecord) -> bool:
    """Returns whether a request without a named operation did any work that an inference does."""
    idle = PREPARATION if record.outcome == events.OK else _BEFORE_WORK
    return record.steps is not None or any(stage.name not in idle for stage in record.stages)


def _reached_engine(record: RequestRecord, request: OpenRequest) -> bool:
    """Returns whether an engine, or a model, certainly had the request."""
    return bool(
        request.submitted
        or request.is_running
        or request.finished
        or record.first_token_at
        or any(stage.name in _MODEL_STAGES for stage in record.stages)
    )


def build_unrecorded_end(at: int, outcome: int, error_type: str) -> events.RequestEnded:
    """Returns the end of a request whose process did not record it."""
    return events.RequestEnded(
        at, outcome, error_type, status_code=0, chunks=0, send_wait_ns=0, detokenize_ns=0
    )
