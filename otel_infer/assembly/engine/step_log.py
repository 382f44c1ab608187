"""The step log of one engine: its current batch, and the steps each request was a member of. Pure.

A request records only its runs of steps, so a step that changes nothing costs nothing per sequence.
After a missing step the batch is unknown until the next keyframe; it is never guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from otel_infer.assembly.engine.baseline import EngineBaseline
from otel_infer.assembly.engine.device_steps import DeviceSteps
from otel_infer.assembly.engine.prefill_history import PrefillHistory
from otel_infer.assembly.engine.step_table import CAPACITY, StepTable
from otel_infer.assembly.engine.types import PrefillInStep, StepRecord
from otel_infer.assembly.engine.warmup import StepKinds
from otel_infer.ringbuffer import events

MAX_UNFINISHED_STEPS = 1024
"""Unfinished steps that are remembered. An engine has a few in flight; each task of a custom loop may have one."""


class StepMember(Protocol):
    """A request as the step log uses it: it records when it joins, is computed in, or leaves a step."""

    arrived: events.RequestArrived
    is_prefilling: bool
    ended: events.RequestEnded | None

    @property
    def may_prefill_again(self) -> bool: ...

    def update_membership(self, log: EngineStepLog, step: int, sequences: int) -> int: ...

    def record_prefill(self, log: EngineStepLog, step: int, at: int, tokens: int, size: int) -> None: ...

    def build_prefill_in_step(self, tokens: int) -> PrefillInStep: ...

    def record_tokens(self, log: EngineStepLog, step: int, tokens: int, discarded: bool) -> None: ...

    def record_first_token(self, at: int) -> None: ...

    def mark_steps_lost(self) -> None: ...


FindMember = Callable[[int], StepMember | None]


class StepRun(NamedTuple):
    """Steps `first`..`last` (inclusive) of one engine, with `sequences` members of the request in each."""

    log: EngineStepLog
    first: int
    last: int
    sequences: int


class _PrefillPositions(NamedTuple):
    """One request's sequences without a token yet: batch positions and scheduled tokens; longest first."""

    positions: Sequence[int]
    tokens: Sequence[int]


class _UnfinishedStep(NamedTuple):
    """A scheduled step that is not done. `prefills`: by handle; shrinks when an earlier step is done."""

    scheduled: events.StepScheduled
    members: Sequence[int] | None
    prefills: dict[int, _PrefillPositions]


