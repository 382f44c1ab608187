"""Collects the events of one request while it is open, and the steps that it is in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from otel_infer import semconv
from otel_infer.assembly.engine.step_cost import StepCostModel
from otel_infer.assembly.engine.step_log import EngineStepLog, StepRun
from otel_infer.assembly.engine.types import PrefillInStep
from otel_infer.assembly.engine.warmup import WarmupSteps
from otel_infer.assembly.records.process import Mark, Pause
from otel_infer.assembly.records.request import UserEvent, UserLink
from otel_infer.config import tenancy
from otel_infer.ringbuffer import events as ring_events

MAX_STAGES = 256
"""Stages stored per request."""
OUTCOME_BY_REASON = {"abort": ring_events.ABORTED, "error": ring_events.ERROR}
"""Outcome of a request whose sequences all finished for this reason, even if its response ended well."""


class PromptChunk(NamedTuple):
    """The tokens of the request's prompt in one step. `size`: of the batch."""

    at: int
    tokens: int
    size: int


@dataclass(slots=True, eq=False)
class OpenRequest:
    """The state of a request that is not concluded. Instants are 0 until they are seen.

    `fragments`: its handles in other processes, as (ring, handle); where one process has several, the last counts.
    `is_end_observed`: False if the end was lost; `ended` then holds a later instant until the conclusion.
    `early_events_lost`: events were lost before anything but its arrival was recorded. `steps_lost`: steps are missing
    that it may have been in, so no later step is known to be its first. `known_from`: by engine, the first step from
    which on all its steps are known. Its last step is known if it came after. `current_runs`: by engine, the first step
    of the current run, and the number of sequences in it. `submissions`: instant and number of sequences of each.
    `concluded_at`: later events are ignored.
    """

    ring: int
    handle: int
    arrived: ring_events.RequestArrived
    fragments: list[tuple[int, int]] = field(default_factory=list)
    ended: ring_events.RequestEnded | None = None
    submitted: ring_events.RequestSubmitted | None = None
    accepted_since: int = 0
    received_at: int = 0
    scheduled_at: int = 0
    token_reached_at: int = 0
    first_sent_at: int = 0
    response_started_at: int = 0
    first_step_done_at: int = 0
    finished: list[ring_events.EngineFinished] = field(default_factory=list)
    preempted: list[ring_events.RequestPreempted] = field(default_factory=list)
    prefixes: list[ring_events.PrefixRead] = field(default_factory=list)
    drafts: list[ring_events.TokensDrafted] = field(default_factory=list)
    stages: list[ring_events.StageEnded | ring_events.BytesMoved] = field(default_factory=list)
    cache: list[ring_events.CacheHeld] = field(default_factory=list)
    timed_stages: list[ring_events.StageTimed] = field(default_factory=list)
    attributes: dict[str, ring_events.Value] = field(default_factory=dict)
    events: list[UserEvent] = field(default_factory=list)
    links: list[UserLink] = field(default_factory=list)
    span_name: str = ""
    tracestate: str = ""
    unseen: bool = False
    recovered: bool = False
    telemetry_lost: bool = False
    steps_lost: bool = False
    early_events_lost: bool = False
    is_prefilling: bool = True
    known_from: dict[EngineStepLog, int] = field(default_factory=dict)
    runs: list[StepRun] = field(default_factory=list)
    current_runs: dict[EngineStepLog, tuple[int, int]] = field(default_factory=dict)
    token_deltas: dict[EngineStepLog, dict[int, int]] = field(default_factory=dict)
    chunks: dict[EngineStepLog, dict[int, PromptChunk]] = field(default_factory=dict)
    discarded: int = 0
    submissions: list[tuple[int, int]] = field(default_factory=list)
    concluded_at: int = 0
    is_end_observed: bool = True
    pauses: tuple[Pause, ...] = ()
    marks: tuple[Mark, ...] = ()
    code_samples: tuple[ring_events.CodeLocated, ...] = ()
    start_ids: tuple[bytes, bytes] | None = None
    cost_model: StepCostModel | None = None
    warmup_steps: WarmupSteps | None = None

    @property
    def arrived_at(self) -> int:
        """When it arrived: in the server's socket or queue of jobs if that was measured, else at the application."""
        return self.accepted_since or self.arrived.at

    @property
    def outcome(self) -> int:
        """Its outcome; `OK` while it has not ended."""
        if self.ended is not None and self.ended.outcome != ring_events.OK:
            return self.ended.outcome
        if not self.finished:
            return ring_events.OK
        if len(self.finished) == 1:
            return OUTCOME_BY_REASON.get(self.finished[0].reason, ring_events.OK)
        reasons = {event.reason for event in self.finished}
        return OUTCOME_BY_REASON.get(reasons.pop(), ring_events.OK) if len(reasons) == 1 else ring_events.OK

    @property
    def ended_at(self) -> int:
        """When its last byte was sent, or it failed; 0 = it is in flight."""
        return max(self.ended.at, self.arrived.at) if self.ended is not None else 0

    @property
    def sequences(self) -> int:
        """The number of sequences that were submitted, at least 1."""
        return max(self.submitted.sequences, 1) if self.submitted is not None else 1

    @property
    def step_count(self) -> int:
        """The number of steps in its finished runs."""
        return sum([last - first + 1 for _, first, last, _ in self.runs])

    @property
    def is_running(self) -> bool:
        """Whether it was scheduled or was in a step."""
        return bool(self.scheduled_at or self.current_runs or self.runs)

    @property
    def may_prefill_again(self) -> bool:
        """Whether a sequence that joins with several tokens may be prefill, although the request has a token."""
        return self.steps_lost or self.sequences > 1

    def mark_events_lost(self) -> None:
        """Records that events of its process before this instant are missing."""
        self.telemetry_lost = True
        has_begun = bool(self.stages or self.submitted or self.scheduled_at)
        self.early_events_lost = self.early_events_lost or not has_begun

    def mark_end_lost(self) -> None:
        """Records that it is over, and that its end was not observed."""
        self.mark_events_lost()
        self.is_end_observed = False

    def mark_steps_lost(self, since: int = 0) -> None:
        """Records that steps are missing that the request may have been in.

        `since`: when the first step after them began; 0 = unknown. The first schedule and the first token are
        unknown again if they were recorded after it.
        """
        self.telemetry_lost = self.steps_lost = True
        if 0 < since <= self.scheduled_at:
            self.scheduled_at = 0
        if 0 < since <= self.first_step_done_at:
            self.first_step_done_at = 0
        self.known_from = {log: first for log, (first, _) in self.current_runs.items()}
        self.is_prefilling = False

    # ── from the step log ───────────────────────────────────────────────────────────────────────────────────

    def update_membership(self, log: EngineStepLog, step: int, sequences: int) -> int:
        """Sets how many of its sequences are in the batch from `step` on. Returns the previous number."""
        first, before = self.current_runs.get(log, (step, 0))
        if sequences != before:
            if before and first < step:
                self.runs.append(StepRun(log, first, step - 1, before))
            self.current_runs.pop(log, None)
            if sequences:
                self.current_runs[log] = (step, sequences)
                self.known_from.setdefault(log, step)
        return before

    def record_prefill(self, log: EngineStepLog, step: int, at: int, tokens: int, size: int) -> None:
        """Sets the number of its prompt tokens in this step; 0 removes a number that was recorded before."""
        if not self.steps_lost:
            self.scheduled_at = self.scheduled_at or at
        chunks = self.chunks.setdefault(log, {})
        if tokens:
            chunks[step] = PromptChunk(at, tokens, size)
        else:
            chunks.pop(step, None)

    def build_prefill_in_step(self, tokens: int) -> PrefillInStep:
        """Returns its prompt tokens in a step, with its class: by the chunks so far, if its length was not recorded."""
        prompt = self.submitted.input_tokens if self.submitted is not None else 0
        prompt = prompt or sum(chunk.tokens for chunks in self.chunks.values() for chunk in chunks.values())
        traffic_class = tenancy.request_class(self.attributes.get(semconv.TRAFFIC_CLASS), prompt)
        return PrefillInStep(self.arrived.trace_id, self.arrived.span_id, tokens, traffic_class)

    def record_tokens(self, log: EngineStepLog, step: int, tokens: int, discarded: bool) -> None:
        """Records that one of its sequences got `tokens` tokens in this step instead of one."""
        deltas = self.token_deltas.setdefault(log, {})
        deltas[step] = deltas.get(step, 0) + tokens - 1
        self.discarded += discarded

    def record_first_token(self, at: int) -> None:
        """Records the first token of a sequence, or its first one after its KV blocks were lost."""
        if not self.steps_lost:
            self.first_step_done_at = self.first_step_done_at or at
        self.is_prefilling = False

    def is_last(self, log: EngineStepLog, step: int) -> bool:
        """Returns whether `step`, the last known step with a token, is certainly the last one with a token."""
        return not self.steps_lost or step >= self.known_from.get(log, step + 1)

    def close_at(self, at: int) -> None:
        """Closes the request: later events are ignored, and its runs end."""
        self.concluded_at = at
        for log, (first, sequences) in self.current_runs.items():
            if first <= log.table.last:
                self.runs.append(StepRun(log, first, log.table.last, sequences))
        self.current_runs = {}
        if self.runs:
            for log in {run.log for run in self.runs}:
                log.resolve_pending(self.ended_at)
            self.cost_model, self.warmup_steps = self.runs[-1].log.baseline.get_model_and_warmup()
        if self.ended is not None and not self.is_end_observed:
            self.ended = self.ended._replace(at=min(self.ended.at, self._last_observed_at()))

    def _last_observed_at(self) -> int:
        """Returns the last instant at which something certainly happened to it."""
        seen = (self.arrived, *self.finished, *self.stages, *self.events)
        instants = [event.at for event in (*seen, self.submitted) if event is not None]
        instants += (self.received_at, self.scheduled_at, self.token_reached_at, self.first_step_done_at)
        instants += (self.first_sent_at, self.response_started_at)
        return max(*instants, *[log.table.ended_at(last) for log, _, last, _ in self.runs])

    # ── from events of the request ──────────────────────────────────────────────────────────────────────────

    def _add_timed_stage(self, event: ring_events.StageTimed) -> None:
        if len(self.timed_stages) < MAX_STAGES:
            self.timed_stages.append(event)

    def _add_cache_size(self, event: ring_events.CacheHeld) -> None:
        self.cache[1:] = [event]  # the first and the last are stored

    def _add_stage(self, event: ring_events.StageEnded | ring_events.BytesMoved) -> None:
        if event.stage in semconv.WAITS_BEFORE_ARRIVAL and not self.stages:
            self.accepted_since = min(event.started_at, self.arrived.at)
        if len(self.stages) < MAX_STAGES:
            self.stages.append(event)

    def _add_preemption(self, event: ring_events.RequestPreempted) -> None:
        self.preempted.append(event)
        # If its KV blocks are gone, its next steps compute prompt and output again.
        if event.kind == "recompute":
            self._restart_prefill()

    def _restart_prefill(self) -> None:
        self.is_prefilling = True
        for log, (_, sequences) in self.current_runs.items():
            if sequences == 1:
                log.restart_prefill(dict(self.fragments).get(log.process, self.handle))

    def _add_submission(self, event: ring_events.RequestSubmitted) -> None:
        previous = self.submitted
        if previous is not None and event.sequences and len(self.finished) >= previous.sequences > 0:
            self._restart_prefill()  # one generation after another
        if event.sequences and len(self.submissions) < MAX_STAGES:
            self.submissions.append((event.at, event.sequences))
        elif event.sequences:
            at, sequences = self.submissions[-1]
            self.submissions[-1] = at, sequences + event.sequences
        if previous is None:
            self.submitted = event
        else:  # several prompts
            self.submitted = previous._replace(
                sequences=previous.sequences + event.sequences,
                input_tokens=previous.input_tokens + event.input_tokens,
                max_tokens=max(previous.max_tokens, event.max_tokens),
            )


