"""Where the time of a request went, by cause. Pure; exact: the causes of a request sum to its duration, in whole ns.

Time is given away once, in this order: to pauses of the process (of two at once, to the one that is not throttling, which is an
estimate), to what the engine did with the request (queue, prefill, decode), to stages that were said, to what came after the
last token. Between an answer of the engine and the next time that it was asked, the engine has nothing; what no stage says of that
is the application's. Of a stage that waits for the event loop, what the loop was late goes first to that; the engine's do not, so there it
takes nothing.

Inside decode each step is divided by what the engine's own log says a step of that size costs (`stepcosts`): what it would have
cost the request alone is its own *decode*, what the other sequences' tokens add is *batching*, and what a step with other
requests' prompts took beyond that is their *interference*. Its error per step is `StepCosts.spread`. Of what a step took longer,
the first of its kind (`firstuse`) and what the kernel counted of the engine's thread (`strain`) are taken out. What is left and
more than its error (three times the spread, at least a twentieth) is *unexplained*, like whatever nobody saw.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from otel_infer import semconv
from otel_infer.analysis.attribution import interference as offenders
from otel_infer.analysis.attribution import prefill, step_columns
from otel_infer.analysis.attribution.decode import StepBreakdown, divide_decode
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
"""Stages that do not wait for the event loop: the engine's, and those that are one call."""
_ENGINE_STAGES = (semconv.SPAN_PREFILL, semconv.SPAN_DECODE)
_STAGE_PRIORITIES = {
    **dict.fromkeys((semconv.SPAN_GRAMMAR, semconv.SPAN_KV_TRANSFER), -2),
    **dict.fromkeys((semconv.SPAN_QUEUE, semconv.SPAN_PREFILL, semconv.SPAN_DECODE), -1),
    **dict.fromkeys((semconv.SPAN_POSTPROCESS, semconv.SPAN_INGRESS), 1),
}


def attribute_latency(records: Sequence[RequestRecord]) -> None:
    """Writes into each record where its time went; many at once cost less."""
    crowds: dict[tuple[int, int], offenders.StepPrefills] = {}
    for some in _split_batches(records):
        decodes, prompts = divide_decode(some), [prefill.divide_prefill(record) for record in some]
        for record, decode, prompt in zip(some, decodes, prompts):
            record.breakdown = _build_breakdown(record, decode, prompt, crowds)


def _split_batches(records: Sequence[RequestRecord]) -> Iterator[Sequence[RequestRecord]]:
    begin = steps = 0
    for end, record in enumerate(records, 1):
        steps += len(record.steps) if record.steps is not None else 0
        if steps >= STEPS_PER_BATCH or end == len(records):
            yield records[begin:end]
            begin, steps = end, 0


class _TimeLedger:
    """The time of a request while it is given away: what is free, what each cause has, and what of that was while streaming.
    `stalled`: the steps in which others' prompts were while it streamed, and for how long."""

    def __init__(self, record: RequestRecord, stalled: list[tuple[int, int]]) -> None:
        self.stalled_steps = stalled
        self.free: FreeIntervals = [(record.arrived_at, record.ended_at)]
        self.causes: Causes = defaultdict(int)
        self.streaming: Causes = defaultdict(int)

    def claim_interval(self, begin: int, end: int) -> int:
        """What of this interval is free, which it is no more; ns."""
        self.free, taken = subtract_interval(self.free, begin, end)
        return taken

    def attribute_interval(self, begin: int, end: int, cause: str) -> None:
        """The same, to a cause."""
        self.causes[cause] += self.claim_interval(begin, end)

    def attribute_intervals(self, pauses: Sequence[tuple[Any, ...]], while_: Stage | None = None) -> None:
        """The same with what is free of each of these, to its cause; `while_`: when it is streamed."""
        parts = list(intersect_intervals(self.free, pauses))
        self.free = subtract_intervals(self.free, parts)
        for begin, end, cause in parts:
            self.causes[cause] += end - begin
            if while_ is not None:
                streamed = min(end, while_.ended_at) - max(begin, while_.started_at)
                self.streaming[cause] += max(streamed, 0)


