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
from otel_infer.analysis.attribution.decode import StepsBlame, divide_decode
from otel_infer.assembly.engine.step_rows import TOGETHER
from otel_infer.assembly.records.intervals import Free, inside, outside, take_out, without
from otel_infer.assembly.records.request import Blame, RequestRecord, Stage
from otel_infer.ringbuffer import events

Causes = dict[str, int]

_OF_STAGES = {
    semconv.SPAN_INGRESS: semconv.CAUSE_INGRESS,
    semconv.SPAN_TOKENIZE: semconv.CAUSE_TOKENIZE,
    semconv.SPAN_FETCH_MEDIA: semconv.CAUSE_MEDIA,
    semconv.SPAN_PREPARE_MEDIA: semconv.CAUSE_MEDIA,
    semconv.SPAN_GRAMMAR: semconv.CAUSE_GRAMMAR,
    semconv.SPAN_KV_TRANSFER: semconv.CAUSE_KV_TRANSFER,
    semconv.SPAN_FORWARD: semconv.CAUSE_DECODE,
    semconv.SPAN_H2D: semconv.CAUSE_TRANSFER,
    semconv.SPAN_D2H: semconv.CAUSE_TRANSFER,
    semconv.SPAN_QUEUE: semconv.CAUSE_SCHEDULER_QUEUE,
    semconv.SPAN_PREFILL: semconv.CAUSE_PREFILL,
    semconv.SPAN_DECODE: semconv.CAUSE_DECODE,
    semconv.SPAN_POSTPROCESS: semconv.CAUSE_EGRESS,
    semconv.STAGE_DETOKENIZE: semconv.CAUSE_DETOKENIZE,
}
_OFF_LOOP = frozenset(_OF_STAGES) - {semconv.SPAN_INGRESS, semconv.SPAN_POSTPROCESS}
"""Stages that do not wait for the event loop: the engine's, and those that are one call."""
_BY_ENGINE = (semconv.SPAN_PREFILL, semconv.SPAN_DECODE)
_TURNS = {
    **dict.fromkeys((semconv.SPAN_GRAMMAR, semconv.SPAN_KV_TRANSFER), -2),
    **dict.fromkeys((semconv.SPAN_QUEUE, semconv.SPAN_PREFILL, semconv.SPAN_DECODE), -1),
    **dict.fromkeys((semconv.SPAN_POSTPROCESS, semconv.SPAN_INGRESS), 1),
}


def assign(records: Sequence[RequestRecord]) -> None:
    """Writes into each record where its time went; many at once cost less."""
    crowds: dict[tuple[int, int], offenders.Crowd] = {}
    for some in _together(records):
        decodes, prompts = divide_decode(some), [prefill.divided(record) for record in some]
        for record, decode, prompt in zip(some, decodes, prompts):
            record.blame = _blame(record, decode, prompt, crowds)


def _together(records: Sequence[RequestRecord]) -> Iterator[Sequence[RequestRecord]]:
    begin = steps = 0
    for end, record in enumerate(records, 1):
        steps += len(record.steps) if record.steps is not None else 0
        if steps >= TOGETHER or end == len(records):
            yield records[begin:end]
            begin, steps = end, 0


class _Account:
    """The time of a request while it is given away: what is free, what each cause has, and what of that was while streaming.
    `stalled`: the steps in which others' prompts were while it streamed, and for how long."""

    def __init__(self, record: RequestRecord, stalled: list[tuple[int, int]]) -> None:
        self.stalled = stalled
        self.free: Free = [(record.arrived_at, record.ended_at)]
        self.causes: Causes = defaultdict(int)
        self.streaming: Causes = defaultdict(int)

    def take(self, begin: int, end: int) -> int:
        """What of this interval is free, which it is no more; ns."""
        self.free, taken = take_out(self.free, begin, end)
        return taken

    def give(self, begin: int, end: int, cause: str) -> None:
        """The same, to a cause."""
        self.causes[cause] += self.take(begin, end)

    def give_each(self, pauses: Sequence[tuple[Any, ...]], while_: Stage | None = None) -> None:
        """The same with what is free of each of these, to its cause; `while_`: when it is streamed."""
        parts = list(inside(self.free, pauses))
        self.free = without(self.free, parts)
        for begin, end, cause in parts:
            self.causes[cause] += end - begin
            if while_ is not None:
                streamed = min(end, while_.ended_at) - max(begin, while_.started_at)
                self.streaming[cause] += max(streamed, 0)