def _first_time_setter(name: str) -> Callable[[OpenRequest, Any], None]:
    def set_first_time(request: OpenRequest, event: Any) -> None:
        if not getattr(request, name):
            setattr(request, name, event.at)

    return set_first_time


def _attributes_setter(keys: tuple[str, ...]) -> Callable[[OpenRequest, Any], None]:
    def set_attributes(request: OpenRequest, event: Any) -> None:
        for key, value in zip(keys, event[1:]):
            if value:
                request.attributes[key] = value

    return set_attributes


def _add_span_event(request: OpenRequest, event: ring_events.SpanEventAdded) -> None:
    request.events.append(UserEvent(event.at, event.name, dict(event.attributes)))


def _describe_link(request: OpenRequest, event: ring_events.LinkDescribed) -> None:
    for link in [link for link in request.links if link.span_id.hex() == event.span_id][-1:]:
        link.attributes.update(event.attributes)


def _add_out_of_memory(request: OpenRequest, event: ring_events.MemoryRefused) -> None:
    names = semconv.MEMORY_WANTED, semconv.MEMORY_LIMIT, semconv.MEMORY_FREE
    sizes: dict[str, ring_events.Value] = dict(zip(names, (event.wanted, event.limit, event.free)))
    request.events.append(UserEvent(event.at, semconv.EVENT_OUT_OF_MEMORY, sizes))


