"""Facts in, records out. Pure: no clock, thread, I/O or OpenTelemetry; the same facts give the same records anywhere.

Facts come ordered by time. Requests are known by (ring of their process, handle), steps by (ring of their engine, number).
A request is concluded a little after its end, because the step that held its last token may be told later than the end
that another thread saw; what is told later than that is not taken, however much is fed at once.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import Any

from otel_infer import facts, semconv, startup
from otel_infer.conclusion import Request, conclude
from otel_infer.devices import Devices
from otel_infer.parts import Parts
from otel_infer.pauses import Pauses
from otel_infer.processes import Processes
from otel_infer.records import Mark, Pause, RequestRecord, StartRecord, StepRecord
from otel_infer.startup import Starts
from otel_infer.steplog import StepLog
from otel_infer.steprows import TOGETHER

GRACE_NS = 300_000_000
"""How long an ended request waits for facts that were stated before its end and are read after it."""

Key = tuple[int, int]
_NEVER = 1 << 63


class Assembler:
    """Feed it facts; drain `started`, `concluded`, `drain_steps` and `drain_pauses`."""

    def __init__(self) -> None:
        self.open: dict[Key, Request] = {}
        self.engines: dict[int, StepLog] = {}
        self._seen_steps: dict[tuple[int, str], set[int]] = {}
        self.facts_lost = self.facts_torn = 0
        self.steps: list[StepRecord] = []
        self.devices, self.processes = Devices(), Processes()
        self._parts, self._pauses, self._starts = Parts(), Pauses(), Starts()
        self._ended: list[tuple[int, int, Request]] = []  # a heap: when it is due, a number of its own
        self._due, self._numbers = _NEVER, itertools.count()
        self._left: list[Request] = []
        self._steps_left = 0
        self._ready: list[RequestRecord] = []
        self._concluded_at: dict[int, int] = {}
        self._handlers: dict[type, Callable[[int, int, Any], None]] = {
            facts.RequestArrived: self._arrived,
            facts.LiveRecovered: self._recovered,
            facts.RequestEnded: self._request_ended,
            facts.HooksReported: self.processes.hooked,
            facts.WaitingSeen: self.processes.waited,
            facts.PauseSeen: self._paused,
            facts.MarkSeen: self._marked,
            facts.StepExecuted: self._worked,
            facts.StepTimed: self._worked,
            facts.BlocksSized: lambda ring, handle, fact: self.devices.sized(fact),
            facts.MemorySeen: lambda ring, handle, fact: self.devices.memory(ring, fact),
            facts.StepScheduled: self._scheduled,
            facts.StepDone: self._done,
            facts.StepsLost: self._steps_lost,
            facts.FactsLost: self._facts_lost,
            facts.LiveListed: self._listed,
            facts.ProcessSeen: self._process_seen,
            facts.EngineSeen: self._engine_seen,
            facts.ThreadSeen: self._thread_seen,
            facts.ProcessDied: self._died,
            **dict.fromkeys(startup.FACTS, self._starts.take),
        }

    def feed(self, said: Iterable[facts.RingFact]) -> None:
        """Takes facts in order of time."""
        handlers = self._handlers
        for ring, handle, fact in said:
            if fact.at > self._due:
                self._settle(fact.at - 1)
            handler = handlers.get(type(fact))
            if handler is not None:
                handler(ring, handle, fact)
                continue
            request = self.open.get((ring, handle)) or self._parts.get((ring, handle))
            if request is not None and not request.take(fact):
                self.facts_torn += 1

    def concluded(self, horizon: int) -> list[RequestRecord]:
        """The requests that ended long enough before `horizon` (monotonic ns) that nothing more can come."""
        self._settle(horizon)
        self._conclude()
        ready, self._ready = self._ready, []
        return ready

    def started(self, horizon: int) -> list[StartRecord]:
        """The processes whose start was over long enough before `horizon` (monotonic ns)."""
        return self._starts.concluded(horizon - GRACE_NS)

    def drain_steps(self) -> list[StepRecord]:
        """The steps done since the last call."""
        steps, self.steps = self.steps, []
        return steps

    def oldest_live(self, horizon: int) -> int:
        """When the oldest request that is not concluded arrived; `horizon` if there is none."""
        return min((request.arrived_at for request in self.open.values()), default=horizon)

    def drain_pauses(self) -> list[Pause]:
        """The pauses seen since the last call, of all processes, but for those that a start is made of."""
        return self._pauses.drain()

    def drain_marks(self) -> list[Mark]:
        """The marks seen since the last call, of all processes."""
        return self._pauses.drain_marks()

    def active(self) -> dict[str, int]:
        """How many requests are in flight, by `queued` (not scheduled yet) and `running`, as all are where nobody schedules."""
        in_flight = [request for request in self.open.values() if not request.ended_at]
        queued = [one for one in in_flight if not one.is_running and (self.engines or one.submitted)]
        return {semconv.STATE_QUEUED: len(queued), semconv.STATE_RUNNING: len(in_flight) - len(queued)}

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _arrived(self, ring: int, handle: int, fact: facts.RequestArrived) -> None:
        if fact.flags & facts.JOINED:
            self._join(ring, handle, fact.span_id)
            return
        before = self.open.get((ring, handle))
        if before is not None and before.arrived.span_id != fact.span_id:
            self._end_unseen(before, fact.at)
        elif before is not None and (before.ended is not None or not before.recovered):  # told twice
            return
        request = self.open[ring, handle] = Request(ring, handle, fact)
        self._parts.arrived(request)
        request.start = self._starts.arrived(ring, fact)
        self._miss_steps(request, ring)

    def _join(self, ring: int, handle: int, span_id: bytes) -> None:
        request = self._parts.join((ring, handle), span_id)
        if request is not None:
            self._miss_steps(request, ring)

    def _miss_steps(self, request: Request, ring: int) -> None:
        if any(engine.holed for engine in self.engines.values() if engine.process == ring):
            request.lose_steps()

    def _recovered(self, ring: int, handle: int, fact: facts.LiveRecovered) -> None:
        if fact.flags & facts.JOINED:
            self._join(ring, handle, fact.span_id)
            return
        if (ring, handle) in self.open:
            return
        flags = fact.flags & ~facts.OWN_SERVER_SPAN
        arrived = facts.RequestArrived(*fact[:5], bytes(8), flags, "", "", "", "")
        request = self.open[ring, handle] = Request(ring, handle, arrived)
        self._parts.arrived(request)
        request.recovered = True
        request.lose_facts()
        request.lose_steps()

    def _request_ended(self, ring: int, handle: int, fact: facts.RequestEnded) -> None:
        request = self.open.get((ring, handle))
        if request is not None:
            self._end(request, fact)

    def _end(self, request: Request, fact: facts.RequestEnded) -> None:
        if request.ended is None:
            request.ended = fact
            due = request.ended_at + GRACE_NS
            heapq.heappush(self._ended, (due, next(self._numbers), request))
            self._due = min(self._due, due)

    def _end_unseen(self, request: Request, at: int) -> None:
        """It ended before this instant, which may be long after: when somebody looked."""
        if request.ended is None:
            request.lose_end()
            self._end(request, facts.RequestEnded(at, facts.OK, "", 0, 0, 0, 0))

    def _settle(self, horizon: int) -> None:
        while self._due <= horizon:
            due, _, request = heapq.heappop(self._ended)
            key = request.ring, request.handle
            if self.open.get(key) is request:  # or else the handle has been given to another
                del self.open[key]
            self._parts.left(request)
            if due > self._concluded_at.get(request.ring, 0):
                request.leave(due)
                self._pauses.tell(request)
                self._left.append(request)
                self._steps_left += request.steps
                if self._steps_left >= TOGETHER:
                    self._conclude()
            self._due = self._ended[0][0] if self._ended else _NEVER

    def _conclude(self) -> None:
        left, self._left, self._steps_left = self._left, [], 0
        for record in conclude(left):
            free = self.devices.least_free
            record.memory_free = free(record.arrived_at), free(record.first_token_at), free(record.ended_at)
            self._ready.append(record)

    def _died(self, ring: int, handle: int, fact: facts.ProcessDied) -> None:
        died = facts.RequestEnded(fact.at, facts.ERROR, semconv.ERROR_PROCESS_DIED, 0, 0, 0, 0)
        for request in self._of(ring):
            self._end(request, died)
            self._pauses.tell(request)
        self._parts.died(ring)
        for number in [number for number, engine in self.engines.items() if engine.process == ring]:
            del self.engines[number]
        self._pauses.died(ring)
        self.devices.died(ring)
        self.processes.died(ring)
        self._starts.died(ring, fact)
        for key in [key for key in self._seen_steps if key[0] == ring]:
            del self._seen_steps[key]

    def _listed(self, ring: int, handle: int, fact: facts.LiveListed) -> None:
        living = set(fact.live)
        for request in self._of(ring):
            if request.handle not in living:
                self._end_unseen(request, fact.at)

    def _facts_lost(self, ring: int, handle: int, fact: facts.FactsLost) -> None:
        self.facts_lost += fact.lost
        self.facts_torn += fact.torn
        for request in self._in(ring):
            request.lose_facts()

    def _of(self, process: int) -> list[Request]:
        return [request for (ring, _), request in self.open.items() if ring == process]

    def _in(self, process: int) -> list[Request]:
        """Those that are its own, and parts of others'."""
        return self._of(process) + self._parts.of(process)

    def _paused(self, ring: int, handle: int, fact: facts.PauseSeen) -> None:
        is_new = fact.at > self._concluded_at.get(ring, 0) and not self._starts.has(ring, fact)
        self._pauses.paused(ring, fact, is_new)
        self._starts.take(ring, handle, fact)

    def _marked(self, ring: int, handle: int, fact: facts.MarkSeen) -> None:
        self._pauses.marked(ring, fact, is_new=fact.at > self._concluded_at.get(ring, 0))

    # ── processes ────────────────────────────────────────────────────────────────────────────────────────────────

    def _process_seen(self, ring: int, handle: int, fact: facts.ProcessSeen) -> None:
        self._concluded_at[ring] = fact.concluded_at
        self.devices.process(ring, fact.pid)
        self._starts.seen(ring, fact.pid, fact.concluded_at - GRACE_NS, fact.role)
        self._pauses.seen(ring, fact)

    def _engine_seen(self, ring: int, handle: int, fact: facts.EngineSeen) -> None:
        opened, parts, process = self.open, self._parts, fact.process
        seen = self._seen_steps.setdefault((process, fact.engine), set())
        engine = self.engines[ring] = StepLog(
            fact.engine,
            fact.pid,
            process,
            lambda handle: opened.get((process, handle)) or parts.get((process, handle)),
            seen,
        )
        self.devices.engine(fact, engine)

    def _thread_seen(self, ring: int, handle: int, fact: facts.ThreadSeen) -> None:
        if ring in self.engines:
            self.engines[ring].learned.strain.look(fact)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _scheduled(self, ring: int, handle: int, fact: facts.StepScheduled) -> None:
        engine = self.engines.get(ring)
        if engine is not None:
            self._starts.serving.add(engine.process)
            engine.scheduled(fact)
            if engine.holed:
                self._mark_holed(engine)

    def _done(self, ring: int, handle: int, fact: facts.StepDone) -> None:
        engine = self.engines.get(ring)
        if engine is not None:
            record = engine.done(fact)
            if record is not None and fact.at > self._concluded_at.get(engine.process, 0):
                self.steps.append(record)

    def _worked(self, ring: int, handle: int, fact: facts.StepExecuted | facts.StepTimed) -> None:
        self._starts.serving.add(ring)
        self.devices.worked(fact, is_new=fact.at > self._concluded_at.get(ring, 0))

    def _steps_lost(self, ring: int, handle: int, fact: facts.StepsLost) -> None:
        self.facts_lost += fact.lost
        engine = self.engines.get(ring)
        if engine is not None:
            engine.lost()
            self._mark_holed(engine)

    def _mark_holed(self, engine: StepLog) -> None:
        """Whoever is in flight may have been in a step that is missing."""
        since, engine.gap_at = engine.gap_at, 0
        for request in self._in(engine.process):
            request.lose_steps(since)
