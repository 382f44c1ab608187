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
from otel_infer.assembly.engine.step_log import EngineStepLog
from otel_infer.assembly.engine.step_rows import STEPS_PER_BATCH
from otel_infer.assembly.engine.types import StepRecord
from otel_infer.assembly.engine.workers import WorkerState
from otel_infer.assembly.gpu_clocks import GpuClocks
from otel_infer.assembly.pauses import Pauses
from otel_infer.assembly.process_state import ProcessState
from otel_infer.assembly.records.process import Mark, Pause, StartRecord
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.assembly.request_fragments import RequestFragments
from otel_infer.assembly.requests.conclude import OpenRequest, build_records
from otel_infer.assembly.startup import StartupTracker
from otel_infer.ringbuffer import events

GRACE_NS = 300_000_000
"""How long an ended request waits for facts that were stated before its end and are read after it."""

Key = tuple[int, int]
_NEVER = 1 << 63


class Assembler:
    """Feed it facts; drain `started`, `concluded`, `drain_steps` and `drain_pauses`."""

    def __init__(self) -> None:
        self.open_requests: dict[Key, OpenRequest] = {}
        self.engines: dict[int, EngineStepLog] = {}
        self._seen_step_kinds: dict[tuple[int, str], set[int]] = {}
        self.events_lost = self.events_torn = 0
        self.steps: list[StepRecord] = []
        self.workers, self.processes, self._clocks = WorkerState(), ProcessState(), GpuClocks()
        self._fragments, self._pauses, self._startups = RequestFragments(), Pauses(), StartupTracker()
        self._ended: list[tuple[int, int, OpenRequest]] = []  # a heap: when it is due, a number of its own
        self._due, self._numbers = _NEVER, itertools.count()
        self._closed: list[OpenRequest] = []
        self._closed_steps = 0
        self._ready: list[RequestRecord] = []
        self._concluded_at: dict[int, int] = {}
        self._handlers: dict[type, Callable[[int, int, Any], None]] = {
            events.RequestArrived: self._open_request,
            events.LiveRecovered: self._recover_request,
            events.RequestEnded: self._end_request,
            events.HooksReported: self.processes.set_hooks,
            events.WaitingSeen: self.processes.set_waiting,
            events.PauseSeen: self._add_pause,
            events.MarkSeen: self._add_mark,
            events.StepExecuted: self._add_execution,
            events.StepTimed: self._add_execution,
            events.BlocksSized: lambda ring, handle, fact: self.workers.set_block_size(fact),
            events.GpuClocksThrottled: lambda ring, handle, fact: self._clocks.add_reading(fact),
            events.MemorySeen: lambda ring, handle, fact: self.workers.set_memory(ring, fact),
            events.StepScheduled: self._begin_step,
            events.StepDone: self._end_step,
            events.StepsLost: self._record_step_loss,
            events.EventsLost: self._record_event_loss,
            events.LiveListed: self._end_unlisted,
            events.ProcessSeen: self._add_process,
            events.EngineSeen: self._add_engine,
            events.ThreadSeen: self._add_thread_sample,
            events.ProcessDied: self._remove_process,
            **dict.fromkeys(startup.STARTUP_EVENTS, self._startups.apply_event),
        }

    def feed_events(self, said: Iterable[events.RecordedEvent]) -> None:
        """Takes facts in order of time."""
        handlers = self._handlers
        for ring, handle, fact in said:
            if fact.at > self._due:
                self._close_due_requests(fact.at - 1)
            handler = handlers.get(type(fact))
            if handler is not None:
                handler(ring, handle, fact)
                continue
            request = self.open_requests.get((ring, handle)) or self._fragments.get((ring, handle))
            if request is not None and not request.apply_event(fact):
                self.events_torn += 1

    def drain_records(self, horizon: int) -> list[RequestRecord]:
        """The requests that ended long enough before `horizon` (monotonic ns) that nothing more can come."""
        self._close_due_requests(horizon)
        self._build_records()
        ready, self._ready = self._ready, []
        return ready

    def drain_starts(self, horizon: int) -> list[StartRecord]:
        """The processes whose start was over long enough before `horizon` (monotonic ns)."""
        return self._startups.drain_starts(horizon - GRACE_NS)

    def drain_steps(self) -> list[StepRecord]:
        """The steps done since the last call."""
        steps, self.steps = self.steps, []
        return steps

    def oldest_open_arrival(self, horizon: int) -> int:
        """When the oldest request that is not concluded arrived; `horizon` if there is none."""
        return min((request.arrived_at for request in self.open_requests.values()), default=horizon)

    def drain_pauses(self) -> list[Pause]:
        """The pauses seen since the last call, of all processes, but for those that a start is made of."""
        return self._pauses.drain_pauses()

    def drain_marks(self) -> list[Mark]:
        """The marks seen since the last call, of all processes."""
        return self._pauses.drain_marks()

    def count_active(self) -> dict[str, int]:
        """How many requests are in flight, by `queued` (not scheduled yet) and `running`, as all are where nobody schedules."""
        in_flight = [request for request in self.open_requests.values() if not request.ended_at]
        queued = [one for one in in_flight if not one.is_running and (self.engines or one.submitted)]
        return {semconv.STATE_QUEUED: len(queued), semconv.STATE_RUNNING: len(in_flight) - len(queued)}

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _open_request(self, ring: int, handle: int, fact: events.RequestArrived) -> None:
        if fact.flags & events.JOINED:
            self._join_request(ring, handle, fact.span_id)
            return
        before = self.open_requests.get((ring, handle))
        if before is not None and before.arrived.span_id != fact.span_id:
            self._end_unobserved(before, fact.at)
        elif before is not None and (before.ended is not None or not before.recovered):  # told twice
            return
        request = self.open_requests[ring, handle] = OpenRequest(ring, handle, fact)
        self._fragments.add_request(request)
        request.start_ids = self._startups.record_arrival(ring, fact)
        self._mark_missed_steps(request, ring)

    def _join_request(self, ring: int, handle: int, span_id: bytes) -> None:
        request = self._fragments.join_request((ring, handle), span_id)
        if request is not None:
            self._mark_missed_steps(request, ring)

    def _mark_missed_steps(self, request: OpenRequest, ring: int) -> None:
        if any(engine.batch_unknown for engine in self.engines.values() if engine.process == ring):
            request.mark_steps_lost()

    def _recover_request(self, ring: int, handle: int, fact: events.LiveRecovered) -> None:
        if fact.flags & events.JOINED:
            self._join_request(ring, handle, fact.span_id)
            return
        if (ring, handle) in self.open_requests:
            return
        flags = fact.flags & ~events.OWN_SERVER_SPAN
        arrived = events.RequestArrived(*fact[:5], bytes(8), flags, "", "", "", "")
        request = self.open_requests[ring, handle] = OpenRequest(ring, handle, arrived)
        self._fragments.add_request(request)
        request.recovered = True
        request.mark_events_lost()
        request.mark_steps_lost()

    def _end_request(self, ring: int, handle: int, fact: events.RequestEnded) -> None:
        request = self.open_requests.get((ring, handle))
        if request is not None:
            self._mark_ended(request, fact)

    def _mark_ended(self, request: OpenRequest, fact: events.RequestEnded) -> None:
        if request.ended is None:
            request.ended = fact
            due = request.ended_at + GRACE_NS
            heapq.heappush(self._ended, (due, next(self._numbers), request))
            self._due = min(self._due, due)

    def _end_unobserved(self, request: OpenRequest, at: int) -> None:
        """It ended before this instant, which may be long after: when somebody looked."""
        if request.ended is None:
            request.mark_end_lost()
            self._mark_ended(request, events.RequestEnded(at, events.OK, "", 0, 0, 0, 0))

    def _close_due_requests(self, horizon: int) -> None:
        while self._due <= horizon:
            due, _, request = heapq.heappop(self._ended)
            key = request.ring, request.handle
            if self.open_requests.get(key) is request:  # or else the handle has been given to another
                del self.open_requests[key]
            self._fragments.remove_request(request)
            if due > self._concluded_at.get(request.ring, 0):
                request.close_at(due)
                self._pauses.attach_to_request(request)
                self._closed.append(request)
                self._closed_steps += request.step_count
                if self._closed_steps >= STEPS_PER_BATCH:
                    self._build_records()
            self._due = self._ended[0][0] if self._ended else _NEVER

    def _build_records(self) -> None:
        left, self._closed, self._closed_steps = self._closed, [], 0
        for record in build_records(left):
            free = self.workers.min_free_memory
            record.memory_free = free(record.arrived_at), free(record.first_token_at), free(record.ended_at)
            record.gpu_throttled, record.gpu_throttled_at = self._clocks.throttled_between(
                record.arrived_at, record.ended_at
            )
            self._ready.append(record)

    def _remove_process(self, ring: int, handle: int, fact: events.ProcessDied) -> None:
        died = events.RequestEnded(fact.at, events.ERROR, semconv.ERROR_PROCESS_DIED, 0, 0, 0, 0)
        for request in self._own_requests(ring):
            self._mark_ended(request, died)
            self._pauses.attach_to_request(request)
        self._fragments.remove_process(ring)
        for number in [number for number, engine in self.engines.items() if engine.process == ring]:
            del self.engines[number]
        self._pauses.remove_process(ring)
        self.workers.remove_process(ring)
        self.processes.remove_process(ring)
        self._startups.remove_process(ring, fact)
        for key in [key for key in self._seen_step_kinds if key[0] == ring]:
            del self._seen_step_kinds[key]

    def _end_unlisted(self, ring: int, handle: int, fact: events.LiveListed) -> None:
        living = set(fact.live)
        for request in self._own_requests(ring):
            if request.handle not in living:
                self._end_unobserved(request, fact.at)

    def _record_event_loss(self, ring: int, handle: int, fact: events.EventsLost) -> None:
        self.events_lost += fact.lost
        self.events_torn += fact.torn
        for request in self._requests_in(ring):
            request.mark_events_lost()

    def _own_requests(self, process: int) -> list[OpenRequest]:
        return [request for (ring, _), request in self.open_requests.items() if ring == process]

    def _requests_in(self, process: int) -> list[OpenRequest]:
        """Those that are its own, and parts of others'."""
        return self._own_requests(process) + self._fragments.requests_in(process)

    def _add_pause(self, ring: int, handle: int, fact: events.PauseSeen) -> None:
        is_new = fact.at > self._concluded_at.get(ring, 0) and not self._startups.is_startup_pause(ring, fact)
        self._pauses.add_pause(ring, fact, is_new)
        self._startups.apply_event(ring, handle, fact)

    def _add_mark(self, ring: int, handle: int, fact: events.MarkSeen) -> None:
        self._pauses.add_mark(ring, fact, is_new=fact.at > self._concluded_at.get(ring, 0))

    # ── processes ────────────────────────────────────────────────────────────────────────────────────────────────

    def _add_process(self, ring: int, handle: int, fact: events.ProcessSeen) -> None:
        self._concluded_at[ring] = fact.processed_until
        self.workers.add_process(ring, fact.pid)
        self._startups.add_process(ring, fact.pid, fact.processed_until - GRACE_NS, fact.role)
        self._pauses.add_process(ring, fact)

    def _add_engine(self, ring: int, handle: int, fact: events.EngineSeen) -> None:
        opened, parts, process = self.open_requests, self._fragments, fact.process
        seen = self._seen_step_kinds.setdefault((process, fact.engine), set())
        engine = self.engines[ring] = EngineStepLog(
            fact.engine,
            fact.pid,
            process,
            lambda handle: opened.get((process, handle)) or parts.get((process, handle)),
            seen,
        )
        self.workers.add_engine(fact, engine)

    def _add_thread_sample(self, ring: int, handle: int, fact: events.ThreadSeen) -> None:
        if ring in self.engines:
            self.engines[ring].baseline.thread_delays.add_sample(fact)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin_step(self, ring: int, handle: int, fact: events.StepScheduled) -> None:
        engine = self.engines.get(ring)
        if engine is not None:
            self._startups.serving.add(engine.process)
            engine.begin_step(fact)
            if engine.batch_unknown:
                self._mark_steps_lost(engine)

    def _end_step(self, ring: int, handle: int, fact: events.StepDone) -> None:
        engine = self.engines.get(ring)
        if engine is not None:
            record = engine.end_step(fact)
            if record is not None and fact.at > self._concluded_at.get(engine.process, 0):
                self.steps.append(record)

    def _add_execution(self, ring: int, handle: int, fact: events.StepExecuted | events.StepTimed) -> None:
        self._startups.serving.add(ring)
        self.workers.add_execution(fact, is_new=fact.at > self._concluded_at.get(ring, 0))

    def _record_step_loss(self, ring: int, handle: int, fact: events.StepsLost) -> None:
        self.events_lost += fact.lost
        engine = self.engines.get(ring)
        if engine is not None:
            engine.invalidate_batch()
            self._mark_steps_lost(engine)

    def _mark_steps_lost(self, engine: EngineStepLog) -> None:
        """Whoever is in flight may have been in a step that is missing."""
        since, engine.first_gap_at = engine.first_gap_at, 0
        for request in self._requests_in(engine.process):
            request.mark_steps_lost(since)
