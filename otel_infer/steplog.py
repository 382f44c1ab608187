"""The step log of one engine: columns of its last 65,536 steps, and who is in the batch now. Pure.

A request remembers only the runs of steps it was a member of, so a step that changes nothing costs nothing per sequence.
What is not known for sure is not known: at a missing step the batch is forgotten until the next keyframe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from otel_infer import facts
from otel_infer.firstuse import Firsts
from otel_infer.prompts import Prompts
from otel_infer.records import Prefiller, StepRecord
from otel_infer.stepcosts import StepCosts, of_steps
from otel_infer.strain import Strain

if TYPE_CHECKING:
    from otel_infer.conclusion import Request

CAPACITY = 65536
"""Steps that are remembered; a request's older steps are counted as forgotten."""
FIT_FIRST, FIT_EVERY, FIT_OVER = 16, 256, 1024
"""What a step costs is estimated anew when there are twice as many steps, then every so often, from so many."""
LOOKED_OVER = 512
"""Steps among which those are found that were in a look at their thread."""
MAX_FLIGHTS = 64
"""Far more than any engine keeps in flight: the ends of older ones will not come."""

Find = Callable[[int], "Request | None"]


class Run(NamedTuple):
    """Steps `first`..`last` (inclusive) of one engine, with `sequences` members of the request in each."""

    log: StepLog
    first: int
    last: int
    sequences: int


class _Prefill(NamedTuple):
    """Members of one request that have no token yet: positions in the batch, tokens scheduled for each; longest first."""

    positions: tuple[int, ...]
    tokens: tuple[int, ...]


class _Flight(NamedTuple):
    """A step that was scheduled and is not done. `prefills` by handle; it shrinks when an earlier step is done."""

    at: int
    members: Sequence[int] | None
    size: int
    prefills: dict[int, _Prefill]
    load: tuple[int, int, int, int]