def _build_breakdown(
    record: RequestRecord,
    decode: StepBreakdown,
    prompt: StepBreakdown,
    crowds: dict[tuple[Any, int], offenders.StepPrefills],
) -> LatencyBreakdown:
    account = _TimeLedger(record, decode.interfered_steps)
    if record.pauses:
        _attribute_pauses(account, record)
    for stage in sorted(record.stages, key=_stage_priority):
        _attribute_stage(account, record, stage, prompt, decode)
    _move_starved_to_throttled(account, record)
    if record.loop_pauses:
        _attribute_loop_delay(account, record, record.arrived_at, record.ended_at)
    for since, until, _ in record.generation_gaps:
        account.attribute_interval(since, until, semconv.CAUSE_APPLICATION)
    account.causes[semconv.CAUSE_UNEXPLAINED] += sum([end - begin for begin, end in account.free])
    known = {cause: length for cause, length in account.causes.items() if length}
    interference = known.get(semconv.CAUSE_INTERFERENCE, 0)
    if not interference:
        return LatencyBreakdown(known, None, streaming=account.streaming)
    before = [one for one in prompt.interfered_steps if one[1]]
    stalling = offenders.interferers(record, account.stalled_steps, crowds)
    theirs = offenders.interferers(record, before + account.stalled_steps, crowds) if before else stalling
    streaming = account.streaming.get(semconv.CAUSE_INTERFERENCE, 0)
    return LatencyBreakdown(
        known,
        offenders.worst_interferer(record, theirs, interference),
        offenders.interference_by_class(theirs, interference),
        account.streaming,
        offenders.worst_interferer(record, stalling, streaming),
    )


def _attribute_pauses(account: _TimeLedger, record: RequestRecord) -> None:
    decode, placed = record.find_stage(semconv.SPAN_DECODE), step_columns.attributable_pauses(record)
    known = [
        one if one.cause in semconv.PAUSE_CAUSES else one._replace(cause=semconv.CAUSE_PAUSE)
        for one in placed
    ]
    for is_estimate in (False, True):
        some = [one for one in known if (one.cause == semconv.CAUSE_THROTTLED) == is_estimate]
        account.attribute_intervals(some, decode)
    if record.thread_delays is not None:
        _attribute_throttling_outside(account, record)


def _attribute_throttling_outside(account: _TimeLedger, record: RequestRecord) -> None:
    """Outside of the engine's steps the kernel tells nothing of what its thread suffered."""
    outside = [(record.arrived_at, record.ended_at)]
    for stage in record.stages:
        if stage.name in _ENGINE_STAGES:
            outside, _ = subtract_interval(outside, stage.started_at, stage.ended_at)
    throttled = [pause for pause in record.pauses if pause.cause == semconv.CAUSE_THROTTLED]
    account.attribute_intervals(list(intersect_intervals(outside, throttled)))


def _stage_priority(stage: Stage) -> tuple[int, int]:
    """Who is asked first: what kept the engine from it, the engine, then the stage that began last (it is inside the others), at
    last what came after."""
    return _STAGE_PRIORITIES.get(stage.name, 0), -stage.started_at


