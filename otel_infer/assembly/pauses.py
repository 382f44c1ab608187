"""Collects the pauses, marks and code samples of each process, and attaches them to the requests in it meanwhile. Pure."""

from __future__ import annotations

import itertools
from collections import deque
from operator import attrgetter
from typing import TYPE_CHECKING

from otel_infer import semconv
from otel_infer.assembly.records.process import Mark, Pause
from otel_infer.ringbuffer import events

if TYPE_CHECKING:
    from otel_infer.assembly.requests.conclude import OpenRequest

WORKER_ROLE = "worker"
"""The role of a process that executes the steps of an engine in another process."""
MAX_REMEMBERED = 1024
"""Pauses stored per process and cause, and marks per process. Frequent causes must not evict rare ones."""

_KNOWN_CAUSES = frozenset((*semconv.PAUSE_CAUSES, *semconv.EVENT_LOOP_CAUSES))
_BY_END, _BY_INSTANT = attrgetter("ended_at"), attrgetter("at")
_NO_PAUSES: dict[str, deque[Pause]] = {}


class Pauses:
    """Pauses and marks by the ring of their process. New ones are returned once by `drain_…`."""

    def __init__(self) -> None:
        self._pauses: dict[int, dict[str, deque[Pause]]] = {}
        self._marks: dict[int, deque[Mark]] = {}
        self._code_samples: dict[int, deque[tuple[int, events.CodeLocated]]] = {}
        self.stacks: dict[int, events.CodeLocated] = {}
        """The stacks of all threads, by the ring of a process that hangs; the latest."""
        self._new: list[Pause] = []
        self._new_marks: list[Mark] = []
        self._pids: dict[int, int] = {}
        self._parent_pids: dict[int, int] = {}

    def add_process(self, ring: int, event: events.ProcessSeen) -> None:
        """Adds a process. An engine waits for its worker in each step, so the parent of a worker is stored."""
        self._pids[ring] = event.pid
        if event.role == WORKER_ROLE:
            self._parent_pids[ring] = event.parent

    def add_pause(self, ring: int, event: events.PauseSeen, is_new: bool) -> None:
        """Adds a pause, in order of the ends: a garbage collection may be recorded late."""
        pause = Pause(event.started_at, event.at, event.cause)
        by_cause = self._pauses.setdefault(ring, {})
        kind = event.cause if event.cause in _KNOWN_CAUSES else semconv.CAUSE_PAUSE
        pauses = by_cause.setdefault(kind, deque(maxlen=MAX_REMEMBERED))
        is_late = bool(pauses) and pauses[-1].ended_at > pause.ended_at
        pauses.append(pause)
        if is_late:
            by_cause[kind] = deque(sorted(pauses, key=_BY_END), maxlen=MAX_REMEMBERED)
        if is_new:
            self._new.append(pause)

    def add_mark(self, ring: int, event: events.MarkSeen, is_new: bool) -> None:
        """Adds a mark."""
        mark = Mark(event.since, event.at, event.mark, event.times)
        self._marks.setdefault(ring, deque(maxlen=MAX_REMEMBERED)).append(mark)
        if is_new:
            self._new_marks.append(mark)

    def add_code_sample(self, ring: int, handle: int, event: events.CodeLocated) -> None:
        """Adds the code of a late thread. `handle`: the only request that it concerns; 0 = all in the process."""
        if event.stacks:
            self.stacks[ring] = event
        if event.function:
            self._code_samples.setdefault(ring, deque(maxlen=MAX_REMEMBERED)).append((handle, event))

    def attach_to_request(self, request: OpenRequest) -> None:
        """Sets the pauses, marks and code samples of a request, once.

        A process that died is removed before its requests are concluded.
        """
        request.pauses = request.pauses or self._find_pauses(request)
        request.marks = request.marks or self._find_marks(request)
        request.code_samples = request.code_samples or self._find_code_samples(request)

    def drain_pauses(self) -> list[Pause]:
        """Returns the new pauses since the last call."""
        pauses, self._new = self._new, []
        return pauses

    def drain_marks(self) -> list[Mark]:
        """Returns the new marks since the last call."""
        marks, self._new_marks = self._new_marks, []
        return marks

    def remove_process(self, ring: int) -> None:
        """Removes a process."""
        self._pauses.pop(ring, None)
        self._marks.pop(ring, None)
        self._code_samples.pop(ring, None)
        self.stacks.pop(ring, None)
        self._pids.pop(ring, None)
        self._parent_pids.pop(ring, None)

    def _find_pauses(self, request: OpenRequest) -> tuple[Pause, ...]:
        """Returns the pauses of the process that the request was in at the time.

        While other processes held its fragments, those processes and their workers count. Delays of the
        request's event loop count all the time, because that loop sends what arrives from other processes.
        """
        if not self._pauses:
            return ()
        begin, end = request.arrived_at, request.ended_at
        if not request.fragments or request.submitted is None:
            return tuple(self._pauses_between(request.ring, begin, end))
        submitted_at, finished_at = (
            request.submitted.at,
            min(max((event.at for event in request.finished), default=end), end),
        )
        locations = [(request.ring, begin, submitted_at), (request.ring, finished_at, end)]
        locations += [(ring, submitted_at, finished_at) for ring in self._remote_rings(request)]
        pauses = [
            Pause(max(pause.started_at, since), min(pause.ended_at, until), pause.cause)
            for ring, since, until in locations
            for pause in self._pauses_between(ring, since, until)
            if ring != request.ring or pause.cause not in semconv.EVENT_LOOP_CAUSES
        ]
        pauses += [
            pause
            for pause in self._pauses_between(request.ring, begin, end)
            if pause.cause in semconv.EVENT_LOOP_CAUSES
        ]
        # Throttling is recorded by each process of the cgroup, so duplicates are removed.
        return tuple(sorted(dict.fromkeys(pauses), key=_BY_END))

    def _remote_rings(self, request: OpenRequest) -> set[int]:
        """Returns the rings of its fragments and of their workers."""
        rings = set(dict(request.fragments))
        pids = {self._pids[ring] for ring in rings if ring in self._pids}
        return rings | {ring for ring, pid in self._parent_pids.items() if pid in pids}

    def _pauses_between(self, ring: int, begin: int, end: int) -> list[Pause]:
        overlapping: list[Pause] = []
        for pauses in self._pauses.get(ring, _NO_PAUSES).values():
            if pauses and pauses[-1].ended_at > begin:
                since = itertools.takewhile(lambda pause: pause.ended_at > begin, reversed(pauses))
                overlapping += [pause for pause in since if pause.started_at < end]
        return sorted(overlapping, key=_BY_END) if overlapping else overlapping

    def _find_marks(self, request: OpenRequest) -> tuple[Mark, ...]:
        """Returns the marks of its processes that may have happened during the request, in order of time."""
        if not self._marks:
            return ()
        begin, end = request.arrived_at, request.ended_at
        marks = [
            mark
            for ring in {request.ring, *self._remote_rings(request)}
            for mark in self._marks.get(ring, ())
            if mark.since < end and mark.at > begin
        ]
        return tuple(sorted(marks, key=_BY_INSTANT))

    def _find_code_samples(self, request: OpenRequest) -> tuple[events.CodeLocated, ...]:
        """Returns the code of the threads of its processes that were late during the request, in order of time."""
        if not self._code_samples:
            return ()
        own = {(request.ring, request.handle), *request.fragments}
        samples = [
            sample
            for ring in {request.ring, *self._remote_rings(request)}
            for handle, sample in self._code_samples.get(ring, ())
            if sample.since < request.ended_at
            and sample.at > request.arrived_at
            and (not handle or (ring, handle) in own)
        ]
        return tuple(sorted(samples))
