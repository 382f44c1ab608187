"""Divides the time of each request among causes, which sum to its duration in whole ns. Pure.

Each ns is attributed once, in this order:

  1. Pauses of the process. Where two overlap, throttling comes second because it is an estimate.
  2. The engine's stages: grammar, KV transfer, queue, prefill, decode. Likewise the waits of an item for a worker and for
     its batch: its handler waits for the result meanwhile, perhaps for a condition or a thread of a pool.
  3. Other recorded stages, latest start first, because a later stage lies inside the others.
  4. `ingress` and `postprocess`.
  5. Delays of the event loop, then the time of the application's code: between two generations, and between
     the stages before the engine's first one.
  6. `unexplained`: the rest.

The engine's stages exclude the time between two generations of one request. Stages that wait for the event
loop give its delays to `event_loop` first. The engine's stages do not wait for it.

Inside decode, the step cost model of the engine (`StepCostModel`) divides each step. The cost of the request
alone is *decode*. The cost of the other sequences' tokens is *batching*. The time beyond that in a step with
other requests' prompts is *interference*. The model's error per step is `StepCostModel.spread`. Warmup
(`WarmupSteps`) and thread delays (`KnownDelays`) are taken out of the excess. The remaining excess is
*unexplained* where it exceeds three times the spread and a twentieth of the cost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from otel_infer import semconv
from otel_infer.analysis.attribution import interference, prefill, step_columns
from otel_infer.analysis.attribution.batched_call import estimate_batching_time
from otel_infer.analysis.attribution.decode import StepBreakdown, divide_decode
from otel_infer.analysis.attribution.interrupted_step import (
    estimate_interrupted_step_interference,
    estimate_interrupted_step_time,
)
from otel_infer.analysis.attribution.preparation import find_preparation
from otel_infer.assembly.engine.step_rows import STEPS_PER_BATCH
from otel_infer.assembly.records.intervals import (
    FreeIntervals,
    intersect_intervals,
    subtract_interval,
    subtract_intervals,
    uncovered_length,
)
from otel_infer.assembly.records.request import LatencyBreakdown, RequestRecord, Stage
from otel_infer.ringbuffer import events

Causes = dict[str, int]

_OFF_EVENT_LOOP = frozenset(semconv.STAGE_CAUSES) - {semconv.SPAN_INGRESS, semconv.SPAN_POSTPROCESS}
"""Stages that do not wait for the event loop: the engine's, and stages that are a single call."""
_ENGINE_STAGES = (semconv.SPAN_PREFILL, semconv.SPAN_DECODE)
_ITEM_WAITS = (semconv.SPAN_QUEUE_WAIT, semconv.SPAN_BATCH_WAIT)
_STAGE_PRIORITIES = {
    **dict.fromkeys((semconv.SPAN_GRAMMAR, semconv.SPAN_KV_TRANSFER), -2),
    **dict.fromkeys((semconv.SPAN_QUEUE, semconv.SPAN_PREFILL, semconv.SPAN_DECODE), -1),
    **dict.fromkeys(_ITEM_WAITS, -1),
    **dict.fromkeys((semconv.SPAN_POSTPROCESS, semconv.SPAN_INGRESS), 1),
}

MIN_ENGINE_START_NS = 50_000_000  # a shorter wait for an engine's first step is no load of a model


def attribute_latency(records: Sequence[RequestRecord]) -> None:
    """Sets the `breakdown` of each record. A call for many records costs less per record."""
    step_prefills: dict[tuple[int, int], interference.StepPrefills] = {}
    for batch in _split_batches(records):
        decodes, prompts = divide_decode(batch), [prefill.divide_prefill(record) for record in batch]
        for record, decode, prompt in zip(batch, decodes, prompts):
            record.breakdown = _build_breakdown(record, decode, prompt, step_prefills)


def _split_batches(records: Sequence[RequestRecord]) -> Iterator[Sequence[RequestRecord]]:
    begin = steps = 0
    for end, record in enumerate(records, 1):
        steps += len(record.steps) if record.steps is not None else 0
        if steps >= STEPS_PER_BATCH or end == len(records):
            yield records[begin:end]
            begin, steps = end, 0


