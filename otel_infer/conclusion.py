"""One request while its facts arrive, and what follows from them when it is over. Pure.

Stages are intervals between instants that were seen. None is the remainder of another: what lies between two stages
stays unattributed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otel_infer import facts, semconv
from otel_infer.records import PrefillStep, RequestRecord, Stage, UserEvent
from otel_infer.steplog import Run, StepLog, joined_rows

MAX_STAGES = 256
"""Stages of one request that are remembered; more are counted on the request."""


class Request:
    """What is known of a request so far."""

    def __init__(self, ring: int, handle: int, arrived: facts.RequestArrived) -> None:
        self.ring, self.handle, self.arrived = ring, handle, arrived
        self.ended_at = 0
        self.ended: facts.RequestEnded | None = None
        self.submitted: facts.RequestSubmitted | None = None
        self.received_at = self.scheduled_at = self.token_reached_at = self.first_sent_at = 0
        self.response_started_at = 0
        self.first_step_done_at = 0
        self.finished: list[facts.EngineFinished] = []
        self.preempted: list[facts.RequestPreempted] = []
        self.stages: list[facts.StageEnded] = []
        self.stages_left_out = 0
        self.attributes: dict[str, facts.Value] = {}
        self.events: list[UserEvent] = []
        self.links: list[tuple[bytes, bytes]] = []
        self.span_name = ""
        self.telemetry_lost = False
        self.runs: list[Run] = []
        self.present: dict[int, tuple[StepLog, int, int]] = {}  # id(log) → log, first step, sequences
        self.deltas: dict[tuple[int, int], int] = {}
        self.prefill_chunks: list[tuple[StepLog, int, int, int, int]] = []
        self.discarded = 0
        self.is_prefilling = True
        self._takes: dict[type, Callable[[Any], None]] = {
            facts.StageEnded: self._stage,
            facts.RequestSubmitted: self._submitted,
            facts.RequestReceived: lambda fact: self._once("received_at", fact.at),
            facts.RequestScheduled: lambda fact: self._once("scheduled_at", fact.at),
            facts.TokenReached: lambda fact: self._once("token_reached_at", fact.at),
            facts.FirstTokenSent: lambda fact: self._once("first_sent_at", fact.at),
            facts.ResponseStarted: lambda fact: self._once("response_started_at", fact.at),
            facts.EngineFinished: self.finished.append,
            facts.RequestPreempted: self._preempted,
            facts.AttributeSet: lambda fact: self.attributes.__setitem__(fact.key, fact.value),
            facts.EventAdded: lambda f: self.events.append(UserEvent(f.at, f.name, dict(f.attributes))),
            facts.SpanLinked: lambda fact: self.links.append((fact.trace_id, fact.span_id)),
            facts.HttpDescribed: self._http,
            facts.NameUpdated: lambda fact: setattr(self, "span_name", fact.name),
        }

    @property
    def is_scheduled(self) -> bool:
        """Whether a step or the engine has taken it up."""
        return bool(self.scheduled_at)

    def take(self, fact: Any) -> None:
        """A fact about this request; unknown ones are ignored."""
        handler = self._takes.get(type(fact))
        if handler is not None:
            handler(fact)

    def end(self, fact: facts.RequestEnded) -> None:
        """The last byte, or the death."""
        self.ended, self.ended_at = fact, fact.at

    # ── said by the step log ─────────────────────────────────────────────────────────────────────────────────────

    def join(self, log: StepLog, step: int) -> None:
        """One more sequence of this request is in the batch from `step` on."""
        _, first, sequences = self.present.get(id(log), (log, step, 0))
        self._close_run(log, first, step - 1, sequences)
        self.present[id(log)] = (log, step, sequences + 1)

    def leave(self, log: StepLog, last: int, all_of_it: bool) -> None:
        """One sequence (or all) was in the batch up to `last`."""
        present = self.present.pop(id(log), None)
        if present is None:
            return
        _, first, sequences = present
        self._close_run(log, first, last, sequences)
        if sequences > 1 and not all_of_it:
            self.present[id(log)] = (log, last + 1, sequences - 1)

    def schedule(self, at: int, step: int, tokens: int, size: int, log: StepLog) -> None:
        """A chunk of the prompt is in this step."""
        self._once("scheduled_at", at)
        if not self.first_step_done_at:
            self.prefill_chunks.append((log, step, at, tokens, size))

    def first_token(self, at: int, step: int) -> None:
        """This step delivered the first token."""
        self._once("first_step_done_at", at)
        self.is_prefilling = False

    def all_runs(self) -> list[Run]:
        """Every run, those still going on included."""
        going = [Run(log, first, log.last_step, n) for log, first, n in self.present.values()]
        return self.runs + [run for run in going if run.first <= run.last]

    def _close_run(self, log: StepLog, first: int, last: int, sequences: int) -> None:
        if sequences and first <= last:
            self.runs.append(Run(log, first, last, sequences))

    def _once(self, name: str, at: int) -> None:
        if not getattr(self, name):
            setattr(self, name, at)

    def _http(self, fact: facts.HttpDescribed) -> None:
        said = zip((semconv.HTTP_REQUEST_METHOD, semconv.URL_SCHEME, semconv.HTTP_ROUTE), fact[1:])
        self.attributes.update((key, value) for key, value in said if value)

    def _stage(self, fact: facts.StageEnded) -> None:
        if len(self.stages) < MAX_STAGES:
            self.stages.append(fact)
        else:
            self.stages_left_out += 1

    def _preempted(self, fact: facts.RequestPreempted) -> None:
        self.preempted.append(fact)
        # Its KV is gone: the next steps it is in compute prompt and output over again.
        self.is_prefilling = self.is_prefilling or fact.kind == "recompute"

    def _submitted(self, fact: facts.RequestSubmitted) -> None:
        if self.submitted is None:
            self.submitted = fact
        else:
            self.submitted = self.submitted._replace(sequences=self.submitted.sequences + fact.sequences)


def conclude(request: Request) -> RequestRecord:
    """The record of an ended request."""
    arrived, ended = request.arrived, request.ended
    assert ended is not None
    submitted = request.submitted
    record = RequestRecord(
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
        ended_at=max(ended.at, arrived.at),
        wall_offset=arrived.wall_at - arrived.at,
        generative=not arrived.flags & facts.NON_GENERATIVE,
        outcome=ended.outcome,
        error_type=ended.error_type,
        status_code=ended.status_code,
        chunks=ended.chunks,
        ring=request.ring,
        handle=request.handle,
    )
    _adopt_said(record, request)
    _adopt_steps(record, request)
    _adopt_stages(record, request, ended)
    if not record.operation and any(stage.name != semconv.SPAN_INGRESS for stage in record.stages):
        record.operation = semconv.OPERATION_INFERENCE
    if record.outcome != facts.OK:
        record.died_in = _died_in(record, request)
    return record


def _adopt_said(record: RequestRecord, request: Request) -> None:
    """What user code and the integrations said of the request; the conventions' own keys win a field each."""
    attributes = dict(request.attributes)
    record.operation = str(attributes.pop(semconv.OPERATION_NAME, record.operation))
    record.provider = str(attributes.pop(semconv.PROVIDER_NAME, record.provider))
    record.model = str(attributes.pop(semconv.REQUEST_MODEL, record.model))
    record.attributes = attributes
    record.events, record.links, record.span_name = request.events, request.links, request.span_name
    record.telemetry_lost = request.telemetry_lost
    record.preemptions = len(request.preempted)
    record.finish_reasons = tuple(dict.fromkeys(fact.reason for fact in request.finished if fact.reason))
    if request.submitted:
        _, record.sequences, record.input_tokens, record.max_tokens, _ = request.submitted


