"""What follows from the facts of one request when it is over. Pure.

What the engine computed after the end is no part of a request, and what cannot be known because facts are missing is left
out: a record says less then, never something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from otel_infer import semconv
from otel_infer.assembly.engine.step_log import EngineStepLog
from otel_infer.assembly.engine.step_rows import RequestSteps, summarize_steps
from otel_infer.assembly.records.request import PrefillStep, RequestRecord
from otel_infer.assembly.requests import device_time
from otel_infer.assembly.requests import stages as absences
from otel_infer.assembly.requests.open_request import OUTCOME_BY_REASON, OpenRequest
from otel_infer.assembly.requests.stages import Milestones, build_stages, stage_at_end
from otel_infer.assembly.requests.steps import DeliveredSteps, collect_steps
from otel_infer.ringbuffer import events

__all__ = ["OpenRequest", "build_records"]

MAX_STEPS_AFTER_END = 1024
"""Steps that may have begun between the end of a request and when nothing more can come of it."""


def build_records(requests: Sequence[OpenRequest]) -> list[RequestRecord]:
    """The records of ended requests."""
    records = [_new_record(request) for request in requests]
    firsts = [_find_first_token_time(record, request) for record, request in zip(records, requests)]
    parts = collect_steps(requests, records, firsts)
    # One thing after another, each of all requests: the processor has its code at hand then.
    for record, request in zip(records, requests):
        _apply_attributes(record, request)
    for record, request, part in zip(records, requests, parts):
        _apply_steps(record, request, part)
        if len(request.submissions) > 1:
            absences.apply_generation_gaps(record, request)
    lives = [_find_milestones(*one) for one in zip(records, requests, firsts, parts)]
    for record, request, life in zip(records, requests, lives):
        _apply_prefill_steps(record, request, life)
        record.interrupted_step = _find_interrupted_step(record, request) if life.died else None
    for record, request, life, part in zip(records, requests, lives, parts):
        _apply_tokens(record, request, life, part)
        record.stages = build_stages(record, request, life)
    for record, request, life in zip(records, requests, lives):
        _complete_record(record, request, life)
    lost = [record.telemetry_lost for record in records]
    for record, summary in zip(records, summarize_steps([record.steps for record in records], lost)):
        record.summary = summary
    return records


def _complete_record(record: RequestRecord, request: OpenRequest, life: Milestones) -> None:
    if record.steps is None:
        record.last_token_at = life.last_token_at
    if request.timed_stages or any(run.log.device is not None for run in request.runs):
        device_time.apply_device_time(record, request)
    if life.died:
        record.failed_stage = stage_at_end(record, request, life)
    if not record.operation and (_reached_engine(record) or not record.name):
        record.operation = semconv.OPERATION_INFERENCE
    record.redundant = request.unseen and _is_redundant(record)
    if not record.operation and record.server_span_id:
        # One span is enough, and it is the live one: what ran below it names it as its parent.
        record.server_span_id = record.span_id


def _new_record(request: OpenRequest) -> RequestRecord:
    arrived, ended, submitted = request.arrived, request.ended, request.submitted
    assert ended is not None
    outcome = request.outcome
    # Where nobody said what went wrong; nothing did where its client had it stopped.
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
        arrived_at=arrived.at,
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


def _apply_attributes(record: RequestRecord, request: OpenRequest) -> None:
    """What user code and the integrations said of the request; the conventions' own keys win a field each."""
    if request.attributes:
        attributes = dict(request.attributes)
        record.operation = str(attributes.pop(semconv.OPERATION_NAME, record.operation))
        record.provider = str(attributes.pop(semconv.PROVIDER_NAME, record.provider))
        record.model = str(attributes.pop(semconv.REQUEST_MODEL, record.model))
        record.attributes = attributes
    record.events, record.links, record.start_ids = request.events, request.links, request.start_ids
    if request.pauses:
        record.pauses = tuple(
            pause for pause in request.pauses if pause.cause not in semconv.EVENT_LOOP_CAUSES
        )
        record.loop_pauses = tuple(
            pause for pause in request.pauses if pause.cause in semconv.EVENT_LOOP_CAUSES
        )
    record.marks = request.marks
    record.is_multi_engine = len(request.runs) > 1 and len({run.log for run in request.runs}) > 1
    if (
        request.runs and not record.is_multi_engine
    ):  # steps are looked up by their numbers, of which each engine has its own
        log = request.runs[-1].log
        strain = log.baseline.thread_delays
        record.prefills_by_step, record.thread_delays = log.prefill_history.freeze(), strain.freeze()
        record.cost_model, record.warmup_steps = request.cost_model, request.warmup_steps
    record.received_at = request.received_at
    if request.preempted:
        record.preempted_at = tuple(fact.at for fact in request.preempted)
        record.preemptions = len(request.preempted)
    if request.prefixes:
        record.prefix_tokens = sum([fact.tokens for fact in request.prefixes])
        record.cached_tokens = sum([fact.cached for fact in request.prefixes])
        record.cached_input_tokens = _count_cached_input_tokens(request)
    if request.drafts:
        record.drafted_tokens = sum([fact.drafted for fact in request.drafts])
        record.accepted_tokens = sum([fact.accepted for fact in request.drafts])
    record.span_name, record.tracestate = request.span_name, request.tracestate
    record.telemetry_lost = request.telemetry_lost
    record.finish_reasons = tuple([fact.reason for fact in request.finished if fact.reason])
    record.sequences = request.sequences
    if request.submitted:
        record.input_tokens, record.max_tokens = request.submitted.input_tokens, request.submitted.max_tokens


