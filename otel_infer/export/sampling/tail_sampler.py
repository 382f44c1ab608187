"""Which requests are exported, and which with every decode step. Pure.

Two decisions. *Trace*: a request whose context says sampled is exported with its stages; one that is not sampled is not,
unless the configuration keeps those too (then it is marked). *Step detail*: inside a budget of step spans per second,
and per trace id, because trace stores refuse traces over a few MB and with them other people's spans.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from otel_infer import semconv
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.config import slo
from otel_infer.config.slo import Objectives
from otel_infer.export.sampling.slow_requests import Slowest
from otel_infer.ringbuffer import events

STEPS_PER_TRACE = 1000
TRACES_REMEMBERED = 4096
BURST_SECONDS = 10
"""At low load everything is kept: unused budget of so many seconds may be spent at once."""
RESERVED_SHARE = 0.25
"""So much of the budget is there only for requests that are kept for a reason of their own."""
BASELINE_SHARE = 0.125
"""So much more, for ordinary ones to compare them with."""

HELD_NS = 30_000_000_000
HELD_REQUESTS = 2000
"""A finished request without steps waits so long, at most so many do, for one that it held up to end and name it."""
NAMED = 4096
BASELINE_NS = 10_000_000_000
"""Where there is no room for ordinary requests, one of each size is kept so often, to compare the slow ones with."""

NOTABLE = (
    semconv.KEEP_REASON_ERROR,
    semconv.KEEP_REASON_ABORTED,
    semconv.KEEP_REASON_PREEMPTED,
    semconv.KEEP_REASON_SLO,
    semconv.KEEP_REASON_SLOW,
)
"""Of requests that somebody may ask about: what held them up is kept too."""


class Decision(NamedTuple):
    """`export`: request and stage spans. `steps`: how many decode-step spans at most. `reason`: why those.

    `prefill_steps`: whether the chunks of its prompt are spans too. `missed`: objectives that it did not meet. `slow`: it missed
    one, or is among the slowest of its size.
    """

    export: bool
    steps: int
    reason: str
    prefill_steps: bool = False
    missed: tuple[str, ...] = ()
    slow: bool = False


class Kept(NamedTuple):
    """A request whose decision is final."""

    record: RequestRecord
    decision: Decision


class Keeper:
    """`mode`: `all`, `auto` or `off`; `budget`: step spans a second, in `auto`; `ratio`: the sampler is a ratio.

    `slow_share`: of the requests of each size, how many count as slow, 0 to 1. `share`: of the step spans that it would keep,
    how many it may, 0 to 1: of a budget that much, of `all` those of that many requests, by trace id.
    """

    def __init__(
        self,
        mode: str,
        budget: int,
        keep_unsampled: bool,
        ratio: bool,
        promised: Objectives | None = None,
        slow_share: float = 0.0,
    ) -> None:
        self._mode, self._budget, self._keep_unsampled, self._ratio = mode, budget, keep_unsampled, ratio
        self._objectives, self._slowest = promised or Objectives(), Slowest(slow_share)
        self._room = float(budget * BURST_SECONDS)
        self._filled_at = 0
        self._per_trace: OrderedDict[bytes, int] = OrderedDict()
        self._held: OrderedDict[bytes, Kept] = OrderedDict()
        self._named: OrderedDict[bytes, int] = OrderedDict()
        self._baselines: dict[tuple[int, int], int] = {}
        self.left_out: Counter[str] = Counter()
        self.share = 1.0

    def exports(self, record: RequestRecord) -> bool:
        """Whether request and stage spans leave at all: the caller's word, or the configuration's."""
        return not record.redundant and self._is_sampled(record)

    def _is_sampled(self, record: RequestRecord) -> bool:
        return record.sampled or self._keep_unsampled

    def take(self, record: RequestRecord) -> list[Kept]:
        """A finished request: what is decided by it, of itself and of one that waited to be named."""
        decision = self.decide(record)
        final = [Kept(record, decision)]
        if (
            decision.export
            and decision.reason == semconv.KEEP_REASON_NONE
            and self._mode == "auto"
            and record.steps
        ):
            before = self._held.pop(record.span_id, None)
            final = [before] if before is not None else []
            self._held[record.span_id] = Kept(_apart(record), decision)
        offender = record.blame.offender if record.blame is not None else None
        if offender is not None and decision.reason in NOTABLE:
            final += self._name(offender.span_id, record.ended_at)
        return self._counted(final)

    def release(self, now: int, oldest_live: int) -> list[Kept]:
        """Those that nobody can name any more, or that have waited too long.

        `oldest_live`: when the oldest request in flight arrived; what ended before held up none of those, nor they it.
        """
        for span_id in [span_id for span_id, at in self._named.items() if at < oldest_live]:
            del self._named[span_id]
        limit = max(now - HELD_NS, oldest_live)
        gone = [span_id for span_id, kept in self._held.items() if kept.record.ended_at < limit]
        gone += list(self._held)[: max(len(self._held) - HELD_REQUESTS, 0)]
        return self._counted([self._held.pop(span_id) for span_id in dict.fromkeys(gone)])

    def _counted(self, final: list[Kept]) -> list[Kept]:
        """What is left out is counted when that is final: a counter never goes back."""
        for record, decision in final if self._mode != "off" else ():
            chunks = _chunks(record)
            left_out = chunks * (not decision.prefill_steps) + _steps(record) - decision.steps
            if decision.export and left_out:
                self.left_out[decision.reason] += left_out
        return final

    def decide(self, record: RequestRecord) -> Decision:
        """The decision for a finished request as it looks now; spends its part of the budget."""
        missed = missed_by(record, self._objectives)
        is_slow = self._slowest.has(record)
        export, steps, reason, prefill_steps, *_ = self._decided(record, missed, is_slow)
        return Decision(export, steps, reason, prefill_steps, missed, is_slow or bool(missed))

    def _decided(self, record: RequestRecord, missed: tuple[str, ...], is_slow: bool) -> Decision:
        if not self.exports(record):
            return Decision(
                False,
                0,
                semconv.KEEP_REASON_NONE if self._is_sampled(record) else semconv.KEEP_REASON_UNSAMPLED,
            )
        urgent = self._urgent(record, missed, is_slow)
        if self._mode == "off":
            return Decision(True, 0, semconv.KEEP_REASON_NONE)
        if self._mode == "all" and not urgent and _draw(record) >= self.share:
            return Decision(True, 0, semconv.KEEP_REASON_NONE)
        if self._mode == "all":
            return Decision(True, _steps(record), urgent or semconv.KEEP_REASON_ALL, _chunks(record) > 0)
        return self._granted(record, urgent)

    def _urgent(self, record: RequestRecord, missed: tuple[str, ...], is_slow: bool) -> str:
        """Why this is one of those that steps are kept for; empty for an ordinary one."""
        if record.outcome == events.ERROR:
            return semconv.KEEP_REASON_ERROR
        if record.outcome == events.ABORTED:
            return semconv.KEEP_REASON_ABORTED
        if missed:
            return semconv.KEEP_REASON_SLO
        if record.preemptions:
            return semconv.KEEP_REASON_PREEMPTED
        if is_slow:
            return semconv.KEEP_REASON_SLOW
        return semconv.KEEP_REASON_OFFENDER if record.span_id in self._named else ""

    def _granted(self, record: RequestRecord, urgent: str) -> Decision:
        chunks, steps = _chunks(record), _steps(record)
        used = self._per_trace.get(record.trace_id, 0)
        self._fill(record.ended_at)
        if not urgent and self._room_for("") < steps and self._is_baseline(record):
            urgent = semconv.KEEP_REASON_BASELINE
        room = max(min(STEPS_PER_TRACE - used, self._room_for(urgent)), 0)
        with_chunks = 0 < chunks <= room
        granted = min(steps, room - chunks * with_chunks)
        spent = granted + chunks * with_chunks
        self._spend(record.trace_id, used, spent)
        reason = urgent or (semconv.KEEP_REASON_SAMPLED if self._ratio else semconv.KEEP_REASON_BUDGET)
        if spent == 0 and chunks + steps > 0:
            reason = urgent or semconv.KEEP_REASON_NONE
        return Decision(True, granted, reason, with_chunks)

    def _is_baseline(self, record: RequestRecord) -> bool:
        size = record.input_tokens.bit_length(), record.output_tokens.bit_length()
        last = self._baselines.get(size)
        if last is not None and record.ended_at - last < BASELINE_NS:
            return False
        self._baselines[size] = record.ended_at
        return True

    def _name(self, span_id: bytes, at: int) -> list[Kept]:
        """Somebody who ended then was held up by this request: it is kept too, now or when it ends."""
        held = self._held.pop(span_id, None)
        if held is None:
            self._named[span_id] = at
            if len(self._named) > NAMED:
                self._named.popitem(last=False)
            return []
        record, before = held
        return [
            Kept(
                record,
                self._granted(record, semconv.KEEP_REASON_OFFENDER)._replace(
                    missed=before.missed, slow=before.slow
                ),
            )
        ]

    def _fill(self, at: int) -> None:
        """The budget comes back with time."""
        if self._filled_at:
            come = max(at - self._filled_at, 0) * self._budget * self.share / 1e9
            self._room = min(self._budget * self.share * BURST_SECONDS, self._room + come)
        self._filled_at = max(at, self._filled_at)

    def _room_for(self, reason: str) -> int:
        """How many step spans there is room for; whoever has no reason leaves what is reserved alone."""
        reserved = {"": RESERVED_SHARE + BASELINE_SHARE, semconv.KEEP_REASON_BASELINE: RESERVED_SHARE}.get(
            reason, 0.0
        )
        return int(self._room - self._budget * self.share * BURST_SECONDS * reserved)

    def _spend(self, trace_id: bytes, used: int, spent: int) -> None:
        self._room -= spent
        self._per_trace[trace_id] = used + spent
        self._per_trace.move_to_end(trace_id)
        while len(self._per_trace) > TRACES_REMEMBERED:
            self._per_trace.popitem(last=False)


def _steps(record: RequestRecord) -> int:
    """How many decode steps could be spans: those that delivered tokens after the first one."""
    if record.steps is None or record.stage(semconv.SPAN_DECODE) is None:
        return 0
    return len(record.steps) - 1


def _chunks(record: RequestRecord) -> int:
    """How many chunks of the prompt could be spans; one alone is the prefill itself."""
    return len(record.prefill_steps) if len(record.prefill_steps) > 1 else 0


def missed_by(record: RequestRecord, promised: Objectives) -> tuple[str, ...]:
    """The objectives that a request did not meet, sampled or not."""
    route = str(record.attributes.get(semconv.HTTP_ROUTE, ""))
    return promised.missed(record.model, route, _lengths(record)) if promised.sections else ()


def was_stopped(record: RequestRecord) -> bool:
    """Whether its client had it end, which is no fault of the server; what it waited for until then may be."""
    return record.outcome == events.ABORTED and record.error_type in semconv.NOT_ERRORS


def _lengths(record: RequestRecord) -> dict[str, int]:
    """What objectives are about, ns; what a request does not have is not there, nor is the end of one that was stopped."""
    queued = [stage for stage in record.stages if stage.name == semconv.SPAN_QUEUE]
    lengths = {slo.QUEUE: sum(stage.ended_at - stage.started_at for stage in queued)}
    if not was_stopped(record):
        lengths[slo.E2E] = record.duration_ns
    if record.ttft_ns:
        lengths[slo.TTFT] = record.ttft_ns
    if record.summary.gaps:
        lengths[slo.ITL] = record.summary.gap_max
    for name, waited in _waited_in_vain(record):
        lengths[name] = max(lengths.get(name, 0), waited)
    if record.tokens_after_first > 0:
        lengths[slo.TPOT] = round(record.decode_ns / record.tokens_after_first)
    return lengths


def _waited_in_vain(record: RequestRecord) -> Iterator[tuple[str, int]]:
    """For what token an engine let it wait when it ended otherwise than well, and how long (ns): it took longer than that."""
    if record.outcome == events.OK or record.telemetry_lost or not (record.generative and record.engine):
        return
    if record.operation == semconv.OPERATION_EMBEDDINGS:
        return
    if record.died_in in (semconv.SPAN_QUEUE, semconv.SPAN_PREFILL):
        yield slo.TTFT, record.duration_ns
    elif record.left_waiting_ns:
        yield slo.ITL, record.left_waiting_ns


def _draw(record: RequestRecord) -> float:
    """0 to 1, the same for all requests of a trace."""
    return int.from_bytes(record.trace_id[:4], "big") / (1 << 32)


def _apart(record: RequestRecord) -> RequestRecord:
    """Its steps are a part of the table of many; what waits is not to hold that."""
    if record.steps is not None:
        record.steps = record.steps.copy()
    return record
