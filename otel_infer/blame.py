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

from otel_infer import callers, decodeblame, facts, promptblame, semconv
from otel_infer.decodeblame import StepsBlame
from otel_infer.intervals import Free, outside, take_out
from otel_infer.records import Blame, Offender, Prefiller, RequestRecord, Stage
from otel_infer.steprows import TOGETHER

Causes = dict[str, int]

MOST_NAMED = 16
"""Requests with prompts in one step of which each may be named as the offender."""

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
    crowds: dict[tuple[Any, int], _Crowd] = {}
    for some in _together(records):
        for record, decode in zip(some, decodeblame.divided(some)):
            record.blame = _blame(record, decode, crowds)


def _together(records: Sequence[RequestRecord]) -> Iterator[Sequence[RequestRecord]]:
    begin = steps = 0
    for end, record in enumerate(records, 1):
        steps += len(record.steps) if record.steps is not None else 0
        if steps >= TOGETHER or end == len(records):
            yield records[begin:end]
            begin, steps = end, 0


class _Account:
    """The time of a request while it is given away: what is free, what each cause has, and what of that was while streaming."""

    def __init__(self, record: RequestRecord) -> None:
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


def _blame(record: RequestRecord, decode: StepsBlame, crowds: dict[tuple[Any, int], _Crowd]) -> Blame:
    account, prompt = _Account(record), promptblame.divided(record)
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
    offenders = _offenders(record, [*prompt.interfered, *decode.interfered], crowds)
    by_class = _by_class(offenders, interference)
    return Blame(known, _worst(record, offenders, interference), by_class, account.streaming)


def _paused(account: _Account, record: RequestRecord) -> None:
    decode = record.stage(semconv.SPAN_DECODE)
    for pause in sorted(decodeblame.placed(record), key=lambda pause: pause.cause == semconv.CAUSE_THROTTLED):
        cause = pause.cause if pause.cause in semconv.PAUSE_CAUSES else semconv.CAUSE_PAUSE
        if decode is not None:
            begin, end = max(pause.started_at, decode.started_at), min(pause.ended_at, decode.ended_at)
            account.streaming[cause] += take_out(account.free, begin, end)[1]
        account.give(pause.started_at, pause.ended_at, cause)
    if record.strain is not None:
        _throttled_elsewhere(account, record)