def _blame(
    record: RequestRecord,
    decode: StepsBlame,
    prompt: StepsBlame,
    crowds: dict[tuple[Any, int], offenders.Crowd],
) -> Blame:
    account = _Account(record, decode.interfered)
    if record.pauses:
        _paused(account, record)
    for stage in sorted(record.stages, key=_turn):
        _staged(account, record, stage, prompt, decode)
    _throttled(account, record)
    if record.loop_pauses:
        _loop_late(account, record, record.arrived_at, record.ended_at)
    for since, until, _ in record.absences:
        account.give(since, until, semconv.CAUSE_APPLICATION)
    account.causes[semconv.CAUSE_UNEXPLAINED] += sum([end - begin for begin, end in account.free])
    known = {cause: length for cause, length in account.causes.items() if length}
    interference = known.get(semconv.CAUSE_INTERFERENCE, 0)
    if not interference:
        return Blame(known, None, streaming=account.streaming)
    before = [one for one in prompt.interfered if one[1]]
    stalling = offenders.named_by(record, account.stalled, crowds)
    theirs = offenders.named_by(record, before + account.stalled, crowds) if before else stalling
    streaming = account.streaming.get(semconv.CAUSE_INTERFERENCE, 0)
    return Blame(
        known,
        offenders.worst(record, theirs, interference),
        offenders.by_class(theirs, interference),
        account.streaming,
        offenders.worst(record, stalling, streaming),
    )


def _paused(account: _Account, record: RequestRecord) -> None:
    decode, placed = record.stage(semconv.SPAN_DECODE), step_columns.placed(record)
    known = [
        one if one.cause in semconv.PAUSE_CAUSES else one._replace(cause=semconv.CAUSE_PAUSE)
        for one in placed
    ]
    for is_estimate in (False, True):
        some = [one for one in known if (one.cause == semconv.CAUSE_THROTTLED) == is_estimate]
        account.give_each(some, decode)
    if record.strain is not None:
        _throttled_elsewhere(account, record)


def _throttled_elsewhere(account: _Account, record: RequestRecord) -> None:
    """Outside of the engine's steps the kernel tells nothing of what its thread suffered."""
    outside = [(record.arrived_at, record.ended_at)]
    for stage in record.stages:
        if stage.name in _BY_ENGINE:
            outside, _ = take_out(outside, stage.started_at, stage.ended_at)
    throttled = [pause for pause in record.pauses if pause.cause == semconv.CAUSE_THROTTLED]
    account.give_each(list(inside(outside, throttled)))


def _turn(stage: Stage) -> tuple[int, int]:
    """Who is asked first: what kept the engine from it, the engine, then the stage that began last (it is inside the others), at
    last what came after."""
    return _TURNS.get(stage.name, 0), -stage.started_at