class _TimeLedger:
    """The time of a request during attribution: free intervals, ns by cause, and ns by cause while streaming.

    `stalled_steps`: the decode steps in which other requests' prompts interfered, as (step, ns).
    """

    def __init__(self, record: RequestRecord, stalled: list[tuple[int, int]]) -> None:
        self.stalled_steps = stalled
        self.free: FreeIntervals = [(record.arrived_at, record.ended_at)]
        self.causes: Causes = defaultdict(int)
        self.streaming: Causes = defaultdict(int)

    def claim_interval(self, begin: int, end: int) -> int:
        """Removes the interval from the free time and returns how much of it was free, ns."""
        self.free, taken = subtract_interval(self.free, begin, end)
        return taken

    def attribute_interval(self, begin: int, end: int, cause: str) -> None:
        """Attributes the free part of the interval to `cause`."""
        self.causes[cause] += self.claim_interval(begin, end)

    def attribute_intervals(
        self, intervals: Sequence[tuple[Any, ...]], decode_stage: Stage | None = None
    ) -> None:
        """Attributes the free part of each (begin, end, cause); time inside `decode_stage` is streaming time."""
        parts = list(intersect_intervals(self.free, intervals))
        self.free = subtract_intervals(self.free, parts)
        for begin, end, cause in parts:
            self.causes[cause] += end - begin
            if decode_stage is not None:
                streamed = min(end, decode_stage.ended_at) - max(begin, decode_stage.started_at)
                self.streaming[cause] += max(streamed, 0)


def _build_breakdown(
    record: RequestRecord,
    decode: StepBreakdown,
    prompt: StepBreakdown,
    step_prefills: dict[tuple[Any, int], interference.StepPrefills],
) -> LatencyBreakdown:
    ledger = _TimeLedger(record, decode.interfered_steps)
    _attribute_time(ledger, record, decode, prompt)
    known = _without_zeros(ledger.causes)
    streaming = _without_zeros(ledger.streaming) if ledger.streaming else {}
    interference_ns = known.get(semconv.CAUSE_INTERFERENCE, 0)
    if not interference_ns:
        return LatencyBreakdown(known, None, streaming=streaming)
    streaming_ns = streaming.get(semconv.CAUSE_INTERFERENCE, 0)
    prefill_steps = [step for step in prompt.interfered_steps if step[1]]
    stalling = interference.find_interferers(record, ledger.stalled_steps, step_prefills)
    interferers = (
        interference.find_interferers(record, prefill_steps + ledger.stalled_steps, step_prefills)
        if prefill_steps
        else stalling
    )
    return LatencyBreakdown(
        causes=known,
        interferer=interference.find_worst_interferer(record, interferers, interference_ns),
        interference_by_class=interference.split_interference_by_class(interferers, interference_ns),
        streaming=streaming,
        stalled_by=interference.find_worst_interferer(record, stalling, streaming_ns),
    )


def _attribute_time(
    ledger: _TimeLedger, record: RequestRecord, decode: StepBreakdown, prompt: StepBreakdown
) -> None:
    """Attributes all time of the request, in the order that the module describes."""
    if record.pauses:
        _attribute_pauses(ledger, record)
    stages = record.stages
    for stage in sorted(stages, key=lambda stage: stage_priority(stage.name, stage.started_at)):
        _attribute_stage(ledger, record, stage, prompt, decode)
    _move_starved_to_throttled(ledger, record)
    if record.loop_pauses:
        _attribute_loop_delay(ledger, record, record.arrived_at, record.ended_at)
    for begin, end, _ in record.generation_gaps:
        ledger.attribute_interval(begin, end, semconv.CAUSE_APPLICATION)
    if ledger.free and not record.telemetry_lost:
        ledger.attribute_interval(*find_preparation(record.stages), semconv.CAUSE_APPLICATION)
    ledger.causes[semconv.CAUSE_UNEXPLAINED] += sum([end - begin for begin, end in ledger.free])


def _without_zeros(causes: Causes) -> Causes:
    return {cause: length for cause, length in causes.items() if length}


