"""Records of requests with their stages, steps and latency breakdown. Instants are monotonic ns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from otel_infer import semconv
from otel_infer.assembly.engine.step_cost import StepCostModel
from otel_infer.assembly.engine.step_rows import (
    RequestSteps,
    StepSummary,
    compute_token_gaps,
    summarize_steps,
)
from otel_infer.assembly.engine.thread_delays import KnownDelays
from otel_infer.assembly.engine.types import PrefillInStep
from otel_infer.assembly.engine.warmup import WarmupSteps
from otel_infer.assembly.records.intervals import uncovered_length
from otel_infer.assembly.records.process import Mark, Pause
from otel_infer.config import tenancy
from otel_infer.ringbuffer.events import OK, CodeLocated, Value


class Stage(NamedTuple):
    """A named interval of a request, as recorded. `attributes`: keyed by their names on the wire."""

    name: str
    started_at: int
    ended_at: int
    attributes: dict[str, Value]


class UserEvent(NamedTuple):
    """An event that user code added to the live request span."""

    at: int
    name: str
    attributes: dict[str, Value]


class UserLink(NamedTuple):
    """A link that user code added from the live request span to another span."""

    trace_id: bytes
    span_id: bytes
    attributes: dict[str, Value]


class PrefillStep(NamedTuple):
    """One chunk of a prompt.

    `previous_ended_at`: end of the step before it, if that was still in flight; 0 otherwise.
    `previous_prompt_tokens`: prompt tokens in that step.
    """

    step: int
    started_at: int
    ended_at: int
    tokens: int
    batch_size: int
    others_prefill_tokens: int = 0
    previous_ended_at: int = 0
    previous_prompt_tokens: int = 0


class Interferer(NamedTuple):
    """A request whose prompt delayed another one, by `length` ns, and its traffic class."""

    trace_id: bytes
    span_id: bytes
    length: int
    traffic_class: str = tenancy.UNKNOWN


class LatencyBreakdown(NamedTuple):
    """The time of a request by cause, ns (none of them 0), and the request that interfered most.

    `interference_by_class`: the interference by traffic class of the interferers; sums to it. `streaming`:
    the part of each cause between the first and the last token. `stalled_by`: the request that interfered
    most then.
    """

    causes: Mapping[str, int]
    interferer: Interferer | None
    interference_by_class: tuple[tuple[str, int], ...] = ()
    streaming: Mapping[str, int] = MappingProxyType({})
    stalled_by: Interferer | None = None

    @property
    def top_cause(self) -> str:
        """The cause with the most time; empty if the request took no time."""
        return max(self.causes, key=self.causes.__getitem__, default="")


class GenerationGap(NamedTuple):
    """The time from the end of one generation of a request to the submission of its next.

    `scheduled_at`: when the next generation was first scheduled; 0 = not seen.
    """

    since: int
    until: int
    scheduled_at: int


@dataclass(slots=True)
class RequestRecord:
    """One finished request, with all that its spans and metrics contain.

    Spans. `wall_offset`: unix ns − monotonic ns. `server_span_id`: id of the server span if it is ours, else
    empty. It equals `span_id` where the request reached no engine, because one span is then exported for
    both. `redundant`: the parent span contains all that this request's span would. `telemetry_lost`: the
    record is true but incomplete. `start_ids`: trace and span id of the process's start, on the first request
    of a process.

    Steps. `step_stride`: one of this many steps is the request's, where several batches are in flight
    (pipeline parallelism). `is_multi_engine`: several engines ran its sequences. `interrupted_step`: the
    unfinished step of a request that failed, up to its end. `later_prefill_tokens`: own prompt tokens by step
    after the first token, of other sequences or computed again. `generation_gaps`: the time between
    generations, where the request was submitted several times. `concurrent_sequences`: how many of its
    `sequences` then ran at a time.

    Causes. `cost_model`: of the engine's steps, as known at the end. `call_cost`: of the model's calls by their items. `engine_began_at`: its first step, or the
    arrival if that was later. `prefills_by_step`: the requests with prompt tokens in each step. `thread_delays`: of the engine's thread, read soon after the end. `pauses`: of
    the whole process; `loop_pauses`: of its event loop only. `code_samples`: of late threads of its processes.

    Device. `device_ns`: device time by stage, for stages with at least one timed step. `device_share`: the
    request's share of all its steps on all devices, ns. `device_idle`: ns without device work by row of
    `steps`; -1 = not timed, None = no device times. `memory_free`: bytes of the device with the least free
    memory at arrival, first token and end; 0 = unknown. `gpu_throttled`: why GPU clocks were throttled
    meanwhile. `gpu_throttled_at`: when throttled clocks slowed steps.
    """

    trace_id: bytes
    span_id: bytes
    parent_span_id: bytes
    server_span_id: bytes
    sampled: bool
    remote_parent: bool
    name: str
    operation: str
    provider: str
    model: str
    engine: str
    arrived_at: int
    ended_at: int
    wall_offset: int
    generative: bool = True
    outcome: int = 0
    error_type: str = ""
    failed_stage: str = ""
    status_code: int = 0
    stages: list[Stage] = field(default_factory=list)
    device_ns: list[tuple[str, int]] = field(default_factory=list)
    device_share: int = 0
    device_idle: Any = field(default=None, compare=False)
    memory_free: tuple[int, int, int] = (0, 0, 0)
    gpu_throttled: str = ""
    gpu_throttled_at: tuple[tuple[int, int], ...] = ()
    prefill_steps: list[PrefillStep] = field(default_factory=list)
    interrupted_step: PrefillStep | None = None
    later_prefill_tokens: dict[int, int] = field(default_factory=dict)
    is_multi_engine: bool = False
    generation_gaps: tuple[GenerationGap, ...] = ()
    concurrent_sequences: int = 0
    step_stride: int = 1
    steps: RequestSteps | None = None
    steps_evicted: int = 0
    discarded: int = 0
    first_token_at: int = 0
    last_token_at: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    max_tokens: int = 0
    prefix_tokens: int = 0
    cached_tokens: int = 0
    cached_input_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    sequences: int = 1
    finish_reasons: tuple[str, ...] = ()
    preemptions: int = 0
    chunks: int = 0
    telemetry_lost: bool = False
    redundant: bool = False
    attributes: dict[str, Value] = field(default_factory=dict)
    pauses: tuple[Pause, ...] = ()
    loop_pauses: tuple[Pause, ...] = ()
    marks: tuple[Mark, ...] = ()
    code_samples: tuple[CodeLocated, ...] = ()
    received_at: int = 0
    preempted_at: tuple[int, ...] = ()
    detokenize_ns: int = 0
    cost_model: StepCostModel | None = None
    warmup_steps: WarmupSteps | None = None
    call_cost: StepCostModel | None = None
    engine_began_at: int = 0
    thread_delays: KnownDelays | None = field(default=None, compare=False)
    prefills_by_step: Mapping[int, Sequence[PrefillInStep]] | None = None
    breakdown: LatencyBreakdown | None = None
    events: list[UserEvent] = field(default_factory=list)
    links: list[UserLink] = field(default_factory=list)
    start_ids: tuple[bytes, bytes] | None = None
    span_name: str = ""
    tracestate: str = ""
    ring: int = 0
    handle: int = 0
    _summary: StepSummary | None = None

    def ended_while_preempted(self, since: int) -> bool:
        """Returns whether it failed and was preempted at `since` or later, so it ended while it waited."""
        return self.outcome != OK and self.preempted_at[-1:] >= (since,)

    @property
    def failed_in_queue(self) -> bool:
        """Whether it ended without success before the worker of a queue had called a model for it."""
        has_waited = any(stage.name == semconv.SPAN_QUEUE_WAIT for stage in self.stages)
        return self.outcome != OK and has_waited and not self.operation

    @property
    def duration_ns(self) -> int:
        """From arrival to the last byte, ns."""
        return self.ended_at - self.arrived_at

    @property
    def all_pauses(self) -> tuple[Pause, ...]:
        """Pauses of the whole process, then of its event loop."""
        return self.pauses + self.loop_pauses

    @property
    def ttft_ns(self) -> int:
        """From arrival to the first token, ns; 0 = there was none."""
        return self.first_token_at - self.arrived_at if self.first_token_at else 0

    @property
    def decode_ns(self) -> int:
        """From the first token to the last, ns, without gaps in which steps were lost."""
        if self.steps is not None:
            return self.summary.gaps_total
        if not 0 < self.first_token_at < self.last_token_at:
            return 0
        return uncovered_length(self.generation_gaps, self.first_token_at, self.last_token_at)

    @property
    def final_wait_ns(self) -> int:
        """From the last token to the end of a request that failed while streaming, ns; 0 for other requests."""
        if self.outcome == OK or self.failed_stage != semconv.SPAN_DECODE or not self.last_token_at:
            return 0
        return max(self.ended_at - self.last_token_at, 0)

    @property
    def tokens_after_first(self) -> float:
        """Tokens of each sequence in the gaps that were observed.

        Where events were lost, the time from one step to a much later one is not an observed gap.
        """
        rows, concurrent = self.steps, max(self.concurrent_sequences or self.sequences, 1)
        if rows is not None and (self.telemetry_lost or self.steps_evicted):
            is_observed = (rows.step[1:] - rows.step[:-1] == 1) | (not self.telemetry_lost)
            is_observed[[row - 1 for row in rows.gap_rows]] = False
            return int(rows.tokens[1:][is_observed].sum()) / concurrent
        firsts = len(self.generation_gaps) + 1
        has_gaps = self.decode_ns if rows is None else self.summary.gaps
        return self.output_tokens / concurrent - firsts if has_gaps else 0

    def gaps_ns(self) -> Any:
        """Returns the times between consecutive steps with tokens, ns; no gap spans steps that were lost."""
        return () if self.steps is None else compute_token_gaps([self.steps], [self.telemetry_lost])[0]

    @property
    def summary(self) -> StepSummary:
        """Totals and percentiles of the decode steps."""
        if self._summary is None:
            (self._summary,) = summarize_steps([self.steps], [self.telemetry_lost])
        return self._summary

    @summary.setter
    def summary(self, summary: StepSummary) -> None:
        self._summary = summary

    def find_stage(self, name: str) -> Stage | None:
        """Returns the first stage with this name; None if there is none."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        return None