def _staged(
    account: _Account, record: RequestRecord, stage: Stage, prompt: StepsBlame, decode: StepsBlame
) -> None:
    name, began, ended, _ = stage
    if record.loop_pauses and name not in _OFF_LOOP:
        _loop_late(account, record, began, ended)
    if name == semconv.SPAN_QUEUE and began < record.received_at < ended:
        account.give(began, record.received_at, semconv.CAUSE_HIDDEN_QUEUE)
    taken, causes = _taken(account, record, stage), account.causes
    if name == semconv.SPAN_DECODE:
        _decoded(account, record, decode, taken)
    elif name == semconv.SPAN_PREFILL:
        last = record.prefill_steps[-1].started_at if record.prefill_steps else began
        rest = semconv.CAUSE_PREEMPTION if was_put_back(record, last) else semconv.CAUSE_PREFILL
        _divide(causes, prompt.causes, taken, rest)
    elif name == semconv.SPAN_POSTPROCESS:
        last = min(taken, record.detokenize_ns // max(record.chunks, 1))
        causes[semconv.CAUSE_DETOKENIZE] += last
        causes[semconv.CAUSE_EGRESS] += taken - last
    else:
        causes[_OF_STAGES.get(name, semconv.CAUSE_APPLICATION)] += taken


def _decoded(account: _Account, record: RequestRecord, decode: StepsBlame, taken: int) -> None:
    parts = decode.causes
    if record.outcome != events.OK:
        parts = defaultdict(int, parts)
        left = taken - sum(parts.values())
        own = begun(record, left)
        others = cut_short(record, left - own)
        parts[semconv.CAUSE_DECODE] += own
        parts[semconv.CAUSE_INTERFERENCE] += others
        if record.cut_step is not None and others:
            account.stalled = [*account.stalled, (record.cut_step.step, others)]
    divided: Causes = defaultdict(int)
    _divide(divided, parts, taken, rest_of_decode(record))
    for cause, length in divided.items():
        account.causes[cause] += length
        account.streaming[cause] += length


def _taken(account: _Account, record: RequestRecord, stage: Stage) -> int:
    """What of this stage is free; of the engine's, without the time in which it was done with the request."""
    if not record.absences or stage.name not in _BY_ENGINE:
        return account.take(stage.started_at, stage.ended_at)
    parts: Free = [(stage.started_at, stage.ended_at)]
    for since, until, _ in record.absences:
        parts, _ = take_out(parts, since, until)
    return sum([account.take(since, until) for since, until in parts])


def _loop_late(account: _Account, record: RequestRecord, begin: int, end: int) -> None:
    """What the event loop was late while this interval waited for it.

    What ended before the loop went on did not wait for it: it is on another thread, or is what kept the loop.
    """
    account.give_each(
        [
            (max(pause.started_at, begin), pause.ended_at, semconv.CAUSE_EVENT_LOOP)
            for pause in record.loop_pauses
            if begin < pause.ended_at < end
        ]
    )


def _divide(causes: Causes, parts: Causes, whole: int, rest: str) -> None:
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


def _throttled(account: _Account, record: RequestRecord) -> None:
    """A thread that is throttled has no CPU either: so much of that is the quota's as there was throttling meanwhile."""
    if account.causes.get(semconv.CAUSE_STARVED):
        pauses = [pause for pause in record.pauses if pause.cause == semconv.CAUSE_THROTTLED]
        throttled = record.duration_ns - outside(pauses, record.arrived_at, record.ended_at)
        left = max(throttled - account.causes[semconv.CAUSE_THROTTLED], 0)
        for causes in (account.causes, account.streaming):
            moved = min(left, causes[semconv.CAUSE_STARVED])
            causes[semconv.CAUSE_THROTTLED] += moved
            causes[semconv.CAUSE_STARVED] -= moved


def was_put_back(record: RequestRecord, since: int) -> bool:
    """Whether it was preempted at this instant or later, and died before it was its turn again."""
    return record.outcome != events.OK and record.preempted_at[-1:] >= (since,)


def rest_of_decode(record: RequestRecord) -> str:
    """What no step explains; a generation that was told as one, prompt and all, has no steps to explain it."""
    if record.steps is not None and was_put_back(record, record.last_token_at):
        return semconv.CAUSE_PREEMPTION
    is_one = record.steps is None and record.stage(semconv.SPAN_PREFILL) is None
    return semconv.CAUSE_DECODE if is_one and not record.telemetry_lost else semconv.CAUSE_UNEXPLAINED


def begun(record: RequestRecord, left: int) -> int:
    """Of what is left of its decoding: the step that it did not see the end of, no longer than its others or than such steps."""
    if record.outcome == events.OK or left <= 0:
        return 0
    if record.steps is None:
        return left
    if was_put_back(record, record.last_token_at):
        return 0
    costs, summary = record.costs, record.summary
    usual = int(costs.base + costs.per_sequence * summary.batch_size_max) if costs is not None else 0
    return min(left, usual if _is_beside_prompts(record) else max(summary.longest, usual))


def cut_short(record: RequestRecord, left: int) -> int:
    """Of what is then left: the rest of that step, if others' prompts were in it and it is known what it costs without."""
    cut = record.cut_step
    if cut is None or not _is_beside_prompts(record) or was_put_back(record, record.last_token_at):
        return 0
    return max(min(left, cut.ended_at - max(cut.started_at, record.last_token_at)), 0)


def _is_beside_prompts(record: RequestRecord) -> bool:
    cut = record.cut_step
    return bool(cut and cut.others_prefill_tokens and record.costs and record.steps is not None)