# One table for all requests: bound methods in each request would form a reference cycle, which only the collector frees.
HANDLERS: dict[type, Callable[[OpenRequest, Any], None]] = {
    ring_events.StageEnded: OpenRequest._add_stage,
    ring_events.BytesMoved: OpenRequest._add_stage,
    ring_events.CacheHeld: OpenRequest._add_cache_size,
    ring_events.StageTimed: OpenRequest._add_timed_stage,
    ring_events.RequestSubmitted: OpenRequest._add_submission,
    ring_events.RequestReceived: _first_time_setter("received_at"),
    ring_events.RequestScheduled: _first_time_setter("scheduled_at"),
    ring_events.TokenReached: _first_time_setter("token_reached_at"),
    ring_events.FirstTokenSent: _first_time_setter("first_sent_at"),
    ring_events.ResponseStarted: _first_time_setter("response_started_at"),
    ring_events.EngineFinished: lambda request, event: request.finished.append(event),
    ring_events.RequestPreempted: OpenRequest._add_preemption,
    ring_events.PrefixRead: lambda request, event: request.prefixes.append(event),
    ring_events.TokensDrafted: lambda request, event: request.drafts.append(event),
    ring_events.AttributeSet: lambda request, event: request.attributes.__setitem__(event.key, event.value),
    ring_events.SpanEventAdded: _add_span_event,
    ring_events.MemoryRefused: _add_out_of_memory,
    ring_events.SpanLinked: lambda request, event: request.links.append(UserLink(event[1], event[2], {})),
    ring_events.LinkDescribed: _describe_link,
    ring_events.OperationNamed: _attributes_setter(ring_events.OPERATION_KEYS),
    ring_events.ModelPlaced: _attributes_setter(ring_events.PLACE_KEYS),
    ring_events.BatchFormed: _attributes_setter(ring_events.BATCH_KEYS),
    ring_events.CallServed: _attributes_setter(ring_events.RPC_KEYS),
    ring_events.HttpDescribed: _attributes_setter(ring_events.HTTP_KEYS),
    ring_events.SpanUnseen: lambda request, event: setattr(request, "unseen", True),
    ring_events.StepsUnrecorded: lambda request, event: request.mark_steps_lost(),
    ring_events.NameUpdated: lambda request, event: setattr(request, "span_name", event.name),
    ring_events.StateCarried: lambda request, event: setattr(request, "tracestate", event.tracestate),
}
"""How an event changes the request that it belongs to."""
