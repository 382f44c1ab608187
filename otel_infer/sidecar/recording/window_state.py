"""Keeps the events that left the window but without which those in it cannot be interpreted.

* Processes, engines and hooks.
* All events of requests that are still in flight. A request in several processes is kept with all its parts,
  or dropped with all of them.
* The steps of every engine since the keyframe before the oldest of these requests arrived, with their other
  members, as far as there is room. At least the steps since the last keyframe stay, because they define the
  current batch.
* Ended requests that are still in the batch of the first of these steps, or in a step that is not done. The
  prompt of an aborted request, for example, delays later requests.

A request that may have been in evicted steps is marked like a request whose steps were lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from otel_infer.ringbuffer import events
from otel_infer.sidecar.recording.packed_events import (
    AT_INDEX,
    EVENT_CODES,
    SPAN_ID_INDEX,
    EventRow,
    PackedSteps,
    RequestRows,
    StepSection,
    WindowStateSnapshot,
)

MAX_REQUEST_BYTES = 1 << 16
"""Bytes kept of one request; a request with more is dropped as a whole."""
MAX_STEPS_BYTES = 1 << 20
"""Bytes kept of one engine's steps."""
MAX_SECTIONS = 1024
"""Keyframes kept of one engine; there is about one per second."""
MAX_PAUSES = 256
"""Pauses kept of one process and cause, and marks of one kind."""
MAX_DROPPED_REQUESTS = 1024
"""Dropped requests are counted up to this number."""

RequestKey = tuple[int, int]
_NEVER = 1 << 63


