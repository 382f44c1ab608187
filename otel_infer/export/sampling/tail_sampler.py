"""Decides which requests are exported, and which with every decode step. Pure.

There are two decisions. *Trace*: a request whose context is sampled is exported with its stages. Other
requests are not exported, unless the configuration keeps them too, with a mark. *Step detail*: step spans are
limited by a budget per second, and by a maximum per trace id. Trace stores refuse traces over a few MB,
including the spans of other services in them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import NamedTuple

from otel_infer import semconv
from otel_infer.assembly.records.missed_objectives import find_missed_objectives
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.config.slo import Objectives
from otel_infer.export.sampling.slow_detector import NO_TOKENS, SlowRequestDetector, find_size_class
from otel_infer.export.sampling.token_bucket import TokenBucket
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.events import make_tuple

MAX_STEPS_PER_TRACE = 1000
MAX_TRACES = 4096
BURST_SECONDS = 10
"""At low load every step is exported: unused budget of this many seconds may be spent at a time."""
RESERVED_SHARE = 0.25
"""Share of the budget for requests with a priority reason, or that delayed such a request."""
BASELINE_SHARE = 0.125
"""Further share of the budget, for ordinary requests as a baseline of comparison."""

MAX_HOLD_NS = 30_000_000_000
MAX_HELD_REQUESTS = 2000
"""A finished request without steps is held this long, and at most this many are.