def _adopt_steps(record: RequestRecord, request: Request) -> None:
    by_log: dict[int, list[Run]] = {}
    for run in request.all_runs():
        by_log.setdefault(id(run.log), []).append(run)
    parts = []
    for number, runs in by_log.items():
        deltas = {key: delta for key, delta in request.deltas.items() if key[0] == number}
        rows, forgotten = runs[0].log.rows(sorted(runs, key=lambda run: run.first), deltas)
        record.steps_forgotten += forgotten
        parts.append(rows)
    said = sum(fact.output_tokens for fact in request.finished)
    if parts:
        rows = joined_rows(parts)
        if record.outcome == facts.ABORTED:  # what the engine still computed after the reader had gone
            in_time = rows.ended_at <= record.ended_at
            rows = rows.take(in_time)
        if len(rows):
            record.steps = rows
            record.first_token_at = int(rows.ended_at[0]) if not record.steps_forgotten else 0
            record.last_token_at = int(rows.ended_at[-1])
    record.output_tokens = said or (int(record.steps.tokens.sum()) if record.steps is not None else 0)
    record.discarded = request.discarded
    record.first_token_at = request.first_step_done_at or record.first_token_at
    for log, step, at, tokens, size in request.prefill_chunks:
        ended_at = log.ended_at(step)
        if ended_at:
            record.prefill_steps.append(PrefillStep(step, at, ended_at, tokens, size))