class WindowState:
    """State built from the rows that leave the window, in their order.

    `size`: bytes held, at most about `limit`.
    """

    def __init__(self, limit: int) -> None:
        self.size = 0
        self._limit = limit
        self._process_rows: dict[EventRow, EventRow] = {}
        self._requests: dict[RequestKey, RequestRows] = {}
        self._dropped_requests: dict[RequestKey, bytes] = {}
        self._steps: dict[int, deque[StepSection]] = {}
        self._last_in_flight_step: dict[int, int] = {}
        """The last step in flight of each engine that has one."""
        self._pauses: dict[tuple[int, str], deque[EventRow]] = {}
        self._throttled_clock_rows: deque[EventRow] = deque(maxlen=MAX_PAUSES)
        self._handlers = {
            EVENT_CODES[kind]: handler
            for kind, handler in (
                (events.RequestArrived, self._handle_arrival),
                (events.LiveRecovered, self._handle_recovery),
                (events.RequestEnded, self._handle_end),
                (events.LiveListed, self._handle_live_list),
                (events.EventsLost, self._handle_events_lost),
                (events.StepScheduled, self._handle_step_scheduled),
                (events.StepDone, self._handle_step_done),
                (events.StepsLost, self._start_section),
                (events.PauseSeen, self._handle_pause_or_mark),
                (events.MarkSeen, self._handle_pause_or_mark),
                (events.GpuClocksThrottled, self._throttled_clock_rows.append),
                (events.ProcessSeen, self._store_process_row),
                (events.EngineSeen, self._store_process_row),
                (events.HooksReported, self._handle_hooks),
                (events.ProcessDied, self._handle_process_death),
            )
        }

    @property
    def dropped_requests(self) -> int:
        """Returns the number of requests in flight that were dropped for lack of room."""
        return len(set(self._dropped_requests.values()))

    def add_rows(self, rows: Iterable[EventRow]) -> None:
        """Adds the rows that leave the window."""
        handlers = self._handlers
        for row in rows:
            handler = handlers.get(row[2])
            if handler is not None:
                handler(row)
            elif (row[0], row[1]) in self._requests:
                self._add_row(row)

    def pack_and_evict(self) -> None:
        """Packs the new steps, evicts rows that are no longer necessary, and enforces the limit."""
        oldest = self._find_oldest_arrivals()
        for ring, sections in list(self._steps.items()):
            self.size += sum(section.pack_new_rows() for section in sections)
            needed = oldest.get(self._find_process(ring), _NEVER)
            while len(sections) > 1 and (sections[1].at <= needed or _exceeds_limits(sections)):
                self.size -= sections.popleft().size
            if _exceeds_limits(sections):
                self._mark_steps_lost(ring, sections[0].last_at)
        self._remove_ended_requests()
        while self.size > self._limit and self._evict_section():
            self._remove_ended_requests()
        self._drop_oldest_requests()

    def take_snapshot(self) -> WindowStateSnapshot:
        """Returns the state at this instant.

        It does little work, because the sidecar's reading thread calls it.
        """
        self.size += sum(section.pack_new_rows() for sections in self._steps.values() for section in sections)
        return WindowStateSnapshot(
            [*self._process_rows.values(), *self._find_needed_pauses()],
            [bytes(request.packed) for request in self._requests.values()],
            [
                PackedSteps(ring, [packed for section in sections for packed in section.packed])
                for ring, sections in self._steps.items()
            ],
        )

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _handle_arrival(self, row: EventRow) -> None:
        key = row[0], row[1]
        self._remove_request(key)
        self._dropped_requests.pop(key, None)
        self._requests[key] = RequestRows(row[AT_INDEX], row[SPAN_ID_INDEX])
        self._add_row(row)

    def _handle_recovery(self, row: EventRow) -> None:
        if (row[0], row[1]) not in self._requests:
            self._handle_arrival(row)

    def _handle_end(self, row: EventRow) -> None:
        key = row[0], row[1]
        request = self._requests.get(key)
        if request is not None:
            request.ended_at = row[AT_INDEX]
            self._add_row(row)
        self._dropped_requests.pop(key, None)

    def _add_row(self, row: EventRow) -> None:
        request = self._requests[row[0], row[1]]
        self.size += request.add_row(row)
        if len(request.packed) > MAX_REQUEST_BYTES:
            self._drop_requests({request.span_id})

    def _drop_requests(self, spans: set[bytes]) -> None:
        for key, request in [item for item in self._requests.items() if item[1].span_id in spans]:
            if not request.ended_at:
                self._dropped_requests[key] = request.span_id
            self._remove_request(key)
        while len(self._dropped_requests) > MAX_DROPPED_REQUESTS:
            del self._dropped_requests[next(iter(self._dropped_requests))]

    def _remove_request(self, key: RequestKey) -> None:
        request = self._requests.pop(key, None)
        self.size -= len(request.packed) if request is not None else 0

    def _drop_oldest_requests(self) -> None:
        """Drops the oldest requests until the rest fits the limit."""
        excess, dropped_spans = self.size - self._limit, set[bytes]()
        for request in self._requests.values():
            if excess <= 0:
                break
            dropped_spans.add(request.span_id)
            excess -= len(request.packed)
        if dropped_spans:
            self._drop_requests(dropped_spans)

    def _remove_ended_requests(self) -> None:
        """Removes ended requests that no kept step contains."""
        begin: dict[int, int] = {}
        needed: set[bytes] = set()
        for ring, sections in self._steps.items():
            process = self._find_process(ring)
            begin[process] = min(begin.get(process, _NEVER), sections[0].at)
            needed |= sections[0].ended_spans
        busy = {
            *self._find_oldest_arrivals(),
            *(self._find_process(ring) for ring in self._last_in_flight_step),
        }
        needed |= {
            request.span_id
            for (ring, _), request in self._requests.items()
            if not request.ended_at or (request.ended_at > begin.get(ring, _NEVER) and ring in busy)
        }
        for key in [key for key, request in self._requests.items() if request.span_id not in needed]:
            self._remove_request(key)

    def _find_oldest_arrivals(self) -> dict[int, int]:
        """Returns the arrival of the oldest request in flight, by process."""
        in_flight = {request.span_id for request in self._requests.values() if not request.ended_at}
        oldest: dict[int, int] = {}
        for (ring, _), request in self._requests.items():
            if request.span_id in in_flight:
                oldest[ring] = min(oldest.get(ring, _NEVER), request.arrived_at)
        return oldest

    def _handle_live_list(self, row: EventRow) -> None:
        living = set(row[AT_INDEX + 1])
        for key in [
            key
            for key in (*self._requests, *self._dropped_requests)
            if key[0] == row[0] and key[1] not in living
        ]:
            self._remove_request(key)
            self._dropped_requests.pop(key, None)

    def _handle_events_lost(self, row: EventRow) -> None:
        """Keeps that events were lost, which marks the requests in flight, but not how many."""
        self._process_rows[row[0], "lost"] = (*row[: AT_INDEX + 1], 0, 0)

    def _handle_pause_or_mark(self, row: EventRow) -> None:
        """Adds a pause or a mark; in both events the third field is the cause or kind."""
        self._pauses.setdefault((row[0], row[AT_INDEX + 2]), deque(maxlen=MAX_PAUSES)).append(row)

    def _find_needed_pauses(self) -> list[EventRow]:
        since = self._find_oldest_arrivals()
        begin = min(since.values(), default=_NEVER)
        return [row for row in self._throttled_clock_rows if row[AT_INDEX + 1] >= begin] + [
            row
            for (ring, _), pauses in self._pauses.items()
            for row in pauses
            if ring in since and row[AT_INDEX] > since[ring]
        ]

    # ── processes ────────────────────────────────────────────────────────────────────────────────────────────────

    def _store_process_row(self, row: EventRow) -> None:
        self._process_rows[row[0], row[2]] = row

    def _find_process(self, engine: int) -> int:
        seen = self._process_rows.get((engine, EVENT_CODES[events.EngineSeen]))
        return int(seen[AT_INDEX + 1]) if seen is not None else 0

    def _handle_hooks(self, row: EventRow) -> None:
        self._process_rows[row[0], row[2], row[AT_INDEX + 1]] = row

    def _handle_process_death(self, row: EventRow) -> None:
        ring = row[0]
        engine_seen = EVENT_CODES[events.EngineSeen]
        engines = [
            known[0]
            for known in self._process_rows.values()
            if known[2] == engine_seen and known[AT_INDEX + 1] == ring
        ]
        for engine in engines:
            self._remove_steps(engine)
        for key in [key for key in self._process_rows if key[0] == ring or key[0] in engines]:
            del self._process_rows[key]
        for request in [key for key in (*self._requests, *self._dropped_requests) if key[0] == ring]:
            self._remove_request(request)
            self._dropped_requests.pop(request, None)
        for pauses in [key for key in self._pauses if key[0] == ring]:
            del self._pauses[pauses]

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _handle_step_scheduled(self, row: EventRow) -> None:
        self._last_in_flight_step[row[0]] = row[AT_INDEX + 1]
        if not row[AT_INDEX + 2]:
            self._add_step(row)
            return
        self._start_section(row)
        process = self._find_process(row[0])
        members = [self._requests.get((process, handle)) for handle in row[AT_INDEX + 5]]
        self._steps[row[0]][-1].ended_spans = frozenset(
            request.span_id for request in members if request and request.ended_at
        )

    def _handle_step_done(self, row: EventRow) -> None:
        if row[AT_INDEX + 1] >= self._last_in_flight_step.get(row[0], 0):
            self._last_in_flight_step.pop(row[0], None)
        self._add_step(row)

    def _start_section(self, row: EventRow) -> None:
        section = StepSection(row[AT_INDEX])
        section.new_rows.append(row)
        self._steps.setdefault(row[0], deque()).append(section)

    def _add_step(self, row: EventRow) -> None:
        """Adds a step; without a known keyframe only the loss of steps is recorded."""
        sections = self._steps.get(row[0])
        if sections:
            sections[-1].new_rows.append(row)
        else:
            self._mark_steps_lost(row[0], row[AT_INDEX])

    def _mark_steps_lost(self, ring: int, at: int) -> None:
        """Replaces the engine's steps by a loss, which marks the requests in flight then."""
        self._remove_steps(ring)
        self._start_section((ring, 0, EVENT_CODES[events.StepsLost], at, 0))

    def _evict_section(self) -> bool:
        """Evicts the oldest section of all engines; returns False if the remaining ones are necessary."""
        several = [sections for sections in self._steps.values() if len(sections) > 1]
        if not several:
            return False
        self.size -= min(several, key=lambda sections: sections[0].at).popleft().size
        return True

    def _remove_steps(self, ring: int) -> None:
        self._last_in_flight_step.pop(ring, None)
        self.size -= sum(section.size for section in self._steps.pop(ring, ()))


def _exceeds_limits(sections: deque[StepSection]) -> bool:
    return len(sections) > MAX_SECTIONS or sum(section.size for section in sections) > MAX_STEPS_BYTES