A request that it delayed may still end and name it.
"""
MAX_INTERFERERS = 4096
BASELINE_INTERVAL_NS = 10_000_000_000
"""Without budget for ordinary requests, one request of each size is exported this often, as a baseline."""


class Decision(NamedTuple):
    """The decision for a request.

    `export`: its request and stage spans. `steps`: how many decode-step spans at most. `reason`: the keep
    reason. `prefill_steps`: whether the chunks of its prompt are spans too. `missed`: the objectives that it
    missed. `slow`: it missed an objective, or is among the slowest of its size.
    """

    export: bool
    steps: int
    reason: str
    prefill_steps: bool = False
    missed: tuple[str, ...] = ()
    slow: bool = False


_Grant = tuple[bool, int, str, bool]
"""The first fields of a `Decision`."""


class DecidedRequest(NamedTuple):
    """A request and its final decision."""

    record: RequestRecord
    decision: Decision


class TailSampler:
    """Decides about finished requests.

    `mode`: `all`, `auto` or `off`. `budget`: step spans per second, in `auto`. `ratio`: the configured
    sampler is a ratio. `slow_share`: share of the requests of each size that count as slow, 0 to 1. `share`:
    reduces the step spans, 0 to 1. In `auto` it scales the budget. In `all` it is the share of requests with
    step spans, by trace id.
    """

    def __init__(
        self,
        mode: str,
        budget: int,
        keep_unsampled: bool,
        ratio: bool,
        objectives: Objectives | None = None,
        slow_share: float = 0.0,
    ) -> None:
        self._mode, self._budget, self._keep_unsampled = mode, budget, keep_unsampled
        self._objectives, self._slow_detector = objectives or Objectives(), SlowRequestDetector(slow_share)
        usual = semconv.KEEP_REASON_SAMPLED if ratio else semconv.KEEP_REASON_BUDGET
        self._usual_reason = semconv.KEEP_REASON_ALL if mode == "all" else usual
        self._bucket = TokenBucket(budget * BURST_SECONDS)
        self._steps_by_trace: OrderedDict[bytes, int] = OrderedDict()
        self._held_requests: OrderedDict[bytes, DecidedRequest] = OrderedDict()
        self._pending_interferers: OrderedDict[bytes, int] = OrderedDict()
        self._baseline_at: dict[tuple[int, int], int] = {}
        self.dropped_steps: Counter[str] = Counter()
        self.share = 1.0

    @property
    def held_requests(self) -> int:
        """The requests whose decision is not final."""
        return len(self._held_requests)

    def is_exported(self, record: RequestRecord) -> bool:
        """Returns whether request and stage spans are exported.

        The caller's context decides, or the configuration.
        """
        return not record.redundant and self._is_sampled(record)

    def _is_sampled(self, record: RequestRecord) -> bool:
        return record.sampled or self._keep_unsampled

    def add(self, record: RequestRecord) -> list[DecidedRequest]:
        """Decides about a request, and returns the requests whose decisions are final now.

        They are this one, unless it is held, and a held one that it names.
        """
        decision = self.make_decision(record)
        final = [DecidedRequest(record, decision)]
        if (
            decision.export
            and decision.reason == semconv.KEEP_REASON_NONE
            and self._mode == "auto"
            and record.steps
        ):
            previous = self._held_requests.pop(record.span_id, None)
            final = [previous] if previous is not None else []
            self._held_requests[record.span_id] = DecidedRequest(_detach_steps(record), decision)
        interferer = record.breakdown.interferer if record.breakdown is not None else None
        if interferer is not None and decision.reason in semconv.PRIORITY_REASONS:
            final += self._sample_interferer(interferer.span_id, record.ended_at)
        return self._count_dropped(final)

    def flush_held(self, now: int, oldest_live: int) -> list[DecidedRequest]:
        """Releases held requests that can no longer be named as a cause, or whose hold expired.

        `oldest_live`: arrival of the oldest request in flight. A request that ended earlier delayed none of the
        requests in flight.
        """
        for span_id in [span_id for span_id, at in self._pending_interferers.items() if at < oldest_live]:
            del self._pending_interferers[span_id]
        limit = max(now - MAX_HOLD_NS, oldest_live)
        released = [span_id for span_id, held in self._held_requests.items() if held.record.ended_at < limit]
        released += list(self._held_requests)[: max(len(self._held_requests) - MAX_HELD_REQUESTS, 0)]
        return self._count_dropped([self._held_requests.pop(span_id) for span_id in dict.fromkeys(released)])

    def _count_dropped(self, final: list[DecidedRequest]) -> list[DecidedRequest]:
        """Counts dropped steps. Only final decisions are counted, because a counter never decreases."""
        for record, decision in final if self._mode != "off" else ():
            if record.steps is None and not record.prefill_steps:
                continue
            chunks = _count_prefill_chunks(record)
            dropped = chunks * (not decision.prefill_steps) + _count_decode_steps(record) - decision.steps
            if decision.export and dropped:
                self.dropped_steps[decision.reason] += dropped
        return final

    def make_decision(self, record: RequestRecord) -> Decision:
        """Returns the decision for a finished request as of now, and spends its part of the budget."""
        missed = find_missed_objectives(record, self._objectives)
        is_slow = self._slow_detector.is_slow(record)
        granted = self._decide_by_mode(record, missed, is_slow)
        return Decision(*granted, missed, is_slow or bool(missed))

    def decide_ordinary(self, trace_id: bytes, span_id: bytes, duration_ns: int) -> Decision:
        """Returns the decision for a sampled success without steps, to which no objectives apply."""
        is_slow = self._slow_detector.is_slow_length(NO_TOKENS, duration_ns, 0)
        reason = self._usual_reason
        if self._mode == "off":
            reason = semconv.KEEP_REASON_NONE
        elif is_slow or span_id in self._pending_interferers:
            reason = semconv.KEEP_REASON_SLOW if is_slow else semconv.KEEP_REASON_INTERFERER
        elif self._mode == "all" and _trace_to_fraction(trace_id) >= self.share:
            reason = semconv.KEEP_REASON_NONE
        return make_tuple(Decision, (True, 0, reason, False, (), is_slow))  # type: ignore[no-any-return]

    def _decide_by_mode(self, record: RequestRecord, missed: tuple[str, ...], is_slow: bool) -> _Grant:
        if not self.is_exported(record):
            unsampled = not self._is_sampled(record)
            return False, 0, semconv.KEEP_REASON_UNSAMPLED if unsampled else semconv.KEEP_REASON_NONE, False
        priority_reason = self._find_priority_reason(record, missed, is_slow)
        if self._mode == "off":
            return True, 0, semconv.KEEP_REASON_NONE, False
        if self._mode == "all" and not priority_reason and _trace_to_fraction(record.trace_id) >= self.share:
            return True, 0, semconv.KEEP_REASON_NONE, False
        if self._mode == "all":
            has_chunks = _count_prefill_chunks(record) > 0
            return True, _count_decode_steps(record), priority_reason or self._usual_reason, has_chunks
        return self._grant_steps(record, priority_reason)

    def _find_priority_reason(self, record: RequestRecord, missed: tuple[str, ...], is_slow: bool) -> str:
        """Returns the reason to export a request's steps with priority; empty for an ordinary request."""
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
        return semconv.KEEP_REASON_INTERFERER if record.span_id in self._pending_interferers else ""

    def _grant_steps(self, record: RequestRecord, priority_reason: str) -> _Grant:
        chunks, steps = _count_prefill_chunks(record), _count_decode_steps(record)
        if not (chunks or steps):
            return True, 0, priority_reason or self._usual_reason, False
        used = self._steps_by_trace.get(record.trace_id, 0)
        self._refill_budget(record.ended_at)
        if not priority_reason and self._budget_for_reason("") < steps and self._claim_baseline(record):
            priority_reason = semconv.KEEP_REASON_BASELINE
        room = max(min(MAX_STEPS_PER_TRACE - used, self._budget_for_reason(priority_reason)), 0)
        with_chunks = 0 < chunks <= room
        granted = min(steps, room - chunks * with_chunks)
        spent = granted + chunks * with_chunks
        self._spend_budget(record.trace_id, used, spent)
        reason = priority_reason or (self._usual_reason if spent else semconv.KEEP_REASON_NONE)
        return True, granted, reason, with_chunks

    def _claim_baseline(self, record: RequestRecord) -> bool:
        size = find_size_class(record)
        last = self._baseline_at.get(size)
        if last is not None and record.ended_at - last < BASELINE_INTERVAL_NS:
            return False
        self._baseline_at[size] = record.ended_at
        return True

    def _sample_interferer(self, span_id: bytes, at: int) -> list[DecidedRequest]:
        """Marks the request that delayed another, which ended at `at`.

        Its steps are exported now if it is held, else when it ends.
        """
        held = self._held_requests.pop(span_id, None)
        if held is None:
            self._pending_interferers[span_id] = at
            if len(self._pending_interferers) > MAX_INTERFERERS:
                self._pending_interferers.popitem(last=False)
            return []
        record, previous = held
        grant = self._grant_steps(record, semconv.KEEP_REASON_INTERFERER)
        return [DecidedRequest(record, Decision(*grant, previous.missed, previous.slow))]

    def _refill_budget(self, at: int) -> None:
        """Adds the budget of the time since the last refill."""
        per_second = self._budget * self.share
        self._bucket.refill(at, per_second, per_second * BURST_SECONDS)

    def _budget_for_reason(self, reason: str) -> int:
        """Returns how many step spans the budget has for this reason.

        An ordinary request cannot use the reserved shares.
        """
        reserved = {"": RESERVED_SHARE + BASELINE_SHARE, semconv.KEEP_REASON_BASELINE: RESERVED_SHARE}.get(
            reason, 0.0
        )
        return int(self._bucket.tokens - self._budget * self.share * BURST_SECONDS * reserved)

    def _spend_budget(self, trace_id: bytes, used: int, spent: int) -> None:
        self._bucket.tokens -= spent
        self._steps_by_trace[trace_id] = used + spent
        self._steps_by_trace.move_to_end(trace_id)
        while len(self._steps_by_trace) > MAX_TRACES:
            self._steps_by_trace.popitem(last=False)


def _count_decode_steps(record: RequestRecord) -> int:
    """Returns how many decode steps could be spans: those with tokens after the first one."""
    if record.steps is None or record.find_stage(semconv.SPAN_DECODE) is None:
        return 0
    return len(record.steps) - 1


def _count_prefill_chunks(record: RequestRecord) -> int:
    """Returns how many chunks of the prompt could be spans.

    A single chunk is the prefill itself, so it counts as 0.
    """
    return len(record.prefill_steps) if len(record.prefill_steps) > 1 else 0


def _trace_to_fraction(trace_id: bytes) -> float:
    """Returns a fraction from 0 to 1, the same for all requests of a trace."""
    return int.from_bytes(trace_id[:4], "big") / (1 << 32)


def _detach_steps(record: RequestRecord) -> RequestRecord:
    """Copies the steps of a held request.

    They are a view that keeps the table of many requests alive.
    """
    if record.steps is not None:
        record.steps = record.steps.copy()
    return record
