"""The step log of one engine: who is in the batch now, and so who was in which step. Pure.

A request remembers only the runs of steps it was a member of, so a step that changes nothing costs nothing per sequence.
What is not known for sure is not known: at a missing step the batch is forgotten until the next keyframe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from otel_infer.assembly.engine.baseline import EngineBaseline
from otel_infer.assembly.engine.device_steps import DeviceSteps
from otel_infer.assembly.engine.step_table import CAPACITY, StepTable
from otel_infer.assembly.engine.types import PrefillInStep, StepRecord
from otel_infer.ringbuffer import events

MAX_UNFINISHED_STEPS = 64
"""Far more than any engine keeps in flight: the ends of older ones will not come."""


class StepMember(Protocol):
    """A request as the step log knows it: what a request is told when it joins, is computed in or leaves a step."""

    arrived: events.RequestArrived
    is_prefilling: bool

    @property
    def may_prefill_again(self) -> bool: ...

    def update_membership(self, log: EngineStepLog, step: int, sequences: int) -> int: ...

    def record_prefill(self, log: EngineStepLog, step: int, at: int, tokens: int, size: int) -> None: ...

    def build_prefill_in_step(self, tokens: int) -> PrefillInStep: ...

    def record_tokens(self, log: EngineStepLog, step: int, tokens: int, discarded: bool) -> None: ...

    def record_first_token(self, at: int) -> None: ...


FindMember = Callable[[int], StepMember | None]


class StepRun(NamedTuple):
    """Steps `first`..`last` (inclusive) of one engine, with `sequences` members of the request in each."""

    log: EngineStepLog
    first: int
    last: int
    sequences: int


class _PrefillPositions(NamedTuple):
    """Members of one request that have no token yet: positions in the batch, tokens scheduled for each; longest first."""

    positions: Sequence[int]
    tokens: Sequence[int]


class _UnfinishedStep(NamedTuple):
    """A step that was scheduled and is not done. `prefills` by handle; it shrinks when an earlier step is done."""

    scheduled: events.StepScheduled
    members: Sequence[int] | None
    prefills: dict[int, _PrefillPositions]


class EngineStepLog:
    """Membership of one engine's steps. `process` is the ring whose handles the batches hold; `find`: whose a handle is.

    `holed`: it is not known who is in the batch, for steps were lost. `gap_at`: the first step after some that are missing,
    while nobody has said that they were lost (an engine may have skipped what it could not state); 0 = none.
    """

    def __init__(
        self, engine: str, pid: int, process: int, find: FindMember, seen: set[int] | None = None
    ) -> None:
        self.engine, self.pid, self.process = engine, pid, process
        self.table = StepTable()
        self.device: DeviceSteps | None = None
        """Once anybody said how long a worker or a device was at a step."""
        self.block_tokens = 0
        """What a block of the KV cache holds; 0 = nobody said."""
        self.ranks = 1
        """Workers that are seen at its steps, each with a device of its own."""
        self.prefill_history = PrefillHistory()
        self.baseline = EngineBaseline(self.table, seen)
        self.batch_unknown = False
        self.first_gap_at = 0
        self._find_member = find
        self._members: list[int] | None = None
        self._sequences: dict[int, int] = {}  # handle → how many of the members are its
        self._prefilling: dict[int, int] = {}  # handle → how many of its members have no token yet
        self._unfinished: dict[int, _UnfinishedStep] = {}

    # ── facts ────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin_step(self, fact: events.StepScheduled) -> None:
        """A batch was composed: whose run begins, whose is over, and how many prompt tokens are in it."""
        at, step, keyframe, size, left, joined, *_ = fact
        last = self.table.last
        if step <= last:  # told twice
            return
        if step != last + 1:
            self.invalidate_batch()
            self.first_gap_at = self.first_gap_at or at
        if keyframe:
            self._apply_keyframe(fact)
        elif self._members is not None and (left or joined):
            self._apply_delta(fact)
        if self._members is None or len(self._members) != size:
            self.invalidate_batch()
        prefills, tokens = self._find_prefills(fact) if self._prefilling else ({}, 0)
        self.table.begin_step(fact, tokens)
        self.baseline.warmup.add_step(step, size, tokens)
        if size or self._members is not None:  # a tape may begin with a step of which nothing is known
            self._unfinished[step] = _UnfinishedStep(fact, self._members, prefills)
        if len(self._unfinished) > MAX_UNFINISHED_STEPS:
            del self._unfinished[min(self._unfinished)]

    def end_step(self, fact: events.StepDone) -> StepRecord | None:
        """A step's tokens are known; None for a step whose beginning or whose batch is not known."""
        flight = self._unfinished.pop(fact.step, None)
        if flight is None:
            return None
        scheduled, members, prefills = flight
        ended_at = max(fact.at, scheduled.at)
        self.table.end_step(fact.step, ended_at)
        if members is None:
            return None
        delivered: dict[int, int] = {}
        if fact.delivered:
            delivered = {at: tokens for at, tokens in fact.delivered if at < len(members)}
            self._record_tokens(fact.step, members, prefills, delivered)
            self.table.raise_computed_tokens(
                fact.step, sum(delivered.values()) + len(members) - len(delivered)
            )
        prefilling = 0
        for handle, (positions, _) in prefills.items():
            prefilling += len(positions)
            grown = len([at for at in positions if delivered.get(at, 1) > 0])
            if grown:
                self._complete_prefills(handle, grown, ended_at, fact.step)
        self.baseline.record_step_end(ended_at)
        return StepRecord(
            self.engine, self.pid, fact.step, scheduled.at, ended_at, scheduled.size,
            self.table.prefill_tokens(fact.step), scheduled.size - prefilling,
            scheduled.kv_used, scheduled.kv_total, scheduled.running, scheduled.waiting, self.block_tokens,
        )  # fmt: skip

    def add_host_time(self, step: int, length: int) -> None:
        """A worker took so long for its part, by its host."""
        self._get_device_steps().set_host_time(step, length)

    def add_device_time(self, fact: events.StepTimed) -> None:
        """A device was at it."""
        launched, gap = events.decode_ns(fact.launched_ns), events.decode_ns(fact.gap_ns)
        lengths = fact.at - fact.started_at, launched, fact.queued_ns, gap, fact.bound_ns
        self._get_device_steps().set_device_time(fact.step, fact.started_at, *lengths)

    def _get_device_steps(self) -> DeviceSteps:
        if self.device is None:
            self.device = DeviceSteps(CAPACITY)
        return self.device

    def invalidate_batch(self) -> None:
        """Facts are missing: nothing is known of the batch until the next keyframe."""
        for handle in set(self._members or ()):
            self._update_membership(handle, self.table.last + 1, 0)
        self._members = None
        self._sequences.clear()
        self._prefilling.clear()
        self.baseline.warmup.stop_tracking()
        self.batch_unknown = True

    def restart_prefill(self, handle: int) -> None:
        """The only sequence of this request has lost its KV. If it is rescheduled at once, it does not leave the batch."""
        self._prefilling[handle] = 1

    def resolve_pending(self) -> None:
        """Nothing more is to come of the steps that are done."""
        if not self._unfinished:
            self.baseline.resolve_pending()

    # ── who is in the batch ──────────────────────────────────────────────────────────────────────────────────────

    def _apply_delta(self, fact: events.StepScheduled) -> None:
        members, sequences = list(self._members or ()), self._sequences
        for position in fact.left:
            if position >= len(members):
                self.invalidate_batch()
                return
            handle = members.pop(position)
            sequences[handle] -= 1
            self._update_membership(handle, fact.step, sequences[handle])
            if not sequences[handle]:
                del sequences[handle]
        members += fact.joined
        for handle in fact.joined:
            sequences[handle] = sequences.get(handle, 0) + 1
        long = _multi_token_handles(fact)
        for handle in dict.fromkeys(fact.joined):
            self._update_membership(handle, fact.step, sequences[handle], long.count(handle))
        self._members = members

    def _apply_keyframe(self, fact: events.StepScheduled) -> None:
        before, self._sequences = self._sequences, dict(Counter(fact.joined))
        long = Counter(_multi_token_handles(fact))
        for handle in before.keys() - self._sequences.keys():
            self._update_membership(handle, fact.step, 0)
        for handle, sequences in self._sequences.items():
            self._update_membership(handle, fact.step, sequences, long[handle])
        self._members = list(fact.joined)
        self.batch_unknown = False

    def _update_membership(self, handle: int, step: int, sequences: int, long: int = 0) -> None:
        """From `step` on there are so many sequences of a request; `long` of them joined with several tokens scheduled."""
        request = self._find_member(handle) if handle else None
        if request is None:  # one that is concluded may have left without a token
            if not sequences:
                self._prefilling.pop(handle, None)
            return
        joined = sequences - request.update_membership(self, step, sequences)
        young = min(self._prefilling.pop(handle, 0), sequences)
        if joined > 0:
            if request.is_prefilling:
                young += joined
            elif request.may_prefill_again:
                young += min(joined, long)
        if young:
            self._prefilling[handle] = min(young, sequences)

    # ── who has no token yet ─────────────────────────────────────────────────────────────────────────────────────

    def _find_prefills(self, fact: events.StepScheduled) -> tuple[dict[int, _PrefillPositions], int]:
        """Those in this step that have no token yet; of several sequences of a request, it is the longest ones.

        Also, how many tokens are scheduled for them.
        """
        if self._members is None:
            return {}, 0
        all_tokens = 0
        tokens, backwards = dict(fact.tokens), self._members[::-1]
        found: dict[int, _PrefillPositions] = {}
        whose: list[PrefillInStep] = []
        for handle, young in self._prefilling.items():
            positions = _find_positions(backwards, handle, self._sequences.get(handle, 0))
            if not positions:
                continue
            if len(positions) > 1:
                positions = sorted(positions, key=lambda position: -tokens.get(position, 1))[:young]
            of_each = [tokens.get(position, 1) for position in positions]
            found[handle] = _PrefillPositions(positions, of_each)
            tokens_of = sum(of_each)
            all_tokens += tokens_of
            request = self._find_member(handle)
            if request is not None:
                request.record_prefill(self, fact.step, fact.at, tokens_of, fact.size)
                whose.append(request.build_prefill_in_step(tokens_of))
        self.prefill_history.add_prefills(fact.step, whose)
        return found, all_tokens

    def _record_tokens(
        self,
        step: int,
        members: Sequence[int],
        prefills: dict[int, _PrefillPositions],
        delivered: dict[int, int],
    ) -> None:
        for position, tokens in delivered.items():
            handle = members[position]
            request = self._find_member(handle) if handle else None
            if request is not None:
                prefill = prefills.get(handle)
                is_chunk = prefill is not None and position in prefill.positions
                request.record_tokens(self, step, tokens, discarded=tokens == 0 and not is_chunk)

    def _complete_prefills(self, handle: int, grown: int, at: int, done: int) -> None:
        """So many sequences of a request have got their first token: in the steps after it that are in flight, they
        decode."""
        self._prefilling[handle] = self._prefilling.get(handle, 0) - grown
        if self._prefilling[handle] <= 0:
            del self._prefilling[handle]
        request = self._find_member(handle)
        if request is not None:
            request.record_first_token(at)
        for step, flight in self._unfinished.items():
            prefill = flight.prefills.get(handle)
            if prefill is not None and step > done:
                positions, tokens = prefill.positions[:-grown], prefill.tokens[:-grown]
                flight.prefills[handle] = _PrefillPositions(positions, tokens)
                self.table.subtract_prompt_tokens(step, sum(prefill.tokens) - sum(tokens))
                if request is not None:
                    request.record_prefill(
                        self, step, flight.scheduled.at, sum(tokens), flight.scheduled.size
                    )
                    self.prefill_history.correct_tokens(step, request.arrived.span_id, sum(tokens))