def _throttled_elsewhere(account: _Account, record: RequestRecord) -> None:
    """Outside of the engine's steps the kernel tells nothing of what its thread suffered."""
    outside = [(record.arrived_at, record.ended_at)]
    for stage in record.stages:
        if stage.name in _BY_ENGINE:
            outside, _ = take_out(outside, stage.started_at, stage.ended_at)
    for pause in record.pauses:
        if pause.cause == semconv.CAUSE_THROTTLED:
            for since, until in outside:
                account.give(max(pause.started_at, since), min(pause.ended_at, until), pause.cause)


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
        parts = {semconv.CAUSE_DECODE: 0, **decode.causes}
        parts[semconv.CAUSE_DECODE] += _begun(record, taken - sum(parts.values()))
        divided: Causes = defaultdict(int)
        _divide(divided, parts, taken, _rest_of_decode(record))
        for cause, length in divided.items():
            causes[cause] += length
            account.streaming[cause] += length
    elif name == semconv.SPAN_PREFILL:
        _divide(causes, prompt.causes, taken, semconv.CAUSE_PREFILL)
    elif name == semconv.SPAN_POSTPROCESS:
        last = min(taken, record.detokenize_ns // max(record.chunks, 1))
        causes[semconv.CAUSE_DETOKENIZE] += last
        causes[semconv.CAUSE_EGRESS] += taken - last
    else:
        causes[_OF_STAGES.get(name, semconv.CAUSE_APPLICATION)] += taken


def _taken(account: _Account, record: RequestRecord, stage: Stage) -> int:
    """What of this stage is free; of the engine's, without the time in which it was done with the request."""
    parts: Free = [(stage.started_at, stage.ended_at)]
    if record.absences and stage.name in _BY_ENGINE:
        for since, until, _ in record.absences:
            parts, _ = take_out(parts, since, until)
    return sum([account.take(since, until) for since, until in parts])


def _rest_of_decode(record: RequestRecord) -> str:
    """What no step explains; a generation that was told as one, prompt and all, has no steps to explain it."""
    is_one = record.steps is None and record.stage(semconv.SPAN_PREFILL) is None
    return semconv.CAUSE_DECODE if is_one and not record.telemetry_lost else semconv.CAUSE_UNEXPLAINED


def _begun(record: RequestRecord, left: int) -> int:
    """Of what is left of its decoding: the step that it did not see the end of, no longer than its others or than such steps."""
    if record.outcome == facts.OK or left <= 0:
        return 0
    if record.steps is None:
        return left
    costs, summary = record.costs, record.summary
    usual = int(costs.base + costs.per_sequence * summary.batch_size_max) if costs is not None else 0
    return min(left, max(summary.longest, usual))


def _loop_late(account: _Account, record: RequestRecord, begin: int, end: int) -> None:
    """What the event loop was late while this interval waited for it.

    What ended before the loop went on did not wait for it: it is on another thread, or is what kept the loop.
    """
    for pause in record.loop_pauses:
        if pause.ended_at < end:
            account.give(max(pause.started_at, begin), pause.ended_at, semconv.CAUSE_EVENT_LOOP)


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


class _Crowd:
    """Whose prompts were in one step. Of many, those with few tokens only count for their class."""

    def __init__(self, prefillers: Sequence[Prefiller]) -> None:
        known = sorted(prefillers, key=lambda who: -who.tokens)
        named, rest = known[:MOST_NAMED], known[MOST_NAMED:]
        self.first = [((who.trace_id, who.span_id), who.tokens, who.named) for who in named if who.tokens]
        self.tokens = {who.span_id: who.tokens for who in known}
        self.all = sum(self.tokens.values())
        self.rest: dict[str, int] = defaultdict(int)
        self._of_rest = {who.span_id: who.named for who in rest}
        for who in rest:
            self.rest[who.named] += who.tokens

    def beside(self, span_id: bytes) -> tuple[int, dict[str, int]]:
        """Tokens of all but this request; those by class that nobody is named for."""
        own = self.tokens.get(span_id, 0)
        named = self._of_rest.get(span_id)
        return self.all - own, self.rest if named is None else {**self.rest, named: self.rest[named] - own}


def _offenders(
    record: RequestRecord, steps: Sequence[tuple[int, int]], crowds: dict[tuple[Any, int], _Crowd]
) -> list[Offender]:
    """Whose prompts were in the steps that took it longer, so many ns each: by tokens, for how long each."""
    if record.prefillers is None:
        return []
    lengths: dict[tuple[bytes, bytes], int] = defaultdict(int)
    named: dict[tuple[bytes, bytes], str] = {}
    for step, length in sorted(steps):  # what is known of an offender last is most
        crowd = crowds.get((record.prefillers, step))
        if crowd is None:
            crowd = crowds[record.prefillers, step] = _Crowd(record.prefillers(step))
        tokens, rest = crowd.beside(record.span_id)
        for who, of_who, class_ in crowd.first:
            if who[1] != record.span_id:
                lengths[who] += length * of_who // tokens
                named[who] = class_
        for class_, of_class in rest.items():
            if of_class:
                lengths[b"", class_.encode()] += length * of_class // tokens
                named[b"", class_.encode()] = class_
    return [Offender(*who, length, named[who]) for who, length in lengths.items() if length]


def _worst(record: RequestRecord, offenders: Sequence[Offender], interference: int) -> Offender | None:
    """Who interfered most; nobody is named for what is below a fiftieth of the request."""
    if interference * 50 < record.duration_ns or not offenders:
        return None
    worst = max(offenders, key=lambda offender: offender.length if offender.trace_id else 0)
    return worst._replace(length=min(worst.length, interference)) if worst.trace_id else None


def _by_class(offenders: Sequence[Offender], interference: int) -> tuple[tuple[str, int], ...]:
    """The interference, divided as those who are known have caused it; in whole ns, the rest is of the largest."""
    lengths: dict[str, int] = defaultdict(int)
    for offender in offenders:
        lengths[offender.named] += offender.length
    if not lengths:
        return ((callers.UNKNOWN, interference),)
    whole = sum(lengths.values())
    parts = {named: interference * length // whole for named, length in lengths.items()}
    parts[max(lengths, key=lambda named: lengths[named])] += interference - sum(parts.values())
    return tuple((named, length) for named, length in parts.items() if length)
