"""Finds how long a call waited in gRPC's core until its server accepted it: the stage `accept`.

    headers arrive in the core ── the server is busy with other calls, or its event loop is blocked ──▶ it accepts the call

The core queues calls in their order, and counts them (`channelz`). So the call that an asyncio server accepts now is number
`over + in flight` of all calls that arrived. A threaded server sees the ends of its calls late. There it is the number of
accepted calls, and the fewest that ever waited beside them are no waiting calls. A sample contains how many had arrived, and when the last one did. The
arrival of a call lies between two samples. It is interpolated, and exact to 1 ms for the last call of a sample.

A query of the counts is slow, so a server that is idle makes none, and a busy one spends 2 % of a core on them. A server whose
calls do not wait makes four per second at most.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import NamedTuple

from otel_infer import _clock
from otel_infer.instrumentation.grpc.channelz import CallCounts, list_servers, read_counts

MIN_WAIT_NS = 2_000_000
"""Twice the resolution of the core's timestamps."""
QUIET_NS = 5_000_000
"""A server without a call in flight, and without an event for this time, is idle: no call waited."""
SLACK_NS = 1_000_000
"""A queue is empty if the server accepts no call for so much longer than twice its pace."""
COST_FACTOR = 50
"""A query is followed by none for so many times its own CPU time."""
MAX_INTERVAL_NS = 250_000_000
MAX_SAMPLES = 1000
MAX_EXCESSES = 64
PATIENCE = 4
"""After so many queries in a row that found no wait, the interval doubles with each."""
CALIBRATIONS = 3
"""Number of calls of an idle server that are queried, because they show the error of the core's clock."""


class Sample(NamedTuple):
    """`arrived`: the number of calls until `at`, the last one at `last_at`, both monotonic ns. `is_queued`: calls waited."""

    at: int
    arrived: int
    last_at: int
    is_queued: bool


class AcceptedCall(NamedTuple):
    """A call that a server has accepted. `number`: from 1 on; 0 = it is not followed. `waited_since`: monotonic ns; 0 = it did not wait."""

    number: int
    waited_since: int


UNKNOWN_CALL = AcceptedCall(0, 0)


class CoreClock:
    """How far the core's timestamps are behind the wall clock: constant in a process, the least that was seen, ns."""

    __slots__ = ("error_ns",)

    def __init__(self) -> None:
        self.error_ns: int | None = None

    def find_age(self, apparent_ns: int, max_ns: int) -> int:
        """Returns the age of a timestamp that seems to be `apparent_ns` old, and is not older than `max_ns`; all ns."""
        if self.error_ns is None or apparent_ns < self.error_ns:
            self.error_ns = apparent_ns
        elif apparent_ns - self.error_ns > max_ns + MIN_WAIT_NS:  # a clock was set
            self.error_ns = apparent_ns - max_ns
        return min(apparent_ns - self.error_ns, max_ns)


core_clock = CoreClock()


