"""One request while its facts arrive: what was said of it, and which steps it took part in.

Longer than a module should be: all facts of a request are taken in one place.
"""

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
from otel_infer.ringbuffer import events as facts

MAX_STAGES = 256
"""Stages of one request that are remembered."""
OUTCOME_BY_REASON = {"abort": facts.ABORTED, "error": facts.ERROR}
"""What a request came to whose sequences all ended for this reason, though its response ended well."""


class PromptChunk(NamedTuple):
    """What one step computed of the request's prompt. `size`: of the batch."""

    at: int
    tokens: int
    size: int


@dataclass(slots=True, eq=False)
class OpenRequest:
    """What is known of a request so far. Instants are 0 until they are seen.

    `steps_lost`: steps are missing that it may have been in, so no later step is known to be its first.
    `resumed`: by engine, the step from which on all of them are known again, so that its last one is if it came after.
    `touch_lost`: facts are missing from before anything but its arrival was seen.
    `present`: by engine, the first step of the run that goes on, and how many sequences are in it.
    `concluded_at`: what happened later is not taken into account.
    `asked`: when the engine was, and for how many sequences.
    `is_end_seen`: or else it ended somewhere before the instant that `ended` has until it is concluded.
    `parts`: in other processes, as (ring, handle); of several in one, the last counts.
    """

    ring: int
    handle: int
    arrived: facts.RequestArrived
    fragments: list[tuple[int, int]] = field(default_factory=list)
    ended: facts.RequestEnded | None = None
    submitted: facts.RequestSubmitted | None = None
    received_at: int = 0
    scheduled_at: int = 0
    token_reached_at: int = 0
    first_sent_at: int = 0
    response_started_at: int = 0
    first_step_done_at: int = 0
    finished: list[facts.EngineFinished] = field(default_factory=list)
    preempted: list[facts.RequestPreempted] = field(default_factory=list)
    prefixes: list[facts.PrefixRead] = field(default_factory=list)
    drafts: list[facts.TokensDrafted] = field(default_factory=list)
    stages: list[facts.StageEnded | facts.BytesMoved] = field(default_factory=list)
    cache: list[facts.CacheHeld] = field(default_factory=list)
    timed_stages: list[facts.StageTimed] = field(default_factory=list)
    attributes: dict[str, facts.Value] = field(default_factory=dict)
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
    start_ids: tuple[bytes, bytes] | None = None
    cost_model: StepCostModel | None = None
    warmup_steps: WarmupSteps | None = None

    @property
    def arrived_at(self) -> int:
        """Its first byte."""
        return self.arrived.at

    @property
    def outcome(self) -> int:
        """How it ended; well, as long as it has not."""
        if self.ended is not None and self.ended.outcome != facts.OK:
            return self.ended.outcome
        if len(self.finished) == 1:
            return OUTCOME_BY_REASON.get(self.finished[0].reason, facts.OK)
        reasons = {fact.reason for fact in self.finished}
        return OUTCOME_BY_REASON.get(reasons.pop(), facts.OK) if len(reasons) == 1 else facts.OK

    @property
    def ended_at(self) -> int:
        """The last byte, or the death; 0 = it goes on."""
        return max(self.ended.at, self.arrived.at) if self.ended is not None else 0

    @property
    def sequences(self) -> int:
        """How many token streams it was submitted for."""
        return max(self.submitted.sequences, 1) if self.submitted is not None else 1

    @property
    def step_count(self) -> int:
        """In how many it took part by the time it left."""
        return sum([last - first + 1 for _, first, last, _ in self.runs])

    @property
    def is_running(self) -> bool:
        """Whether a step or the engine has taken it up."""
        return bool(self.scheduled_at or self.current_runs or self.runs)

    @property
    def may_prefill_again(self) -> bool:
        """Whether a sequence that joins now with several tokens can be a prompt, though it seems to have a token."""
        return self.steps_lost or self.sequences > 1

    def apply_event(self, fact: Any) -> bool:
        """A fact about this request; unknown ones are ignored. False for one that makes no sense: some are user code's."""
        handler = _HANDLERS.get(type(fact))
        try:
            if handler is not None:
                handler(self, fact)
        except Exception:  # one request's must not cost all others
            return False
        return True

    def mark_events_lost(self) -> None:
        """Facts of its process are missing before this instant."""
        self.telemetry_lost = True
        self.early_events_lost = self.early_events_lost or not (
            self.stages or self.submitted or self.scheduled_at
        )

    def mark_end_lost(self) -> None:
        """It is over, and nobody saw when."""
        self.mark_events_lost()
        self.is_end_observed = False

    def mark_steps_lost(self, since: int = 0) -> None:
        """Steps that it may have been in are missing before this instant; what was seen from `since` on came after."""
        self.telemetry_lost = self.steps_lost = True
        if 0 < since <= self.scheduled_at:
            self.scheduled_at = 0
        if 0 < since <= self.first_step_done_at:
            self.first_step_done_at = 0
        self.known_from = {log: first for log, (first, _) in self.current_runs.items()}
        self.is_prefilling = False

    # ── said by the step log ─────────────────────────────────────────────────────────────────────────────────────

    def update_membership(self, log: EngineStepLog, step: int, sequences: int) -> int:
        """So many sequences of it are in the batch from `step` on; returns how many there were."""
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
        """So many tokens of the prompt are in this step; 0 takes back what was said before."""
        if not self.steps_lost:
            self.scheduled_at = self.scheduled_at or at
        chunks = self.chunks.setdefault(log, {})
        if tokens:
            chunks[step] = PromptChunk(at, tokens, size)
        else:
            chunks.pop(step, None)

    def build_prefill_in_step(self, tokens: int) -> PrefillInStep:
        """It has so many tokens of its prompt in a step. Where nobody said how long that is, it is what was seen by now."""
        prompt = self.submitted.input_tokens if self.submitted is not None else 0
        prompt = prompt or sum(chunk.tokens for chunks in self.chunks.values() for chunk in chunks.values())
        named = tenancy.request_class(self.attributes.get(semconv.TRAFFIC_CLASS), prompt)
        return PrefillInStep(self.arrived.trace_id, self.arrived.span_id, tokens, named)

    def record_tokens(self, log: EngineStepLog, step: int, tokens: int, discarded: bool) -> None:
        """One of its sequences got so many tokens, and not one, in this step."""
        deltas = self.token_deltas.setdefault(log, {})
        deltas[step] = deltas.get(step, 0) + tokens - 1
        self.discarded += discarded

    def record_first_token(self, at: int) -> None:
        """A sequence got its first token, or the first one after its KV was lost."""
        if not self.steps_lost:
            self.first_step_done_at = self.first_step_done_at or at
        self.is_prefilling = False

    def is_last(self, log: EngineStepLog, step: int) -> bool:
        """Whether the last step that is known to have delivered something is the last one that did."""
        return not self.steps_lost or step >= self.known_from.get(log, step + 1)

    def close_at(self, at: int) -> None:
        """Nothing that happens after this instant belongs to it, and no more facts will come."""
        self.concluded_at = at
        for log, (first, sequences) in self.current_runs.items():
            if first <= log.table.last:
                self.runs.append(StepRun(log, first, log.table.last, sequences))
        self.current_runs = {}
        if self.runs:
            for log in {run.log for run in self.runs}:
                log.resolve_pending()
            self.cost_model, self.warmup_steps = self.runs[-1].log.baseline.get_model_and_warmup()
        if self.ended is not None and not self.is_end_observed:
            self.ended = self.ended._replace(at=min(self.ended.at, self._last_observed_at()))

    def _last_observed_at(self) -> int:
        """The last instant at which something is known to have happened to it."""
        facts_seen = (self.arrived, *self.finished, *self.stages, *self.events)
        instants = [fact.at for fact in (*facts_seen, self.submitted) if fact is not None]
        instants += (self.received_at, self.scheduled_at, self.token_reached_at, self.first_step_done_at)
        instants += (self.first_sent_at, self.response_started_at)
        return max(*instants, *[log.table.ended_at(last) for log, _, last, _ in self.runs])

    # ── said of the request ──────────────────────────────────────────────────────────────────────────────────────

    def _set_http_attributes(self, fact: facts.HttpDescribed) -> None:
        said = zip((semconv.HTTP_REQUEST_METHOD, semconv.URL_SCHEME, semconv.HTTP_ROUTE), fact[1:])
        self.attributes.update((key, value) for key, value in said if value)

    def _add_timed_stage(self, fact: facts.StageTimed) -> None:
        if len(self.timed_stages) < MAX_STAGES:
            self.timed_stages.append(fact)

    def _add_cache_size(self, fact: facts.CacheHeld) -> None:
        self.cache[1:] = [fact]  # the first and the last

    def _add_stage(self, fact: facts.StageEnded | facts.BytesMoved) -> None:
        if len(self.stages) < MAX_STAGES:
            self.stages.append(fact)

    def _add_preemption(self, fact: facts.RequestPreempted) -> None:
        self.preempted.append(fact)
        # If its KV is gone, the next steps it is in compute prompt and output over again.
        if fact.kind == "recompute":
            self.is_prefilling = True
            for log, (_, sequences) in self.current_runs.items():
                if sequences == 1:
                    log.restart_prefill(dict(self.fragments).get(log.process, self.handle))

    def _add_submission(self, fact: facts.RequestSubmitted) -> None:
        said = self.submitted
        if fact.sequences and len(self.submissions) < MAX_STAGES:
            self.submissions.append((fact.at, fact.sequences))
        elif fact.sequences:
            at, sequences = self.submissions[-1]
            self.submissions[-1] = at, sequences + fact.sequences
        if said is None:
            self.submitted = fact
        else:  # of several prompts
            self.submitted = said._replace(
                sequences=said.sequences + fact.sequences,
                input_tokens=said.input_tokens + fact.input_tokens,
                max_tokens=max(said.max_tokens, fact.max_tokens),
            )