def _count_cached_input_tokens(request: OpenRequest) -> int:
    """What need not be computed of the prompts. Sequences of one prompt find in the cache what the first of them has just put
    there, and the prompt counts once: so do those that ask for it first."""
    asked = cached = 0
    most = request.submitted.input_tokens if request.submitted else 0
    for fact in request.prefixes:
        if most and asked >= most:
            break
        asked += fact.tokens
        cached += fact.cached
    return min(cached, most) if most else cached


# ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _apply_steps(record: RequestRecord, request: OpenRequest, part: DeliveredSteps) -> None:
    record.steps_evicted = part.evicted
    record.discarded = request.discarded
    if part.tokens:
        record.steps = part.rows
        record.last_token_at = part.ended_at if part.is_last_known else 0
        record.step_stride = 1 if record.is_multi_engine else _find_step_stride(part.rows, request)


def _find_step_stride(rows: RequestSteps, request: OpenRequest) -> int:
    """One of how many steps it is in, if those between are in flight together with its own."""
    steps = rows.step
    if 2 * (steps[-1] - steps[0]) < 3 * len(rows):
        return 1
    is_beside = request.runs[-1].log.table.end_times(steps[1:] - 1) > rows.started_at[1:]
    return int(np.median(steps[1:] - steps[:-1])) if 2 * is_beside.sum() > len(rows) else 1


def _find_first_token_time(record: RequestRecord, request: OpenRequest) -> int:
    """When the engine had the first token, or else when it came by; 0 = there was none, or nobody saw it."""
    at = request.first_step_done_at
    if record.outcome == events.OK:
        at = min(at, record.ended_at)
    return _clip_to_request(record, at) or _clip_to_request(record, request.token_reached_at)


def _clip_to_request(record: RequestRecord, at: int) -> int:
    """This instant, if it is no later than the end."""
    return max(at, record.arrived_at) if 0 < at <= record.ended_at else 0


def _apply_prefill_steps(record: RequestRecord, request: OpenRequest, life: Milestones) -> None:
    """Chunks of the prompt up to the first token; later ones are other sequences', or compute again what a preemption took."""
    if request.steps_lost and not request.first_step_done_at:
        return
    until = life.first_token_at or record.ended_at
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
    behind_until = min(log.table.ended_at(step - 1), ended_at)
    if behind_until > started_at:  # two were in flight
        behind_prompts = log.table.prefill_tokens(step - 1)
        chunk = chunk._replace(previous_ended_at=behind_until, previous_prompt_tokens=behind_prompts)
    return chunk