class AcceptWaits:
    """The calls of one server. Calls are accepted by one thread.

    `excesses`: of a server that sees the ends of its calls late, else None: how many calls had arrived and were not accepted, at
    the last queries.

    `accepted`: their number. `in_flight`: the numbers of those that have not ended. `event_at`: when the last one was accepted
    or ended. `offset`: number of a call among all that arrived, less its number among those accepted. `pace_ns`: time between two
    calls that were accepted while calls waited. `gap_ns`: time between two calls that arrived; 0 = unknown. `sampled`: how many had
    arrived at the last query, which was at `sampled_at`.
    """

    __slots__ = (
        "accepted", "accepted_at", "calibrations", "clock", "event_at", "excesses", "gap_ns", "in_flight", "made_at",
        "next_query_at", "offset", "pace_ns", "paces", "quiet_queries", "sampled", "sampled_at", "samples", "server_id",
    )  # fmt: skip

    def __init__(self, server_id: int, clock: CoreClock = core_clock, *, sees_ends: bool = True) -> None:
        self.server_id, self.clock = server_id, clock
        self.excesses: deque[int] | None = None if sees_ends else deque(maxlen=MAX_EXCESSES)
        self.accepted = self.event_at = self.offset = self.calibrations = 0
        self.in_flight: set[int] = set()
        self.next_query_at = self.quiet_queries = self.gap_ns = self.pace_ns = self.accepted_at = 0
        self.sampled, self.sampled_at = 0, _clock.now()
        self.made_at = self.sampled_at
        self.paces: deque[int] = deque(maxlen=16)
        self.samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)

    def note_end(self, number: int) -> None:
        """Notes that an accepted call has ended; it may be noted again. The core knows the end of a response at once."""
        self.in_flight.discard(number)
        self.event_at = _clock.now()

    def note_accepted(self, now: int) -> AcceptedCall:
        """Returns the call that the server accepts `now` (monotonic ns)."""
        is_idle = not self.in_flight and now - self.event_at > QUIET_NS
        self.accepted += 1
        self.in_flight.add(self.accepted)
        arrived_at = self._place_call(now, is_idle)
        self.event_at = self.accepted_at = now
        return AcceptedCall(self.accepted, arrived_at if now - arrived_at >= MIN_WAIT_NS else 0)

    def _place_call(self, now: int, is_idle: bool) -> int:
        """Returns when the last accepted call arrived, monotonic ns; `now`, if it did not wait or this is unknown."""
        if is_idle:
            self._note_empty_queue(now, self.offset + self.accepted)
            if self.calibrations >= CALIBRATIONS:
                return now
            self.calibrations += 1
        else:
            self._note_pace(self.offset + self.accepted, now)
        if now >= self.next_query_at:
            self._take_sample(now)
        return now if is_idle else self._find_arrival(self.offset + self.accepted, now)

    def _note_pace(self, number: int, now: int) -> None:
        """Notes how fast the server accepts calls that wait; or that none waited, because it would have been accepted."""
        since_last = now - self.accepted_at
        if self.samples and number <= self.samples[-1].arrived:
            self.paces.append(since_last)
            self.pace_ns = sorted(self.paces)[-2] if len(self.paces) > 1 else 0
        elif since_last > 2 * self.pace_ns + SLACK_NS:
            self._note_empty_queue(now, number - 1)

    def _note_empty_queue(self, now: int, arrived: int) -> None:
        """Notes that no call waited until `now`, of so many that had arrived. A sample may show that some arrived before."""
        self.samples.clear()
        self.samples.append(Sample(now, arrived, now, False))

    def _take_sample(self, now: int) -> None:
        wall_now, began = _clock.wall_now(), time.thread_time_ns()
        counts = read_counts(self.server_id)
        cost = time.thread_time_ns() - began
        if counts is None:
            self.next_query_at = sys.maxsize
            return
        number = self._find_number(counts)
        self.offset = number - self.accepted
        self._add_sample(self._make_sample(counts, number, now, wall_now))
        is_queued = self.samples[-1].is_queued or now - self._find_arrival(number, now) >= MIN_WAIT_NS
        self.quiet_queries = 0 if is_queued else self.quiet_queries + 1
        factor = COST_FACTOR << min(max(self.quiet_queries - PATIENCE, 0), 10)
        interval = min(factor * cost, MAX_INTERVAL_NS)
        self.next_query_at = max(self.next_query_at, now - interval) + interval

    def _find_number(self, counts: CallCounts) -> int:
        """Returns the number of the last accepted call among all that arrived."""
        if self.excesses is None:
            return min(counts.over + len(self.in_flight), counts.started)
        self.excesses.append(max(counts.started - self.accepted, 0))
        return self.accepted + min(self.excesses)

    def _make_sample(self, counts: CallCounts, number: int, now: int, wall_now: int) -> Sample:
        """Returns the sample of a query, which was made at the accept of the call of this number."""
        has_new = counts.started > self.sampled
        max_age = now - (self.sampled_at if has_new else self.made_at)
        age = self.clock.find_age(wall_now - counts.last_started_at, max_age)
        self.sampled, self.sampled_at = counts.started, now
        return Sample(now, counts.started, now - age, counts.started > number)

    def _add_sample(self, sample: Sample) -> None:
        if self.samples:
            last = self.samples[-1]
            if sample.arrived > last.arrived and sample.last_at > last.last_at:
                gap = (sample.last_at - last.last_at) // (sample.arrived - last.arrived)
                self.gap_ns = (3 * self.gap_ns + gap) // 4 if self.gap_ns else gap
        self.samples.append(sample)

    def _find_arrival(self, number: int, now: int) -> int:
        """Returns when the call of this number arrived, monotonic ns; `now`, where that is unknown."""
        samples = self.samples
        while len(samples) > 1 and samples[1].arrived < number:
            samples.popleft()
        if not samples:
            return now
        before = samples[0]
        if number <= before.arrived:
            return before.last_at
        if len(samples) == 1:  # it arrived after the last sample
            is_known = before.is_queued and self.gap_ns > 0
            return min(before.at + (number - before.arrived) * self.gap_ns, now) if is_known else now
        after = samples[1]
        earliest = before.at if before.is_queued else max(before.at, after.last_at - 2 * self.pace_ns)
        spread = max(after.last_at - earliest, 0)
        share = (after.arrived - number) / (after.arrived - before.arrived)
        return after.last_at - int(spread * share)


def watch_server(earlier: list[int], *, sees_ends: bool) -> AcceptWaits | None:
    """Returns what follows the server that was made now; None where channelz is off. `earlier`: the ids before."""
    made = [server for server in list_servers(max(earlier, default=0) + 1) if server not in earlier]
    return AcceptWaits(made[0], sees_ends=sees_ends) if len(made) == 1 else None
