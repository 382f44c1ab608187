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

from otel_infer import semconv
from otel_infer.assembly import startup
from otel_infer.assembly.engine.step_log import StepLog
from otel_infer.assembly.engine.step_rows import TOGETHER
from otel_infer.assembly.engine.types import StepRecord
from otel_infer.assembly.engine.workers import Devices
from otel_infer.assembly.gpu_clocks import GpuClocks
from otel_infer.assembly.pauses import Pauses
from otel_infer.assembly.process_state import Processes
from otel_infer.assembly.records.process import Mark, Pause, StartRecord
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.assembly.request_fragments import Parts
from otel_infer.assembly.requests.conclude import Request, conclude
from otel_infer.assembly.startup import Starts
from otel_infer.ringbuffer import events

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
        self.devices, self.processes, self._clocks = Devices(), Processes(), GpuClocks()
        self._parts, self._pauses, self._starts = Parts(), Pauses(), Starts()
        self._ended: list[tuple[int, int, Request]] = []  # a heap: when it is due, a number of its own
        self._due, self._numbers = _NEVER, itertools.count()
        self._left: list[Request] = []
        self._steps_left = 0
        self._ready: list[RequestRecord] = []
        self._concluded_at: dict[int, int] = {}
        self._handlers: dict[type, Callable[[int, int, Any], None]] = {
            events.RequestArrived: self._arrived,
            events.LiveRecovered: self._recovered,
            events.RequestEnded: self._request_ended,
            events.HooksReported: self.processes.hooked,
            events.WaitingSeen: self.processes.waited,
            events.PauseSeen: self._paused,
            events.MarkSeen: self._marked,
            events.StepExecuted: self._worked,
            events.StepTimed: self._worked,
            events.BlocksSized: lambda ring, handle, fact: self.devices.sized(fact),
            events.GpuClocksThrottled: lambda ring, handle, fact: self._clocks.add_reading(fact),
            events.MemorySeen: lambda ring, handle, fact: self.devices.memory(ring, fact),
            events.StepScheduled: self._scheduled,
            events.StepDone: self._done,
            events.StepsLost: self._steps_lost,
            events.FactsLost: self._facts_lost,
            events.LiveListed: self._listed,
            events.ProcessSeen: self._process_seen,
            events.EngineSeen: self._engine_seen,
            events.ThreadSeen: self._thread_seen,
            events.ProcessDied: self._died,
            **dict.fromkeys(startup.FACTS, self._starts.take),
        }

    def feed(self, said: Iterable[events.RingFact]) -> None:
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

    def _arrived(self, ring: int, handle: int, fact: events.RequestArrived) -> None:
        if fact.flags & events.JOINED:
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

    def _recovered(self, ring: int, handle: int, fact: events.LiveRecovered) -> None:
        if fact.flags & events.JOINED:
            self._join(ring, handle, fact.span_id)
            return
        if (ring, handle) in self.open:
            return
        flags = fact.flags & ~events.OWN_SERVER_SPAN
        arrived = events.RequestArrived(*fact[:5], bytes(8), flags, "", "", "", "")
        request = self.open[ring, handle] = Request(ring, handle, arrived)
        self._parts.arrived(request)
        request.recovered = True
        request.lose_facts()
        request.lose_steps()

    def _request_ended(self, ring: int, handle: int, fact: events.RequestEnded) -> None:
        request = self.open.get((ring, handle))
        if request is not None:
            self._end(request, fact)

    def _end(self, request: Request, fact: events.RequestEnded) -> None:
        if request.ended is None:
            request.ended = fact
            due = request.ended_at + GRACE_NS
            heapq.heappush(self._ended, (due, next(self._numbers), request))
            self._due = min(self._due, due)

    def _end_unseen(self, request: Request, at: int) -> None:
        """It ended before this instant, which may be long after: when somebody looked."""
        if request.ended is None:
            request.lose_end()
            self._end(request, events.RequestEnded(at, events.OK, "", 0, 0, 0, 0))

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
            record.throttled, record.throttled_at = self._clocks.between(record.arrived_at, record.ended_at)
            self._ready.append(record)

    def _died(self, ring: int, handle: int, fact: events.ProcessDied) -> None:
        died = events.RequestEnded(fact.at, events.ERROR, semconv.ERROR_PROCESS_DIED, 0, 0, 0, 0)
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

    def _listed(self, ring: int, handle: int, fact: events.LiveListed) -> None:
        living = set(fact.live)
        for request in self._of(ring):
            if request.handle not in living:
                self._end_unseen(request, fact.at)

    def _facts_lost(self, ring: int, handle: int, fact: events.FactsLost) -> None:
        self.facts_lost += fact.lost
        self.facts_torn += fact.torn
        for request in self._in(ring):
            request.lose_facts()

    def _of(self, process: int) -> list[Request]:
        return [request for (ring, _), request in self.open.items() if ring == process]

    def _in(self, process: int) -> list[Request]:
        """Those that are its own, and parts of others'."""
        return self._of(process) + self._parts.of(process)

    def _paused(self, ring: int, handle: int, fact: events.PauseSeen) -> None:
        is_new = fact.at > self._concluded_at.get(ring, 0) and not self._starts.has(ring, fact)
        self._pauses.paused(ring, fact, is_new)
        self._starts.take(ring, handle, fact)

    def _marked(self, ring: int, handle: int, fact: events.MarkSeen) -> None:
        self._pauses.marked(ring, fact, is_new=fact.at > self._concluded_at.get(ring, 0))

    # ── processes ────────────────────────────────────────────────────────────────────────────────────────────────

    def _process_seen(self, ring: int, handle: int, fact: events.ProcessSeen) -> None:
        self._concluded_at[ring] = fact.concluded_at
        self.devices.process(ring, fact.pid)
        self._starts.seen(ring, fact.pid, fact.concluded_at - GRACE_NS, fact.role)
        self._pauses.seen(ring, fact)

    def _engine_seen(self, ring: int, handle: int, fact: events.EngineSeen) -> None:
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

    def _thread_seen(self, ring: int, handle: int, fact: events.ThreadSeen) -> None:
        if ring in self.engines:
            self.engines[ring].learned.strain.look(fact)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _scheduled(self, ring: int, handle: int, fact: events.StepScheduled) -> None:
        engine = self.engines.get(ring)
        if engine is not None:
            self._starts.serving.add(engine.process)
            engine.scheduled(fact)
            if engine.holed:
                self._mark_holed(engine)

    def _done(self, ring: int, handle: int, fact: events.StepDone) -> None:
        engine = self.engines.get(ring)
        if engine is not None:
            record = engine.done(fact)
            if record is not None and fact.at > self._concluded_at.get(engine.process, 0):
                self.steps.append(record)

    def _worked(self, ring: int, handle: int, fact: events.StepExecuted | events.StepTimed) -> None:
        self._starts.serving.add(ring)
        self.devices.worked(fact, is_new=fact.at > self._concluded_at.get(ring, 0))

    def _steps_lost(self, ring: int, handle: int, fact: events.StepsLost) -> None:
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