def _attribute_pauses(ledger: _TimeLedger, record: RequestRecord) -> None:
    decode, attributable = (
        record.find_stage(semconv.SPAN_DECODE),
        step_columns.select_attributable_pauses(record),
    )
    pauses = [
        pause if pause.cause in semconv.PAUSE_CAUSES else pause._replace(cause=semconv.CAUSE_PAUSE)
        for pause in attributable
    ]
    for is_estimate in (False, True):
        selected = [pause for pause in pauses if (pause.cause == semconv.CAUSE_THROTTLED) == is_estimate]
        ledger.attribute_intervals(selected, decode)
    if record.thread_delays is not None:
        _attribute_throttling_outside(ledger, record)


def _attribute_throttling_outside(ledger: _TimeLedger, record: RequestRecord) -> None:
    """Attributes throttling outside the engine's stages, where no thread delays are recorded."""
    outside = [(record.arrived_at, record.ended_at)]
    for stage in record.stages:
        if stage.name in _ENGINE_STAGES:
            outside, _ = subtract_interval(outside, stage.started_at, stage.ended_at)
    throttled = [pause for pause in record.pauses if pause.cause == semconv.CAUSE_THROTTLED]
    ledger.attribute_intervals(list(intersect_intervals(outside, throttled)))


def stage_priority(name: str, started_at: int) -> tuple[int, int]:
    """Returns the sort key of a stage, which decides overlaps.

    Grammar and KV transfer come first, then the engine's stages and an item's waits. Other stages follow, latest start first,
    because a later stage lies inside the others. `ingress` and `postprocess` come last.
    """
    return _STAGE_PRIORITIES.get(name, 0), -started_at