class StepLog:
    """Membership and columns of one engine's steps. `process` is the ring whose handles the batches hold.

    `holed`: it is not known who is in the batch, for steps were lost. `gap_at`: the first step after some that are missing,
    while nobody has said that they were lost (an engine may have skipped what it could not state); 0 = none. `seen`: kinds of
    steps, of this engine on other threads as well (`Firsts`).
    """

    def __init__(self, engine: str, pid: int, process: int, seen: set[int] | None = None) -> None:
        self.engine, self.pid, self.process = engine, pid, process
        # As rows of a request, but for the tokens, which are each request's own.
        self._table = np.zeros((6, CAPACITY), np.int64)
        self._step, self._started, self._ended, _, self._size, self._prefill = self._table
        self._kv = np.zeros(CAPACITY, np.float64)
        self.last_step = 0
        self.holed = False
        self.gap_at = 0
        self._members: list[int] | None = None
        self._flights: dict[int, _Flight] = {}
        self._prompts = Prompts()
        self._costs: StepCosts | None = None
        self._fit_due = FIT_FIRST
        self.strain = Strain()
        self.firsts = Firsts(seen)
        self._prefilling: dict[int, int] = {}  # handle → how many of its members have no token yet

    # ── facts ────────────────────────────────────────────────────────────────────────────────────────────────────

    def scheduled(self, fact: facts.StepScheduled, find: Find) -> None:
        """A batch was composed: whose run begins, whose is over, and how many prompt tokens are in it."""
        if fact.step <= self.last_step:  # told twice
            return
        if fact.step != self.last_step + 1:
            self.lost(find)
            self.gap_at = self.gap_at or fact.at
        if fact.keyframe:
            self._replace(fact, find)
        elif self._members is not None and (fact.left or fact.joined):
            self._change(fact, find)
        if self._members is None or len(self._members) != fact.size:
            self.lost(find)
        self.last_step = fact.step
        self._depart(fact, self._prefills(fact, find))

    def done(self, fact: facts.StepDone, find: Find) -> StepRecord | None:
        """A step's tokens are known; None for a step whose beginning or whose batch is not known."""
        flight = self._flights.pop(fact.step, None)
        if flight is None:
            return None
        ended_at, i = max(fact.at, flight.at), fact.step % CAPACITY
        if self._step[i] == fact.step:
            self._ended[i] = ended_at
        if flight.members is None:
            return None
        delivered = {at: tokens for at, tokens in fact.delivered if at < len(flight.members)}
        self._deliver(fact.step, flight, delivered, find)
        for handle, prefill in flight.prefills.items():
            grown = sum(delivered.get(position, 1) > 0 for position in prefill.positions)
            if grown:
                self._grow(handle, grown, ended_at, fact.step, find)
        if ended_at >= self.strain.due:
            self.strain.settle(self._table_of(LOOKED_OVER), self.costs())
        prefilling = sum(len(prefill.positions) for prefill in flight.prefills.values())
        return StepRecord(
            self.engine, self.pid, fact.step, flight.at, ended_at, flight.size,
            _tokens(flight.prefills), flight.size - prefilling, *flight.load,
        )  # fmt: skip

    def lost(self, find: Find) -> None:
        """Facts are missing: nothing is known of the batch until the next keyframe."""
        for handle in set(self._members or ()):
            self._take_part(handle, self.last_step + 1, 0, 0, find)
        self._members = None
        self._prefilling.clear()
        self.firsts.lost()
        self.holed = True

    def prefill_again(self, handle: int) -> None:
        """The only sequence of this request has lost its KV. If it is rescheduled at once, it does not leave the batch."""
        self._prefilling[handle] = 1

    # ── what requests ask when they are over ─────────────────────────────────────────────────────────────────────

    @property
    def oldest(self) -> int:
        """The oldest step that is remembered."""
        return self.last_step - CAPACITY + 1

    def columns(self, first: int, last: int) -> list[Any]:
        """The steps from `first` to `last`, all remembered or missing, as views with the lines of `StepRows`."""
        begin, end = first % CAPACITY, last % CAPACITY + 1
        if begin < end:
            return [self._table[:, begin:end]]
        return [self._table[:, begin:], self._table[:, :end]]

    def ended_at(self, step: int) -> int:
        """When this step was done; 0 = not yet, or no longer remembered."""
        i = step % CAPACITY
        return int(self._ended[i]) if self._step[i] == step else 0

    def kv_at(self, step: int) -> float:
        """KV utilisation when this step was scheduled; NaN where it is not known."""
        i = step % CAPACITY
        return float(self._kv[i]) if self._step[i] == step else float("nan")

    def prefill_tokens(self, step: int) -> int:
        """Prompt tokens of all requests in this step."""
        i = step % CAPACITY
        return int(self._prefill[i]) if self._step[i] == step else 0

    def prefillers(self, step: int) -> tuple[Prefiller, ...]:
        """Whose prompts were in this step."""
        return self._prompts.of(step)

    def costs(self) -> StepCosts | None:
        """What a step without prompts costs; the same for the same facts before it."""
        if self.last_step >= self._fit_due:
            table = self._table_of(FIT_OVER)
            held = sum(self.strain.counted(np.maximum(table[1, 1:], table[2, :-1]), table[2, 1:]))
            self._costs = of_steps(table, held)
            self.firsts.learn(table, self._costs)
            self._fit_due = self.last_step + min(self.last_step, FIT_EVERY)
        return self._costs

    def settle(self) -> None:
        """Nothing more is to come of the steps that are done: what is known of the thread counts for them."""
        if self.strain.waits and not self._flights:
            self.strain.settle(self._table_of(LOOKED_OVER), self.costs(), final=True)

    def _table_of(self, most: int) -> Any:
        """The columns of the last steps."""
        return np.concatenate(self.columns(max(self.last_step - most, 1), self.last_step), axis=1)

    # ── who is in the batch ──────────────────────────────────────────────────────────────────────────────────────

    def _change(self, fact: facts.StepScheduled, find: Find) -> None:
        members = list(self._members or ())
        for position in fact.left:
            if position >= len(members):
                self.lost(find)
                return
            handle = members.pop(position)
            self._take_part(handle, fact.step, members.count(handle), 0, find)
        long = _long(fact, fact.joined)
        members += fact.joined
        for handle, joined in Counter(fact.joined).items():
            self._take_part(handle, fact.step, members.count(handle), min(joined, long[handle]), find)
        self._members = members

    def _replace(self, fact: facts.StepScheduled, find: Find) -> None:
        members = list(fact.joined)
        after, long = Counter(members), _long(fact, members)
        for handle in set(self._members or ()) - after.keys():
            self._take_part(handle, fact.step, 0, 0, find)
        for handle, sequences in after.items():
            self._take_part(handle, fact.step, sequences, long[handle], find)
        self._members = members
        self.holed = False

    def _take_part(self, handle: int, step: int, sequences: int, long: int, find: Find) -> None:
        """From `step` on there are so many sequences of a request, `long` of them scheduled for several tokens."""
        request = find(handle) if handle else None
        if request is None:
            return
        joined = sequences - request.take_part(self, step, sequences)
        young = min(self._prefilling.pop(handle, 0), sequences)
        if request.is_prefilling and joined > 0:
            young += joined
        elif joined > 0 and request.may_prefill_again:
            young += min(joined, long)
        if young:
            self._prefilling[handle] = min(young, sequences)

    # ── steps in flight, and who has no token yet ────────────────────────────────────────────────────────────────

    def _depart(self, fact: facts.StepScheduled, prefills: dict[int, _Prefill]) -> None:
        load = (fact.kv_used, fact.kv_total, fact.running, fact.waiting)
        self._flights[fact.step] = _Flight(fact.at, self._members, fact.size, prefills, load)
        if len(self._flights) > MAX_FLIGHTS:
            del self._flights[min(self._flights)]
        i = fact.step % CAPACITY
        self._step[i], self._started[i], self._ended[i] = fact.step, fact.at, 0
        self._size[i], self._prefill[i] = fact.size, _tokens(prefills)
        self._kv[i] = fact.kv_used / fact.kv_total if fact.kv_total else np.nan
        self.firsts.scheduled(fact.step, fact.size, int(self._prefill[i]))

    def _prefills(self, fact: facts.StepScheduled, find: Find) -> dict[int, _Prefill]:
        """Those in this step that have no token yet; of several sequences of a request, it is the longest ones."""
        members = self._members
        if members is None or not self._prefilling:
            return {}
        tokens = dict(fact.tokens)
        found: dict[int, _Prefill] = {}
        whose: list[Prefiller] = []
        for handle, young in self._prefilling.items():
            positions = sorted(_positions(members, handle), key=lambda position: -tokens.get(position, 1))[
                :young
            ]
            if not positions:
                continue
            prefill = _Prefill(tuple(positions), tuple(tokens.get(position, 1) for position in positions))
            found[handle] = prefill
            request = find(handle)
            if request is not None:
                tokens_of = sum(prefill.tokens)
                request.schedule(self, fact.step, fact.at, tokens_of, fact.size)
                whose.append(request.prefiller(tokens_of))
        self._prompts.note(fact.step, whose)
        return found

    def _deliver(self, step: int, flight: _Flight, delivered: dict[int, int], find: Find) -> None:
        for position, tokens in delivered.items():
            handle = flight.members[position] if flight.members else 0
            request = find(handle) if handle else None
            if request is not None:
                prefill = flight.prefills.get(handle)
                is_chunk = prefill is not None and position in prefill.positions
                request.deliver(self, step, tokens, discarded=tokens == 0 and not is_chunk)

    def _grow(self, handle: int, grown: int, at: int, done: int, find: Find) -> None:
        """So many sequences of a request have got their first token: in the steps after it that are in flight, they
        decode."""
        self._prefilling[handle] = self._prefilling.get(handle, 0) - grown
        if self._prefilling[handle] <= 0:
            del self._prefilling[handle]
        request = find(handle)
        if request is not None:
            request.first_token(at)
        for step, flight in self._flights.items():
            prefill = flight.prefills.get(handle)
            if prefill is not None and step > done:
                positions, tokens = prefill.positions[:-grown], prefill.tokens[:-grown]
                flight.prefills[handle] = _Prefill(positions, tokens)
                self._prefill[step % CAPACITY] -= sum(prefill.tokens) - sum(tokens)
                if request is not None:
                    request.schedule(self, step, flight.at, sum(tokens), flight.size)
                    self._prompts.correct(step, request.arrived.span_id, sum(tokens))


def _tokens(prefills: dict[int, _Prefill]) -> int:
    return sum(sum(prefill.tokens) for prefill in prefills.values())


def _long(fact: facts.StepScheduled, joined: Sequence[int]) -> Counter[int]:
    """Of those who joined (at the end of the batch), how many sequences are scheduled for several tokens, by handle."""
    before = fact.size - len(joined)
    return Counter(
        joined[at - before] for at, tokens in fact.tokens if tokens > 1 and before <= at < fact.size
    )


def _positions(members: Sequence[int], handle: int) -> list[int]:
    """Where it stands; by C calls, since batches are long."""
    found: list[int] = []
    for _ in range(members.count(handle)):
        found.append(members.index(handle, found[-1] + 1 if found else 0))
    return found