def _first_time_setter(name: str) -> Callable[[OpenRequest, Any], None]:
    def set_first_time(request: OpenRequest, fact: Any) -> None:
        if not getattr(request, name):
            setattr(request, name, fact.at)

    return set_first_time


def _add_span_event(request: OpenRequest, fact: facts.SpanEventAdded) -> None:
    request.events.append(UserEvent(fact.at, fact.name, dict(fact.attributes)))


def _describe_link(request: OpenRequest, fact: facts.LinkDescribed) -> None:
    for link in reversed(request.links):
        if link.span_id.hex() == fact.span_id:
            link.attributes.update(fact.attributes)
            return


def _add_out_of_memory(request: OpenRequest, fact: facts.MemoryRefused) -> None:
    names = semconv.MEMORY_WANTED, semconv.MEMORY_LIMIT, semconv.MEMORY_FREE
    sizes: dict[str, facts.Value] = dict(zip(names, (fact.wanted, fact.limit, fact.free)))
    request.events.append(UserEvent(fact.at, semconv.EVENT_OUT_OF_MEMORY, sizes))


# One table for all: bound to each request, it would tie a request to itself, to be found by the garbage collector alone.
_HANDLERS: dict[type, Callable[[OpenRequest, Any], None]] = {
    facts.StageEnded: OpenRequest._add_stage,
    facts.BytesMoved: OpenRequest._add_stage,
    facts.CacheHeld: OpenRequest._add_cache_size,
    facts.StageTimed: OpenRequest._add_timed_stage,
    facts.RequestSubmitted: OpenRequest._add_submission,
    facts.RequestReceived: _first_time_setter("received_at"),
    facts.RequestScheduled: _first_time_setter("scheduled_at"),
    facts.TokenReached: _first_time_setter("token_reached_at"),
    facts.FirstTokenSent: _first_time_setter("first_sent_at"),
    facts.ResponseStarted: _first_time_setter("response_started_at"),
    facts.EngineFinished: lambda request, fact: request.finished.append(fact),
    facts.RequestPreempted: OpenRequest._add_preemption,
    facts.PrefixRead: lambda request, fact: request.prefixes.append(fact),
    facts.TokensDrafted: lambda request, fact: request.drafts.append(fact),
    facts.AttributeSet: lambda request, fact: request.attributes.__setitem__(fact.key, fact.value),
    facts.SpanEventAdded: _add_span_event,
    facts.MemoryRefused: _add_out_of_memory,
    facts.SpanLinked: lambda request, fact: request.links.append(UserLink(fact.trace_id, fact.span_id, {})),
    facts.LinkDescribed: _describe_link,
    facts.HttpDescribed: OpenRequest._set_http_attributes,
    facts.SpanUnseen: lambda request, fact: setattr(request, "unseen", True),
    facts.NameUpdated: lambda request, fact: setattr(request, "span_name", fact.name),
    facts.StateCarried: lambda request, fact: setattr(request, "tracestate", fact.tracestate),
}