class EngineStepLog:
    """The steps of one engine and their members. `process`: the ring whose request handles the batches hold.

    `batch_unknown`: steps were lost and no keyframe came since. `first_gap_at`: when the first step after
    missing ones was scheduled, until the assembler handles it; 0 = none. An engine may also skip steps.
    `forgotten`: unfinished steps that were dropped for lack of room, until the assembler counts them.
    """

    def __init__(
        self, engine: str, pid: int, process: int, find: FindMember, seen_kinds: StepKinds | None = None
    ) -> None:
        self.engine, self.pid, self.process = engine, pid, process
        self.table = StepTable()
        self.device: DeviceSteps | None = None
        """Times of the steps by a worker or a device; None before the first."""
        self.block_tokens = 0
        """Tokens in a block of the KV cache; 0 = unknown."""
        self.ranks = 1
        """Workers that recorded steps, each with its own device."""
        self.prefill_history = PrefillHistory()
        self.baseline = EngineBaseline(self.table, seen_kinds)
        self.batch_unknown = False
        self.first_gap_at = 0
        self.forgotten = 0
        self.busy_ns = self.abandoned_ns = 0
        """Time of all steps, and of steps that generate only for a client that has left."""
        self._find_member = find
        self._members: list[int] | None = None
        self._sequences: dict[int, int] = {}  # handle → its sequences in the batch
        self._prefilling: dict[int, int] = {}  # handle → its sequences in the batch without a token yet
        self._unfinished: dict[int, _UnfinishedStep] = {}

    # ── events ──────────────────────────────────────────────────────────────────────────────────────────────

    def begin_step(self, event: events.StepScheduled) -> None:
        """Records a scheduled batch: changes in membership, and its prompt tokens."""
        at, step, keyframe, size, left, joined, *_ = event
        last = self.table.last
        if step <= last:  # recorded twice
            return
        if step != last + 1:
            self.invalidate_batch()
            self.first_gap_at = self.first_gap_at or at
        if keyframe:
            self._apply_keyframe(event)
        elif self._members is not None and (left or joined):
            self._apply_delta(event)
        if self._members is None or len(self._members) != size:
            self.invalidate_batch()
        prefills, tokens = self._find_prefills(event) if self._prefilling else ({}, 0)
        self.table.begin_step(event, tokens)
        self.baseline.warmup.add_step(step, size, tokens, event.at)
        if size or self._members is not None:  # the first step of a tape may be one without any information
            self._unfinished[step] = _UnfinishedStep(event, self._members, prefills)
        if len(self._unfinished) > MAX_UNFINISHED_STEPS:
            self._forget_step(self._unfinished.pop(next(iter(self._unfinished))))

    def _forget_step(self, unfinished: _UnfinishedStep) -> None:
        """Marks the requests in a step that is dropped before it is done, because its tokens are lost."""
        self.forgotten += 1
        for handle in set(unfinished.members or ()):
            request = self._find_member(handle) if handle else None
            if request is not None:
                request.mark_steps_lost()

    def end_step(self, event: events.StepDone) -> StepRecord | None:
        """Records a step's tokens and returns its record; None if its beginning or its batch is unknown."""
        unfinished = self._unfinished.pop(event.step, None)
        if unfinished is None:
            return None
        scheduled, members, prefills = unfinished
        ended_at = max(event.at, scheduled.at)
        self.table.end_step(event.step, ended_at)
        if members is None:
            return None
        counts: dict[int, int] = {}
        if event.delivered:
            counts = {position: tokens for position, tokens in event.delivered if position < len(members)}
            self._record_tokens(event.step, members, prefills, counts)
            self.table.raise_computed_tokens(event.step, sum(counts.values()) + len(members) - len(counts))
        prefilling = 0
        for handle, (positions, _) in prefills.items():
            prefilling += len(positions)
            completed = len([position for position in positions if counts.get(position, 1) > 0])
            if completed:
                self._complete_prefills(handle, completed, ended_at, event.step)
        self.busy_ns += ended_at - scheduled.at
        if len(members) == 1 and self._is_abandoned(members[0]):
            self.abandoned_ns += ended_at - scheduled.at
        self.baseline.record_step_end(ended_at)
        return StepRecord(
            self.engine, self.pid, event.step, scheduled.at, ended_at, scheduled.size,
            self.table.prefill_tokens(event.step), scheduled.size - prefilling,
            scheduled.kv_used, scheduled.kv_total, scheduled.running, scheduled.waiting, self.block_tokens,
        )  # fmt: skip

    def _is_abandoned(self, handle: int) -> bool:
        """Returns whether the client of this member has left; unknown (0) members count as present."""
        request = self._find_member(handle) if handle else None
        if request is None:
            return bool(handle)  # concluded
        return request.ended is not None and request.ended.outcome == events.ABORTED

    def add_host_time(self, step: int, length: int) -> None:
        """Records how long a worker's part of a step took by the host's clock, ns."""
        self._get_device_steps().set_host_time(step, length)

    def add_device_time(self, event: events.StepTimed) -> None:
        """Records when and how long a device ran a step."""
        launched, gap = events.decode_ns(event.launched_ns), events.decode_ns(event.gap_ns)
        lengths = event.at - event.started_at, launched, event.queued_ns, gap, event.bound_ns
        self._get_device_steps().set_device_time(event.step, event.started_at, *lengths)

    def _get_device_steps(self) -> DeviceSteps:
        if self.device is None:
            self.device = DeviceSteps(CAPACITY)
        return self.device

    def invalidate_batch(self) -> None:
        """Discards the batch after events were lost; the next keyframe restores it."""
        for handle in set(self._members or ()):
            self._update_membership(handle, self.table.last + 1, 0)
        self._members = None
        self._sequences.clear()
        self._prefilling.clear()
        self.baseline.warmup.stop_tracking()
        self.batch_unknown = True

    def restart_prefill(self, handle: int) -> None:
        """Records that a request's only sequence lost its KV; it may never have left the batch."""
        self._prefilling[handle] = 1

    def resolve_pending(self, ended_at: int) -> None:
        """Resolves the pending thread samples of a request that ended at this instant; all if no step is unfinished."""
        self.baseline.resolve_pending(ended_at, final=not self._unfinished)

    # ── batch membership ────────────────────────────────────────────────────────────────────────────────────

    def _apply_delta(self, event: events.StepScheduled) -> None:
        members, sequences = list(self._members or ()), self._sequences
        for position in event.left:
            if position >= len(members):
                self.invalidate_batch()
                return
            handle = members.pop(position)
            sequences[handle] -= 1
            self._update_membership(handle, event.step, sequences[handle])
            if not sequences[handle]:
                del sequences[handle]
        members += event.joined
        for handle in event.joined:
            sequences[handle] = sequences.get(handle, 0) + 1
        multi_token = _multi_token_handles(event)
        for handle in dict.fromkeys(event.joined):
            self._update_membership(handle, event.step, sequences[handle], multi_token.count(handle))
        self._members = members

    def _apply_keyframe(self, event: events.StepScheduled) -> None:
        before, self._sequences = self._sequences, dict(Counter(event.joined))
        multi_token = Counter(_multi_token_handles(event))
        for handle in before.keys() - self._sequences.keys():
            self._update_membership(handle, event.step, 0)
        for handle, sequences in self._sequences.items():
            self._update_membership(handle, event.step, sequences, multi_token[handle])
        self._members = list(event.joined)
        self.batch_unknown = False

    def _update_membership(self, handle: int, step: int, sequences: int, multi_token: int = 0) -> None:
        """Sets a request's sequences from `step` on; `multi_token` of them joined with several tokens."""
        request = self._find_member(handle) if handle else None
        if request is None:  # a concluded request may have left without a token
            if not sequences:
                self._prefilling.pop(handle, None)
            return
        joined = sequences - request.update_membership(self, step, sequences)
        prefilling = min(self._prefilling.pop(handle, 0), sequences)
        if joined > 0:
            if request.is_prefilling:
                prefilling += joined
            elif request.may_prefill_again:
                prefilling += min(joined, multi_token)
        if prefilling:
            self._prefilling[handle] = min(prefilling, sequences)

    # ── prefills ────────────────────────────────────────────────────────────────────────────────────────────

    def _find_prefills(self, event: events.StepScheduled) -> tuple[dict[int, _PrefillPositions], int]:
        """Returns this step's sequences without a token yet, by handle, and their scheduled tokens in all.

        If only some sequences of a request have none, the longest ones are taken.
        """
        if self._members is None:
            return {}, 0
        all_tokens = 0
        tokens, backwards = dict(event.tokens), self._members[::-1]
        found: dict[int, _PrefillPositions] = {}
        prefills: list[PrefillInStep] = []
        for handle, prefilling in self._prefilling.items():
            positions = _find_positions(backwards, handle, self._sequences.get(handle, 0))
            if not positions:
                continue
            if len(positions) > 1:
                positions = sorted(positions, key=lambda position: -tokens.get(position, 1))[:prefilling]
            counts = [tokens.get(position, 1) for position in positions]
            found[handle] = _PrefillPositions(positions, counts)
            prompt_tokens = sum(counts)
            all_tokens += prompt_tokens
            request = self._find_member(handle)
            if request is not None:
                request.record_prefill(self, event.step, event.at, prompt_tokens, event.size)
                prefills.append(request.build_prefill_in_step(prompt_tokens))
        self.prefill_history.add_prefills(event.step, prefills)
        return found, all_tokens

    def _record_tokens(
        self, step: int, batch: Sequence[int], prefills: dict[int, _PrefillPositions], counts: dict[int, int]
    ) -> None:
        for position, tokens in counts.items():
            handle = batch[position]
            request = self._find_member(handle) if handle else None
            if request is not None:
                prefill = prefills.get(handle)
                is_chunk = prefill is not None and position in prefill.positions
                request.record_tokens(self, step, tokens, discarded=tokens == 0 and not is_chunk)

    def _complete_prefills(self, handle: int, completed: int, at: int, done: int) -> None:
        """Records first tokens of `completed` sequences; in steps in flight after step `done` they decode."""
        self._prefilling[handle] = self._prefilling.get(handle, 0) - completed
        if self._prefilling[handle] <= 0:
            del self._prefilling[handle]
        request = self._find_member(handle)
        if request is not None:
            request.record_first_token(at)
        for step, later in self._unfinished.items():
            prefill = later.prefills.get(handle)
            if prefill is not None and step > done:
                positions, tokens = prefill.positions[:-completed], prefill.tokens[:-completed]
                later.prefills[handle] = _PrefillPositions(positions, tokens)
                self.table.subtract_prompt_tokens(step, sum(prefill.tokens) - sum(tokens))
                if request is not None:
                    request.record_prefill(self, step, later.scheduled.at, sum(tokens), later.scheduled.size)
                    self.prefill_history.correct_tokens(step, request.arrived.span_id, sum(tokens))


def _multi_token_handles(event: events.StepScheduled) -> list[int]:
    """Returns the handle of each joined sequence (at the end of the batch) with several tokens scheduled."""
    joined, before = event.joined, event.size - len(event.joined)
    return [
        joined[position - before]
        for position, tokens in event.tokens
        if tokens > 1 and before <= position < event.size
    ]


def _find_positions(backwards: list[int], handle: int, sequences: int) -> list[int]:
    """Returns a request's positions, searched from the end: prefills are there, and batches are long."""
    positions: list[int] = []
    index = -1
    for _ in range(sequences):
        index = backwards.index(handle, index + 1)
        positions.append(len(backwards) - 1 - index)
    return positions[::-1]