def _attribute_stage(
    ledger: _TimeLedger, record: RequestRecord, stage: Stage, prompt: StepBreakdown, decode: StepBreakdown
) -> None:
    name, began, ended, _ = stage
    if record.loop_pauses and name not in _OFF_EVENT_LOOP:
        _attribute_loop_delay(ledger, record, began, ended)
    if name == semconv.SPAN_QUEUE and began < record.received_at < ended:
        first_step_at = min(record.engine_began_at, record.received_at)
        if first_step_at - began >= MIN_ENGINE_START_NS:
            ledger.attribute_interval(began, first_step_at, semconv.CAUSE_WARMUP)
        ledger.attribute_interval(began, record.received_at, semconv.CAUSE_HIDDEN_QUEUE)
    taken, causes = _claim_stage(ledger, record, stage), ledger.causes
    if name == semconv.SPAN_DECODE:
        _attribute_decode(ledger, record, decode, taken)
    elif name == semconv.SPAN_PREFILL:
        last_step_at = record.prefill_steps[-1].started_at if record.prefill_steps else began
        remainder_cause = (
            semconv.CAUSE_PREEMPTION if record.ended_while_preempted(last_step_at) else semconv.CAUSE_PREFILL
        )
        _distribute_time(causes, prompt.causes, taken, remainder_cause)
    elif name == semconv.SPAN_POSTPROCESS:
        # The chunks of a stream are not counted where they reach the server without a frame of ours.
        pieces = record.chunks or (record.output_tokens if record.status_code else 0)
        detokenize_ns = min(taken, record.detokenize_ns // max(pieces, 1))
        causes[semconv.CAUSE_DETOKENIZE] += detokenize_ns
        causes[semconv.CAUSE_EGRESS] += taken - detokenize_ns
    else:
        of_batch = min(estimate_batching_time(record, stage), taken)
        causes[semconv.CAUSE_BATCHING] += of_batch
        causes[semconv.STAGE_CAUSES.get(name, semconv.CAUSE_APPLICATION)] += taken - of_batch


def _attribute_decode(ledger: _TimeLedger, record: RequestRecord, decode: StepBreakdown, taken: int) -> None:
    parts = decode.causes
    if record.outcome != events.OK:
        parts = defaultdict(int, parts)
        remaining = taken - sum(parts.values())
        own_ns = estimate_interrupted_step_time(record, remaining)
        others_ns = estimate_interrupted_step_interference(record, remaining - own_ns)
        parts[semconv.CAUSE_DECODE] += own_ns
        parts[semconv.CAUSE_INTERFERENCE] += others_ns
        if record.interrupted_step is not None and others_ns:
            ledger.stalled_steps = [*ledger.stalled_steps, (record.interrupted_step.step, others_ns)]
    divided: Causes = defaultdict(int)
    _distribute_time(divided, parts, taken, find_decode_remainder_cause(record))
    for cause, length in divided.items():
        ledger.causes[cause] += length
        ledger.streaming[cause] += length


def _claim_stage(ledger: _TimeLedger, record: RequestRecord, stage: Stage) -> int:
    """Claims a stage and returns the ns that were free.

    The engine's stages exclude generation gaps. The wait of an item excludes calls of the model that began meanwhile: they
    are for other items of the same request.
    """
    excluded: list[tuple[int, int]] = []
    if stage.name in _ENGINE_STAGES:
        excluded = [(since, until) for since, until, _ in record.generation_gaps]
    elif stage.name in _ITEM_WAITS:
        calls = [call for call in record.stages if call.name == semconv.SPAN_FORWARD]
        excluded = [(call.started_at, call.ended_at) for call in calls if call.started_at > stage.started_at]
    if not excluded:
        return ledger.claim_interval(stage.started_at, stage.ended_at)
    parts: FreeIntervals = [(stage.started_at, stage.ended_at)]
    for since, until in excluded:
        parts, _ = subtract_interval(parts, since, until)
    return sum([ledger.claim_interval(since, until) for since, until in parts])


def _attribute_loop_delay(ledger: _TimeLedger, record: RequestRecord, begin: int, end: int) -> None:
    """Attributes the delays of the event loop that ended inside this interval.

    An interval that ended before the loop continued did not wait for it. It ran on another thread, or it
    blocked the loop itself.
    """
    ledger.attribute_intervals(
        [
            (max(pause.started_at, begin), pause.ended_at, semconv.CAUSE_EVENT_LOOP)
            for pause in record.loop_pauses
            if begin < pause.ended_at < end
        ]
    )


def _distribute_time(causes: Causes, parts: Causes, whole: int, remainder_cause: str) -> None:
    """Adds the parts to `causes` so that they sum to `whole`.

    A shortfall goes to `remainder_cause`. An excess is cut from the largest parts first.
    """
    over = sum(parts.values()) - whole
    if over > 0:
        parts = dict(parts)
        for cause in sorted(parts, key=lambda cause: -parts[cause]):
            cut = min(parts[cause], over)
            parts[cause] -= cut
            over -= cut
    for cause, length in parts.items():
        if length:
            causes[cause] += length
    causes[remainder_cause] -= over


def _move_starved_to_throttled(ledger: _TimeLedger, record: RequestRecord) -> None:
    """Moves `starved` time to `throttled`, as far as there was throttling that is not attributed yet.

    A throttled thread has no CPU either, so the kernel counts its wait as starved.
    """
    if ledger.causes.get(semconv.CAUSE_STARVED):
        pauses = [pause for pause in record.pauses if pause.cause == semconv.CAUSE_THROTTLED]
        throttled = record.duration_ns - uncovered_length(pauses, record.arrived_at, record.ended_at)
        left = max(throttled - ledger.causes[semconv.CAUSE_THROTTLED], 0)
        for causes in (ledger.causes, ledger.streaming):
            moved = min(left, causes[semconv.CAUSE_STARVED])
            causes[semconv.CAUSE_THROTTLED] += moved
            causes[semconv.CAUSE_STARVED] -= moved


def find_decode_remainder_cause(record: RequestRecord) -> str:
    """Returns the cause of decode time that no step covers.

    A generation that is recorded as one interval has no steps, so all its time is `decode`.
    """
    if record.steps is not None and record.ended_while_preempted(record.last_token_at):
        return semconv.CAUSE_PREEMPTION
    is_single_interval = record.steps is None and record.find_stage(semconv.SPAN_PREFILL) is None
    return (
        semconv.CAUSE_DECODE
        if is_single_interval and not record.telemetry_lost
        else semconv.CAUSE_UNEXPLAINED
    )