def _find_interrupted_step(record: RequestRecord, request: OpenRequest) -> PrefillStep | None:
    """The step that it did not see the end of; None where that is not known."""
    if record.is_multi_engine or request.steps_lost or not request.runs:
        return None
    log, first, last, _ = request.runs[-1]
    first = max(first, last - MAX_STEPS_AFTER_END, log.table.oldest)
    if first > last:  # long forgotten
        return None
    step, started_at, ended_at, _, size, _ = np.concatenate(log.table.get_columns(first, last), axis=1)
    is_open = (ended_at == 0) | (ended_at > record.ended_at)
    found = np.flatnonzero((step >= first) & (started_at < record.ended_at) & is_open)
    if not len(found):
        return None
    at = int(found[0])
    chunk = request.chunks.get(log, {}).get(int(step[at]))
    tokens = chunk.tokens if chunk is not None else 0
    began = max(int(started_at[at]), record.arrived_at)
    return _build_prefill_step(log, int(step[at]), began, record.ended_at, tokens, int(size[at]))


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _find_milestones(
    record: RequestRecord, request: OpenRequest, first_at: int, part: DeliveredSteps
) -> Milestones:
    died = record.outcome != events.OK
    # Of a success that is all, though it may have been told late.
    in_time = [fact for fact in request.finished if fact.at <= record.ended_at] if died else request.finished
    done = [fact for fact in in_time if fact.reason not in OUTCOME_BY_REASON]
    said = _count_finished_tokens(done, request)
    # Some engines say once that they are done with all sequences.
    with_all = len(done) >= request.sequences or (0 < said >= part.tokens and not request.steps_lost)
    finished = bool(done) and with_all
    last_at = record.last_token_at
    if not last_at and finished:
        last_at = min(max(fact.at for fact in done), record.ended_at)
    return Milestones(
        _clip_to_request(record, request.submitted.at) if request.submitted else 0,
        _clip_to_request(record, request.scheduled_at),
        first_at,
        _clip_to_request(record, last_at),
        _clip_to_request(record, request.response_started_at),
        finished,
        died,
        _count_finished_tokens(in_time, request),
    )


def _count_finished_tokens(finished: Sequence[events.EngineFinished], request: OpenRequest) -> int:
    """Tokens. Where the front end stops what the engine, in another process, is just about to end, what it kept is less."""
    tokens = sorted([fact.output_tokens for fact in finished])
    return sum(tokens[: request.sequences] if request.fragments else tokens)


def _apply_tokens(
    record: RequestRecord, request: OpenRequest, life: Milestones, part: DeliveredSteps
) -> None:
    """The first one as near the reader as it was seen; and how many there were, if that is known."""
    for at in (request.first_sent_at, request.token_reached_at, life.first_token_at):
        record.first_token_at = record.first_token_at or _clip_to_request(record, at)
    is_whole = not (request.steps_lost or record.steps_evicted)
    if not is_whole:
        record.output_tokens = life.reported_tokens
    else:
        record.output_tokens = (life.finished and life.reported_tokens) or max(
            life.reported_tokens, part.tokens
        )


def _is_redundant(record: RequestRecord) -> bool:
    """An HTTP request that reached no engine, below the span of another instrumentation that tells the same."""
    told = record.attributes.keys() - {semconv.TENANT, semconv.TRAFFIC_CLASS}
    said = record.operation or record.span_name or told or record.events or record.links
    below_another = record.parent_span_id and not (record.server_span_id or record.remote_parent)
    return bool(below_another and record.outcome == events.OK and not said)


def _reached_engine(record: RequestRecord) -> bool:
    stages: list[Any] = [stage for stage in record.stages if stage.name != semconv.SPAN_INGRESS]
    return bool(stages) or record.steps is not None
