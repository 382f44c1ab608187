"""The step log of one engine: columns of its last 65,536 steps, and who is in the batch now. Pure.

A request remembers only the runs of steps it was a member of, so a step that changes nothing costs nothing per sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from otel_infer import facts
from otel_infer.records import StepRecord, StepRows

if TYPE_CHECKING:
    from otel_infer.conclusion import Request

CAPACITY = 65536
"""Steps that are remembered; a request's older steps are counted as forgotten."""

Find = Callable[[int], "Request | None"]


class Run(NamedTuple):
    """Steps `first`..`last` (inclusive) of one engine, with `sequences` members of the request in each."""

    log: StepLog
    first: int
    last: int
    sequences: int


class _Flight(NamedTuple):
    """A step that was scheduled and is not done; `own_prefill` is (handle, tokens) of those who have no token yet."""

    at: int
    members: list[int] | None
    size: int
    prefill_tokens: int
    prefilling: tuple[tuple[int, int], ...]
    load: tuple[int, int, int, int]


class StepLog:
    """Membership and columns of one engine's steps. `process` is the ring whose handles the batches hold."""

    def __init__(self, engine: str, pid: int, process: int) -> None:
        self.engine, self.pid, self.process = engine, pid, process
        self._step = np.zeros(CAPACITY, np.int64)
        self._started = np.zeros(CAPACITY, np.int64)
        self._ended = np.zeros(CAPACITY, np.int64)
        self._size = np.zeros(CAPACITY, np.int64)
        self._prefill = np.zeros(CAPACITY, np.int64)
        self._kv = np.zeros(CAPACITY, np.float64)
        self.last_step = 0
        self.kv: tuple[int, int] = (0, 0)
        self._members: list[int] | None = None
        self._flights: dict[int, _Flight] = {}
        self._prefilling: dict[int, Request] = {}

    def scheduled(self, fact: facts.StepScheduled, find: Find) -> None:
        """A batch was composed: whose run begins, whose is over, and how many prompt tokens are in it."""
        step = fact.step
        if fact.keyframe:
            self._replace(list(fact.joined), step, find)
        elif self._members is not None and (fact.left or fact.joined):
            self._change(fact, find)
        if self._members is not None and len(self._members) != fact.size:
            self.lost(find)
        prefilling, prefill_tokens = self._prefill_of(fact)
        for handle, tokens in prefilling:
            request = self._prefilling[handle]
            request.schedule(fact.at, step, tokens, fact.size, self)
        load = (fact.kv_used, fact.kv_total, fact.running, fact.waiting)
        self._flights[step] = _Flight(fact.at, self._members, fact.size, prefill_tokens, prefilling, load)
        if len(self._flights) > 64:  # far more than any engine keeps in flight: their ends will not come
            del self._flights[min(self._flights)]
        self.last_step = step
        self.kv = (fact.kv_used, fact.kv_total)
        i = step % CAPACITY
        self._step[i], self._started[i], self._ended[i] = step, fact.at, 0
        self._size[i], self._prefill[i] = fact.size, prefill_tokens
        self._kv[i] = fact.kv_used / fact.kv_total if fact.kv_total else np.nan

    def done(self, fact: facts.StepDone, find: Find) -> StepRecord | None:
        """A step's tokens are known; None for a step whose beginning was not seen."""
        flight = self._flights.pop(fact.step, None)
        if flight is None:
            return None
        i = fact.step % CAPACITY
        if self._step[i] == fact.step:
            self._ended[i] = fact.at
        missed: dict[int, int] = {}
        unfinished = dict(flight.prefilling)
        if flight.members is not None:
            for position, tokens in fact.delivered:
                if position < len(flight.members):
                    handle = flight.members[position]
                    missed[handle] = missed.get(handle, 0) + tokens - 1
        for handle, delta in missed.items():
            request = find(handle)
            if request is not None:
                request.deltas[id(self), fact.step] = delta
                request.discarded += delta < 0 and handle not in unfinished
        for handle, _ in flight.prefilling:
            candidate = self._prefilling.get(handle)
            if candidate is not None and missed.get(handle, 0) >= 0:
                candidate.first_token(fact.at, fact.step)
                self._prefilling.pop(handle, None)
        kv_used, kv_total, running, waiting = flight.load
        decoding = max(flight.size - len(flight.prefilling), 0)
        return StepRecord(
            self.engine, self.pid, fact.step, flight.at, fact.at, flight.size, flight.prefill_tokens, decoding,
            kv_used, kv_total, running, waiting,
        )  # fmt: skip

    def lost(self, find: Find) -> None:
        """Facts are missing: nothing is known of the batch until the next keyframe."""
        if self._members is not None:
            for handle in set(self._members):
                self._leave(handle, self.last_step, find, all_of_it=True)
        self._members = None
        self._flights.clear()

    def rows(self, runs: list[Run], deltas: dict[tuple[int, int], int]) -> tuple[StepRows, int]:
        """The steps of these runs that delivered tokens, and how many steps of them are no longer remembered."""
        wanted = sum(run.last - run.first + 1 for run in runs)
        oldest = self.last_step - CAPACITY + 1
        spans = [(np.arange(max(run.first, oldest), run.last + 1), run.sequences) for run in runs]
        step = np.concatenate([s for s, _ in spans]) if spans else np.zeros(0, np.int64)
        tokens = np.concatenate([np.full(len(s), n, np.int64) for s, n in spans]) if spans else step
        forgotten = wanted - len(step)
        if deltas:
            order = np.searchsorted(step, [number for _, number in deltas])
            for position, (_, number), delta in zip(order.tolist(), deltas, deltas.values()):
                if position < len(step) and step[position] == number:
                    tokens[position] += delta
        i = step % CAPACITY
        seen = (tokens > 0) & (self._step[i] == step) & (self._ended[i] > 0)
        step, tokens, i = step[seen], tokens[seen], i[seen]
        rows = StepRows(step, self._started[i], self._ended[i], tokens, self._size[i], self._prefill[i])
        return rows, forgotten

    def ended_at(self, step: int) -> int:
        """When this step was done; 0 = not yet, or no longer remembered."""
        i = step % CAPACITY
        return int(self._ended[i]) if self._step[i] == step else 0

    def kv_at(self, step: int) -> float:
        """KV utilisation when this step was scheduled; NaN where it is not known."""
        i = step % CAPACITY
        return float(self._kv[i]) if self._step[i] == step else float("nan")

    def _prefill_of(self, fact: facts.StepScheduled) -> tuple[tuple[tuple[int, int], ...], int]:
        """(handle, tokens) of the members that have no token yet, and the sum."""
        members = self._members
        if members is None or not self._prefilling:
            return (), 0
        tokens = {members[position]: n for position, n in fact.tokens if position < len(members)}
        present = set(members) if len(self._prefilling) > 4 else members
        found = tuple((handle, tokens.get(handle, 1)) for handle in self._prefilling if handle in present)
        return found, sum(n for _, n in found)

    def _change(self, fact: facts.StepScheduled, find: Find) -> None:
        members = list(self._members or ())
        for position in fact.left:
            if position >= len(members):
                self.lost(find)
                return
            self._leave(members[position], fact.step - 1, find)
            del members[position]
        for handle in fact.joined:
            self._join(handle, fact.step, find)
        members.extend(fact.joined)
        self._members = members

    def _replace(self, members: list[int], step: int, find: Find) -> None:
        before, after = _counts(self._members or []), _counts(members)
        for handle, sequences in before.items():
            for _ in range(sequences - after.get(handle, 0)):
                self._leave(handle, step - 1, find)
        for handle, sequences in after.items():
            for _ in range(sequences - before.get(handle, 0)):
                self._join(handle, step, find)
        self._members = members

    def _join(self, handle: int, step: int, find: Find) -> None:
        request = find(handle) if handle else None
        if request is not None:
            request.join(self, step)
            if request.is_prefilling:
                self._prefilling[handle] = request

    def _leave(self, handle: int, last: int, find: Find, all_of_it: bool = False) -> None:
        self._prefilling.pop(handle, None)
        request = find(handle) if handle else None
        if request is not None:
            request.leave(self, last, all_of_it)


def _counts(members: list[int]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for handle in members:
        counts[handle] = counts.get(handle, 0) + 1
    return counts


def joined_rows(parts: list[StepRows]) -> StepRows:
    """Rows of several engines as one, in order of time."""
    if len(parts) == 1:
        return parts[0]
    whole = StepRows(*(np.concatenate(column) for column in zip(*(part.columns() for part in parts))))
    return whole.take(np.argsort(whole.ended_at, kind="stable"))