def _multi_token_handles(fact: events.StepScheduled) -> list[int]:
    """Whose sequences are scheduled for several tokens, of those that joined (at the end of the batch)."""
    joined, before = fact.joined, fact.size - len(fact.joined)
    return [joined[at - before] for at, tokens in fact.tokens if tokens > 1 and before <= at < fact.size]


def _find_positions(backwards: list[int], handle: int, sequences: int) -> list[int]:
    """Where it stands in a batch; from its end, since that is where those are who have no token yet, and batches are long."""
    found: list[int] = []
    at = -1
    for _ in range(sequences):
        at = backwards.index(handle, at + 1)
        found.append(len(backwards) - 1 - at)
    return found[::-1]


MAX_PREFILLS = 32768
"""Prompts in steps that are remembered, some 7 MB: a step may hold one of them, or hundreds."""


class PrefillHistory:
    """Of each step, who had a part of a prompt in it. Steps come in order."""

    def __init__(self) -> None:
        self._by_step: dict[int, tuple[PrefillInStep, ...]] = {}
        self._count = 0
        self._frozen: Mapping[int, Sequence[PrefillInStep]] | None = None

    def get_prefills(self, step: int) -> tuple[PrefillInStep, ...]:
        """Whose prompts were in this step; empty if there were none, or if it is too long ago."""
        return self._by_step.get(step, ())

    def freeze(self) -> Mapping[int, Sequence[PrefillInStep]]:
        """The prompts in each step as they are known now; shared by all who ask until one more is known."""
        if self._frozen is None:
            self._frozen = MappingProxyType(dict(self._by_step))
        return self._frozen

    def add_prefills(self, step: int, whose: Sequence[PrefillInStep]) -> None:
        """They have prompts in this step, the latest so far."""
        if not whose:
            return
        self._frozen = None
        self._by_step[step] = tuple(whose)
        self._count += len(whose)
        while self._count > MAX_PREFILLS:
            self._count -= len(self._by_step.pop(next(iter(self._by_step))))

    def correct_tokens(self, step: int, span_id: bytes, tokens: int) -> None:
        """It turned out that this request had so many tokens of its prompt in the step."""
        if step in self._by_step:
            self._frozen = None
            self._by_step[step] = tuple(
                who._replace(tokens=tokens) if who.span_id == span_id else who for who in self._by_step[step]
            )