def _attribute_stage(
    account: _TimeLedger, record: RequestRecord, stage: Stage, prompt: StepBreakdown, decode: StepBreakdown
) -> None:
    name, began, ended, _ = stage
    if record.loop_pauses and name not in _OFF_EVENT_LOOP:
        _attribute_loop_delay(account, record, began, ended)
    if name == semconv.SPAN_QUEUE and began < record.received_at < ended:
        account.attribute_interval(began, record.received_at, semconv.CAUSE_HIDDEN_QUEUE)
    taken, causes = _claim_stage(account, record, stage), account.causes
    if name == semconv.SPAN_DECODE:
        _attribute_decode(account, record, decode, taken)
    elif name == semconv.SPAN_PREFILL:
        last = record.prefill_steps[-1].started_at if record.prefill_steps else began
        rest = semconv.CAUSE_PREEMPTION if ended_while_preempted(record, last) else semconv.CAUSE_PREFILL
        _distribute_time(causes, prompt.causes, taken, rest)
    elif name == semconv.SPAN_POSTPROCESS:
        last = min(taken, record.detokenize_ns // max(record.chunks, 1))
        causes[semconv.CAUSE_DETOKENIZE] += last
        causes[semconv.CAUSE_EGRESS] += taken - last
    else:
        causes[semconv.STAGE_CAUSES.get(name, semconv.CAUSE_APPLICATION)] += taken


def _attribute_decode(account: _TimeLedger, record: RequestRecord, decode: StepBreakdown, taken: int) -> None:
    parts = decode.causes
    if record.outcome != events.OK:
        parts = defaultdict(int, parts)
        left = taken - sum(parts.values())
        own = interrupted_step_time(record, left)
        others = interrupted_step_interference(record, left - own)
        parts[semconv.CAUSE_DECODE] += own
        parts[semconv.CAUSE_INTERFERENCE] += others
        if record.interrupted_step is not None and others:
            account.stalled_steps = [*account.stalled_steps, (record.interrupted_step.step, others)]
    divided: Causes = defaultdict(int)
    _distribute_time(divided, parts, taken, decode_remainder_cause(record))
    for cause, length in divided.items():
        account.causes[cause] += length
        account.streaming[cause] += length


def _claim_stage(account: _TimeLedger, record: RequestRecord, stage: Stage) -> int:
    """What of this stage is free; of the engine's, without the time in which it was done with the request."""
    if not record.generation_gaps or stage.name not in _ENGINE_STAGES:
        return account.claim_interval(stage.started_at, stage.ended_at)
    parts: FreeIntervals = [(stage.started_at, stage.ended_at)]
    for since, until, _ in record.generation_gaps:
        parts, _ = subtract_interval(parts, since, until)
    return sum([account.claim_interval(since, until) for since, until in parts])


def _attribute_loop_delay(account: _TimeLedger, record: RequestRecord, begin: int, end: int) -> None:
    """What the event loop was late while this interval waited for it.

    What ended before the loop went on did not wait for it: it is on another thread, or is what kept the loop.
    """
    account.attribute_intervals(
        [
            (max(pause.started_at, begin), pause.ended_at, semconv.CAUSE_EVENT_LOOP)
            for pause in record.loop_pauses
            if begin < pause.ended_at < end
        ]
    )


def _distribute_time(causes: Causes, parts: Causes, whole: int, rest: str) -> None:
    """Adds the parts so that they sum to `whole`: what is left is `rest`; what is too much is taken from the largest first."""
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
    causes[rest] -= over


def _move_starved_to_throttled(account: _TimeLedger, record: RequestRecord) -> None:
    """A thread that is throttled has no CPU either: so much of that is the quota's as there was throttling meanwhile."""
    if account.causes.get(semconv.CAUSE_STARVED):
        pauses = [pause for pause in record.pauses if pause.cause == semconv.CAUSE_THROTTLED]
        throttled = record.duration_ns - uncovered_length(pauses, record.arrived_at, record.ended_at)
        left = max(throttled - account.causes[semconv.CAUSE_THROTTLED], 0)
        for causes in (account.causes, account.streaming):
            moved = min(left, causes[semconv.CAUSE_STARVED])
            causes[semconv.CAUSE_THROTTLED] += moved
            causes[semconv.CAUSE_STARVED] -= moved


def ended_while_preempted(record: RequestRecord, since: int) -> bool:
    """Whether it was preempted at this instant or later, and died before it was its turn again."""
    return record.outcome != events.OK and record.preempted_at[-1:] >= (since,)


def decode_remainder_cause(record: RequestRecord) -> str:
    """What no step explains; a generation that was told as one, prompt and all, has no steps to explain it."""
    if record.steps is not None and ended_while_preempted(record, record.last_token_at):
        return semconv.CAUSE_PREEMPTION
    is_one = record.steps is None and record.find_stage(semconv.SPAN_PREFILL) is None
    return semconv.CAUSE_DECODE if is_one and not record.telemetry_lost else semconv.CAUSE_UNEXPLAINED


def interrupted_step_time(record: RequestRecord, left: int) -> int:
    """Of what is left of its decoding: the step that it did not see the end of, no longer than its others or than such steps."""
    if record.outcome == events.OK or left <= 0:
        return 0
    if record.steps is None:
        return left
    if ended_while_preempted(record, record.last_token_at):
        return 0
    costs, summary = record.cost_model, record.summary
    usual = int(costs.base + costs.per_sequence * summary.batch_size_max) if costs is not None else 0
    return min(left, usual if _has_other_prefills(record) else max(summary.longest, usual))


def interrupted_step_interference(record: RequestRecord, left: int) -> int:
    """Of what is then left: the rest of that step, if others' prompts were in it and it is known what it costs without."""
    cut = record.interrupted_step
    if cut is None or not _has_other_prefills(record) or ended_while_preempted(record, record.last_token_at):
        return 0
    return max(min(left, cut.ended_at - max(cut.started_at, record.last_token_at)), 0)


def _has_other_prefills(record: RequestRecord) -> bool:
    cut = record.interrupted_step
    return bool(cut and cut.others_prefill_tokens and record.cost_model and record.steps is not None)
