"""Turns recorded events into records. Pure: the same events give the same records; no clock, thread or I/O.

Events arrive in order of time. A request is identified by (ring of its process, handle), a step by (ring of its engine,
number). A request is concluded some time after its end, because another thread may record the step of its last token
later than the end. Events after that are ignored, however many are fed at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from otel_infer import semconv
from otel_infer.assembly import startup
from otel_infer.assembly.engine.step_log import EngineStepLog
from otel_infer.assembly.engine.step_rows import STEPS_PER_BATCH
from otel_infer.assembly.engine.types import StepRecord
from otel_infer.assembly.engine.warmup import StepKinds
from otel_infer.assembly.engine.workers import WorkerState
from otel_infer.assembly.gpu_clocks import GpuClocks, add_device_state
from otel_infer.assembly.pauses import Pauses
from otel_infer.assembly.process_state import ProcessState
from otel_infer.assembly.records.process import StartRecord
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.assembly.request_fragments import RequestFragments
from otel_infer.assembly.requests.call_costs import CallCosts
from otel_infer.assembly.requests.conclude import build_records, build_unrecorded_end
from otel_infer.assembly.requests.ended_requests import GRACE_NS, EndedRequests
from otel_infer.assembly.requests.open_request import HANDLERS, OpenRequest
from otel_infer.assembly.requests.shapes import ShapedRequest, find_shape
from otel_infer.assembly.startup import StartupTracker
from otel_infer.ringbuffer import events

log = logging.getLogger(__name__)

Key = tuple[int, int]


class Assembler:
    """Assembles events from `feed_events`; the `drain_…` methods return what is finished.

    `requests_seen`: opened here, not by an earlier reader. `finds_shapes`: ordinary ones are returned as `ShapedRequest`."""

    def __init__(self) -> None:
        self.open_requests: dict[Key, OpenRequest] = {}
        self.engines, self._seen_step_kinds = dict[int, EngineStepLog](), dict[tuple[int, str], StepKinds]()
        self._failed_kinds = set[type]()
        self.events_lost = self.events_torn = self.requests_seen = 0
        self.steps: list[StepRecord] = []
        self.workers, self.processes, self._clocks = WorkerState(), ProcessState(), GpuClocks()
        self._fragments, self.pauses, self._startups = RequestFragments(), Pauses(), StartupTracker()
        self._ended, self._call_costs = EndedRequests(), CallCosts()
        self._closed, self._closed_steps = list[OpenRequest](), 0
        self._ready: list[RequestRecord | ShapedRequest] = []
        self.finds_shapes, self._processed_until = False, dict[int, int]()
        self._handlers: dict[type, Callable[[int, int, Any], None]] = {
            events.RequestArrived: self._open_request,
            events.LiveRecovered: self._recover_request,
            events.RequestEnded: self._end_request,
            events.HooksReported: self.processes.set_hooks,
            events.WaitingSeen: self.processes.set_waiting,
            events.ServerBound: self.processes.set_address,
            events.HttpServed: self._add_untraced,
            events.PauseSeen: self._add_pause,
            events.MarkSeen: self._add_mark,
            events.StepExecuted: self._add_execution,
            events.StepTimed: self._add_execution,
            events.BlocksSized: lambda ring, handle, event: self.workers.set_block_size(event),
            events.GpuClocksThrottled: lambda ring, handle, event: self._clocks.add_reading(event),
            events.MemorySeen: lambda ring, handle, event: self.workers.set_memory(ring, event),
            events.StepScheduled: self._begin_step,
            events.StepDone: self._end_step,
            events.StepsLost: self._record_step_loss,
            events.EventsLost: self._record_event_loss,
            events.LiveListed: self._end_unlisted,
            events.ProcessSeen: self._add_process,
            events.EngineSeen: self._add_engine,
            events.ThreadSeen: self._add_thread_sample,
            events.ThreadRan: self.workers.add_thread_run,
            events.CpuSeen: self.processes.add_cpu_usage,
            events.CodeLocated: self.pauses.add_code_sample,
            events.HangSeen: self.processes.set_hang,
            events.ProcessDied: self._remove_process,
            **dict.fromkeys(startup.STARTUP_EVENTS, self._startups.apply_event),
            events.ProcessLeft: self._leave_process,
        }

    def feed_events(self, recorded: Iterable[events.RecordedEvent]) -> None:
        """Applies events, in order of time."""
        handlers, of_requests, open_requests = self._handlers, HANDLERS, self.open_requests
        for ring, handle, event in recorded:
            try:
                if event[0] > self._ended.due:  # its instant
                    self._close_due_requests(event[0] - 1)
                handler = handlers.get(type(event))
                if handler is not None:
                    handler(ring, handle, event)
                    continue
                request = open_requests.get((ring, handle)) or self._fragments.get((ring, handle))
                change = of_requests.get(type(event))
                if request is not None and change is not None:
                    change(request, event)
            except Exception:  # what one event holds must not keep the others from being applied
                self.events_torn += 1
                self._report_failed_event(type(event))

    def _report_failed_event(self, kind: type) -> None:
        if kind not in self._failed_kinds:  # the first of each kind is logged
            self._failed_kinds.add(kind)
            log.warning("%s was not applied; others are counted", kind.__name__, exc_info=True)

    def drain_records(self, horizon: int) -> list[RequestRecord]:
        """Returns the requests that ended so long before `horizon` (monotonic ns) that no event can follow."""
        return [ready for ready in self.drain_ready(horizon) if isinstance(ready, RequestRecord)]

    def drain_ready(self, horizon: int) -> list[RequestRecord | ShapedRequest]:
        """Returns what `drain_records` does, with ordinary requests in their place."""
        self._close_due_requests(horizon)
        self._build_records()
        ready, self._ready = self._ready, []
        return ready

    def drain_starts(self, horizon: int) -> list[StartRecord]:
        """Returns the starts that ended long enough before `horizon` (monotonic ns)."""
        return self._startups.drain_starts(horizon - GRACE_NS)

    def drain_steps(self) -> list[StepRecord]:
        """Returns the steps that were done since the last call."""
        steps, self.steps = self.steps, []
        return steps

    def oldest_open_arrival(self, horizon: int) -> int:
        """Returns when the oldest request that is not concluded arrived; `horizon` if there is none."""
        return min((request.arrived_at for request in self.open_requests.values()), default=horizon)

    def count_active(self) -> dict[str, int]:
        """Returns the requests in flight: `queued` (not scheduled yet) and `running`.

        Without a scheduler, all requests are running.
        """
        in_flight = [request for request in self.open_requests.values() if not request.ended_at]
        queued = [
            request for request in in_flight if not request.is_running and (self.engines or request.submitted)
        ]
        return {semconv.STATE_QUEUED: len(queued), semconv.STATE_RUNNING: len(in_flight) - len(queued)}

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────

    def _open_request(self, ring: int, handle: int, event: events.RequestArrived) -> None:
        if event.flags & events.JOINED:
            self._join_request(ring, handle, event.span_id)
            return
        before = self.open_requests.get((ring, handle))
        if before is not None and before.arrived.span_id == event.span_id:
            if before.ended is not None or not before.recovered:  # a duplicate
                return
        else:
            self.requests_seen += 1
            if before is not None:
                self._end_unobserved(before, event.at)
        request = self.open_requests[ring, handle] = OpenRequest(ring, handle, event)
        self._fragments.add_request(request)
        request.start_ids = self._startups.record_arrival(ring, event)
        if self.engines:
            self._mark_missed_steps(request, ring)

    def _join_request(self, ring: int, handle: int, span_id: bytes) -> None:
        request = self._fragments.join_request((ring, handle), span_id)
        if request is not None:
            self._mark_missed_steps(request, ring)

    def _mark_missed_steps(self, request: OpenRequest, ring: int) -> None:
        if any(engine.batch_unknown for engine in self.engines.values() if engine.process == ring):
            request.mark_steps_lost()

    def _recover_request(self, ring: int, handle: int, event: events.LiveRecovered) -> None:
        if event.flags & events.JOINED:
            self._join_request(ring, handle, event.span_id)
            return
        if (ring, handle) in self.open_requests:
            return
        flags = event.flags & ~events.OWN_SERVER_SPAN
        arrived = events.RequestArrived(
            *event[:5], server_span_id=bytes(8), flags=flags, operation="", provider="", model="", name=""
        )
        request = self.open_requests[ring, handle] = OpenRequest(ring, handle, arrived)
        self._fragments.add_request(request)
        self.requests_seen += 1
        request.recovered = True
        request.mark_events_lost()
        request.mark_steps_lost()

    def _end_request(self, ring: int, handle: int, event: events.RequestEnded) -> None:
        if event.outcome not in events.OUTCOME_NAMES:
            raise ValueError(f"unknown outcome {event.outcome}")
        request = self.open_requests.get((ring, handle))
        if request is not None:
            self._mark_ended(request, event)

    def _mark_ended(self, request: OpenRequest, event: events.RequestEnded) -> None:
        if request.ended is None:
            request.ended = event
            self._ended.add(request)

    def _end_unobserved(self, request: OpenRequest, at: int) -> None:
        """Ends a request whose end was not recorded. `at`: when that was noticed, perhaps long after the end."""
        if request.ended is None:
            request.mark_end_lost()
            self._mark_ended(request, build_unrecorded_end(at, events.OK, ""))

    def _close_due_requests(self, horizon: int) -> None:
        for request, due in self._ended.take_due(horizon):
            key = request.ring, request.handle
            if self.open_requests.get(key) is request:  # else the handle is in use by another request
                del self.open_requests[key]
            self._fragments.remove_request(request)
            if due <= self._processed_until.get(request.ring, 0):
                self.requests_seen -= 1
            else:
                request.close_at(due)
                if not request.runs:
                    request.cost_model = self._call_costs.learn_calls(request)
                self.processes.describe_target(request.ring, request.attributes)
                self.pauses.attach_to_request(request)
                self._closed.append(request)
                self._closed_steps += request.step_count
                if self._closed_steps >= STEPS_PER_BATCH:
                    self._build_records()

    def _build_records(self) -> None:
        closed, self._closed, self._closed_steps = self._closed, [], 0
        shaped: Sequence[ShapedRequest | None] = [None] * len(closed)
        if self.finds_shapes and not (self.workers.has_memory or self._clocks.has_readings):
            shaped = [find_shape(request) for request in closed]
        records = iter(build_records([request for request, shape in zip(closed, shaped) if shape is None]))
        for ordinary in shaped:
            self._ready.append(ordinary or add_device_state(next(records), self.workers, self._clocks))

    def _remove_process(self, ring: int, handle: int, event: events.ProcessDied) -> None:
        ending = build_unrecorded_end(event.at, events.ERROR, semconv.ERROR_PROCESS_DIED)
        for request in self._own_requests(ring):
            self._mark_ended(request, ending)
            self.pauses.attach_to_request(request)
        self._fragments.remove_process(ring)
        for number in [number for number, engine in self.engines.items() if engine.process == ring]:
            del self.engines[number]
        self.pauses.remove_process(ring)
        self.workers.remove_process(ring)
        self.processes.remove_process(ring)
        self._startups.remove_process(ring, event)
        for key in [key for key in self._seen_step_kinds if key[0] == ring]:
            del self._seen_step_kinds[key]

    def _end_unlisted(self, ring: int, handle: int, event: events.LiveListed) -> None:
        living = set(event.live)
        for request in self._own_requests(ring):
            if request.handle not in living:
                self._end_unobserved(request, event.at)

    def _record_event_loss(self, ring: int, handle: int, event: events.EventsLost) -> None:
        self.events_lost += event.lost
        self.events_torn += event.torn
        for request in self._requests_in(ring):
            request.mark_events_lost()

    def _own_requests(self, process: int) -> list[OpenRequest]:
        return [request for (ring, _), request in self.open_requests.items() if ring == process]

    def _requests_in(self, process: int) -> list[OpenRequest]:
        """Returns the requests of the process, and the requests that have a fragment in it."""
        return self._own_requests(process) + self._fragments.requests_in(process)

    def _add_pause(self, ring: int, handle: int, event: events.PauseSeen) -> None:
        is_new = event.at > self._processed_until.get(ring, 0) and not self._startups.is_startup_pause(
            ring, event
        )
        self.pauses.add_pause(ring, event, is_new)
        self._startups.apply_event(ring, handle, event)

    def _add_untraced(self, ring: int, handle: int, event: events.HttpServed) -> None:
        if event.at > self._processed_until.get(ring, 0):
            self.processes.add_untraced(event)

    def _add_mark(self, ring: int, handle: int, event: events.MarkSeen) -> None:
        self.pauses.add_mark(ring, event, is_new=event.at > self._processed_until.get(ring, 0))

    # ── processes ───────────────────────────────────────────────────────────────────────────────────────────

    def _add_process(self, ring: int, handle: int, event: events.ProcessSeen) -> None:
        self._processed_until[ring] = event.processed_until
        self.workers.add_process(ring, event.pid)
        self.processes.add_process(ring, event.role)
        self._startups.add_process(ring, event.pid, event.processed_until - GRACE_NS, event.role)
        self.pauses.add_process(ring, event)

    def _leave_process(self, ring: int, handle: int, event: events.ProcessLeft) -> None:
        self._startups.apply_event(ring, handle, event)
        self.processes.set_left(ring, event)

    def _add_engine(self, ring: int, handle: int, event: events.EngineSeen) -> None:
        open_requests, fragments, process = self.open_requests, self._fragments, event.process
        step_kinds = self._seen_step_kinds.setdefault((process, event.engine), StepKinds())
        engine = self.engines[ring] = EngineStepLog(
            event.engine,
            event.pid,
            process,
            lambda handle: open_requests.get((process, handle)) or fragments.get((process, handle)),
            step_kinds,
        )
        self.workers.add_engine(event, engine)

    def _add_thread_sample(self, ring: int, handle: int, event: events.ThreadSeen) -> None:
        if ring in self.engines:
            self.engines[ring].baseline.thread_delays.add_sample(event)

    # ── steps ───────────────────────────────────────────────────────────────────────────────────────────────

    def _begin_step(self, ring: int, handle: int, event: events.StepScheduled) -> None:
        engine = self.engines.get(ring)
        if engine is not None:
            self._startups.serving.add(engine.process)
            engine.begin_step(event)
            self.events_lost, engine.forgotten = self.events_lost + engine.forgotten, 0
            if engine.batch_unknown:
                self._mark_steps_lost(engine)

    def _end_step(self, ring: int, handle: int, event: events.StepDone) -> None:
        engine = self.engines.get(ring)
        if engine is not None:
            record = engine.end_step(event)
            if record is not None and event.at > self._processed_until.get(engine.process, 0):
                self.steps.append(record)

    def _add_execution(self, ring: int, handle: int, event: events.StepExecuted | events.StepTimed) -> None:
        self._startups.serving.add(ring)
        self.workers.add_execution(event, is_new=event.at > self._processed_until.get(ring, 0))

    def _record_step_loss(self, ring: int, handle: int, event: events.StepsLost) -> None:
        self.events_lost += event.lost
        engine = self.engines.get(ring)
        if engine is not None:
            engine.invalidate_batch()
            self._mark_steps_lost(engine)

    def _mark_steps_lost(self, engine: EngineStepLog) -> None:
        """Marks every request in flight, because each may have been in a step that is missing."""
        since, engine.first_gap_at = engine.first_gap_at, 0
        for request in self._requests_in(engine.process):
            request.mark_steps_lost(since)
