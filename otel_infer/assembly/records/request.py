"""What the assembler concludes from facts: requests with their stages and steps. Instants are monotonic ns.

Long: a word for each thing that is concluded, and nothing else.
"""

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
from otel_infer.ringbuffer.events import OK, Value


class Stage(NamedTuple):
    """A named interval of a request, as it was seen; `attributes` keyed by names on the wire."""

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
    """A link from the live request span to another, that user code added."""

    trace_id: bytes
    span_id: bytes
    attributes: dict[str, Value]


class PrefillStep(NamedTuple):
    """One chunk of a prompt. `behind_until`: when the step before it was done, and `behind_prompts`: the prompt tokens in that one."""

    step: int
    started_at: int
    ended_at: int
    tokens: int
    batch_size: int
    others_prefill_tokens: int = 0
    previous_ended_at: int = 0
    previous_prompt_tokens: int = 0


class Interferer(NamedTuple):
    """A request whose prompt held up another, for how long (ns), and its class."""

    trace_id: bytes
    span_id: bytes
    length: int
    traffic_class: str = tenancy.UNKNOWN


class LatencyBreakdown(NamedTuple):
    """Where the time of a request went: ns by cause (none of them 0), and who interfered most.

    `classes`: the interference by class of those who caused it; they sum to it. `streaming`: what of the causes was between its
    first token and its last, and `stalled_by`: who interfered most then.
    """

    causes: Mapping[str, int]
    interferer: Interferer | None
    interference_by_class: tuple[tuple[str, int], ...] = ()
    streaming: Mapping[str, int] = MappingProxyType({})
    stalled_by: Interferer | None = None

    @property
    def top_cause(self) -> str:
        """The cause with the most time; empty if the request took none."""
        return max(self.causes, key=self.causes.__getitem__, default="")


class GenerationGap(NamedTuple):
    """The engine had done all that it was asked for, until it was asked again. `scheduled_at`: when it took that up; 0 = not seen."""

    since: int
    until: int
    scheduled_at: int


@dataclass(slots=True)
class RequestRecord:
    """One finished request, with everything that its spans and metrics say. `wall_offset`: unix ns − monotonic ns.

    `server_span_id`: of the server span, if it is ours; the same as `span_id` where the request reached no engine, so that the
    two are one. `redundant`: its span would say nothing that the one above it does not. `telemetry_lost`: what is here is true,
    but not all of it is. `costs`: of its engine's steps, as known at its end. `prefillers`: whose prompts were in a step, and
    `strain`: what its engine's thread suffered, asked soon after. `pauses` held up the whole process, `loop_pauses` its event
    loop alone. `device_ns`: how long a device was at each stage, of which some steps at least were timed; `device_share`: its part of
    all its steps on all devices, ns; `device_idle`: by row of `steps`, ns in which the device had nothing to do (-1 = not timed),
    None if nobody knows. `memory_free`: bytes of the device that had least, at arrival, the first token and the end; 0 = not
    known. `throttled`: why GPUs' clocks were held down meanwhile, `throttled_at`: when. `later_prompts`: after its first token, by
    step, the tokens of its own prompts, of other sequences of it or computed again. `is_split`: several engines had sequences of
    it. `cut_step`: of one that did not end well, the step that went on then, up to there. `absences`: where it came to the engine
    more than once, the time between; `at_once`: then, how many of its `sequences` there were at a time. `stride`: where batches take turns and several are in flight (pipeline parallel), one of so many steps is of its
    own. `start`: of the first request of a process, trace and span id of the process's start.
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
    received_at: int = 0
    preempted_at: tuple[int, ...] = ()
    detokenize_ns: int = 0
    cost_model: StepCostModel | None = None
    warmup_steps: WarmupSteps | None = None
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

    @property
    def duration_ns(self) -> int:
        """Arrival to last byte."""
        return self.ended_at - self.arrived_at

    @property
    def all_pauses(self) -> tuple[Pause, ...]:
        """Of the whole process, then of its event loop."""
        return self.pauses + self.loop_pauses

    @property
    def ttft_ns(self) -> int:
        """Arrival to first token; 0 = there was none."""
        return self.first_token_at - self.arrived_at if self.first_token_at else 0

    @property
    def decode_ns(self) -> int:
        """First token to last, but for gaps that were not seen."""
        if self.steps is not None:
            return self.summary.gaps_total
        if not 0 < self.first_token_at < self.last_token_at:
            return 0
        return uncovered_length(self.generation_gaps, self.first_token_at, self.last_token_at)

    @property
    def final_wait_ns(self) -> int:
        """How long nothing had come when it was given up, or failed, in the middle of its stream; 0 = it was not."""
        if self.outcome == OK or self.failed_stage != semconv.SPAN_DECODE or not self.last_token_at:
            return 0
        return max(self.ended_at - self.last_token_at, 0)

    @property
    def tokens_after_first(self) -> float:
        """How many tokens each of its sequences got in the gaps that were seen.

        Where facts were lost, a request may seem to wait from one step to a much later one: that gap was never seen.
        """
        rows, at_once = self.steps, max(self.concurrent_sequences or self.sequences, 1)
        if rows is not None and (self.telemetry_lost or self.steps_evicted):
            seen = (rows.step[1:] - rows.step[:-1] == 1) | (not self.telemetry_lost)
            seen[[row - 1 for row in rows.gap_rows]] = False
            return int(rows.tokens[1:][seen].sum()) / at_once
        firsts = len(self.generation_gaps) + 1
        is_seen = self.decode_ns if rows is None else self.summary.gaps
        return self.output_tokens / at_once - firsts if is_seen else 0

    def gaps_ns(self) -> Any:
        """The time between each two steps that delivered tokens, as a column; a hole where steps were lost is none."""
        return () if self.steps is None else compute_token_gaps([self.steps], [self.telemetry_lost])[0]

    @property
    def summary(self) -> StepSummary:
        """What its decode steps come to."""
        if self._summary is None:
            (self._summary,) = summarize_steps([self.steps], [self.telemetry_lost])
        return self._summary

    @summary.setter
    def summary(self, summary: StepSummary) -> None:
        self._summary = summary

    def find_stage(self, name: str) -> Stage | None:
        """The first stage of this name."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        return None