def _adopt_stages(record: RequestRecord, request: Request, ended: facts.RequestEnded) -> None:
    stages: list[Stage] = []
    submitted_at = request.submitted.at if request.submitted else 0
    said = sorted(
        (fact for fact in request.stages if fact.at <= record.ended_at), key=lambda fact: fact.started_at
    )
    touched = [fact.started_at for fact in said if fact.stage != semconv.SPAN_INGRESS]
    touched += [at for at in (submitted_at, request.scheduled_at) if at]
    reached_engine = bool(touched)
    first_touch = min(touched) if touched else record.ended_at
    if (
        record.server_span_id
        or any(fact.stage == semconv.SPAN_INGRESS for fact in said)
        or record.status_code
    ):
        stages.append(Stage(semconv.SPAN_INGRESS, record.arrived_at, first_touch, {}))
    for fact in said:
        if fact.stage != semconv.SPAN_INGRESS:
            extra: dict[str, facts.Value] = {semconv.ITEMS: fact.items} if fact.items else {}
            stages.append(Stage(fact.stage, fact.started_at, fact.at, extra))
    first_token_at = record.first_token_at or (request.token_reached_at if not request.prefill_chunks else 0)
    if submitted_at:
        stages.append(_queue(request, submitted_at, request.scheduled_at or record.ended_at))
    if request.scheduled_at and record.generative:
        end = first_token_at or record.ended_at
        if end > request.scheduled_at:
            stages.append(Stage(semconv.SPAN_PREFILL, request.scheduled_at, end, _kv_start(request)))
    if first_token_at and record.last_token_at > first_token_at:
        stages.append(Stage(semconv.SPAN_DECODE, first_token_at, record.last_token_at, {}))
    last = record.last_token_at or first_token_at
    if last and record.ended_at > last and (record.chunks or ended.detokenize_ns or record.status_code):
        stages.append(Stage(semconv.SPAN_POSTPROCESS, last, record.ended_at, _egress(request, ended)))
    elif reached_engine and request.response_started_at and not last:
        stages.append(
            Stage(
                semconv.SPAN_POSTPROCESS,
                request.response_started_at,
                record.ended_at,
                _egress(request, ended),
            )
        )
    record.stages = stages
    record.first_token_at = request.first_sent_at or request.token_reached_at or first_token_at


def _queue(request: Request, submitted_at: int, until: int) -> Stage:
    attributes: dict[str, facts.Value] = {}
    if submitted_at <= request.received_at <= until:
        attributes[semconv.QUEUE_HIDDEN] = (request.received_at - submitted_at) / 1e9
        attributes[semconv.QUEUE_SCHEDULER] = (until - request.received_at) / 1e9
    return Stage(semconv.SPAN_QUEUE, submitted_at, max(until, submitted_at), attributes)


def _kv_start(request: Request) -> dict[str, facts.Value]:
    if not request.prefill_chunks:
        return {}
    log, step, *_ = request.prefill_chunks[0]
    utilization = log.kv_at(step)
    return {} if utilization != utilization else {semconv.KV_UTILIZATION_START: utilization}


def _egress(request: Request, ended: facts.RequestEnded) -> dict[str, facts.Value]:
    attributes: dict[str, facts.Value] = {semconv.SEND_WAIT: ended.send_wait_ns / 1e9}
    if ended.detokenize_ns:
        attributes[semconv.DETOKENIZE] = ended.detokenize_ns / 1e9
    if ended.chunks:
        attributes[semconv.CHUNKS] = ended.chunks
    return attributes


def _died_in(record: RequestRecord, request: Request) -> str:
    """The stage the request was in when it ended: the last one that had begun."""
    if request.is_scheduled:
        if not (record.steps is not None or request.token_reached_at):
            return semconv.SPAN_PREFILL
        return semconv.SPAN_POSTPROCESS if request.finished else semconv.SPAN_DECODE
    if request.submitted:
        return semconv.SPAN_QUEUE
    return request.stages[-1].stage if request.stages else semconv.SPAN_INGRESS
