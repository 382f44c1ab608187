"""What held up each process of a server, and so the requests that were there meanwhile. Pure."""

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
"""The role of a process that does an engine's steps for it."""
MAX_REMEMBERED = 1024
"""Pauses of one process and cause, and marks of one process, that are remembered: what comes often must not push out the rest."""

_KNOWN_CAUSES = frozenset((*semconv.PAUSE_CAUSES, *semconv.EVENT_LOOP_CAUSES))
_BY_END = attrgetter("ended_at")
_NO_PAUSES: dict[str, deque[Pause]] = {}


class Pauses:
    """Pauses and marks by the ring of their process; of those that are new, everybody is told once."""

    def __init__(self) -> None:
        self._pauses: dict[int, dict[str, deque[Pause]]] = {}
        self._marks: dict[int, deque[Mark]] = {}
        self._new: list[Pause] = []
        self._new_marks: list[Mark] = []
        self._pids: dict[int, int] = {}
        self._parent_pids: dict[int, int] = {}

    def add_process(self, ring: int, fact: events.ProcessSeen) -> None:
        """A process is there; for a worker, the engine of the process that made it waits in each step."""
        self._pids[ring] = fact.pid
        if fact.role == WORKER_ROLE:
            self._parent_pids[ring] = fact.parent

    def add_pause(self, ring: int, fact: events.PauseSeen, is_new: bool) -> None:
        """Kept in order of their ends: of a collection it is said later that it was."""
        pause = Pause(fact.started_at, fact.at, fact.cause)
        of_all = self._pauses.setdefault(ring, {})
        kind = fact.cause if fact.cause in _KNOWN_CAUSES else semconv.CAUSE_PAUSE
        pauses = of_all.setdefault(kind, deque(maxlen=MAX_REMEMBERED))
        is_late = bool(pauses) and pauses[-1].ended_at > pause.ended_at
        pauses.append(pause)
        if is_late:
            of_all[kind] = deque(sorted(pauses, key=_BY_END), maxlen=MAX_REMEMBERED)
        if is_new:
            self._new.append(pause)

    def add_mark(self, ring: int, fact: events.MarkSeen, is_new: bool) -> None:
        """Something happened, so many times."""
        mark = Mark(fact.since, fact.at, fact.mark, fact.times)
        self._marks.setdefault(ring, deque(maxlen=MAX_REMEMBERED)).append(mark)
        if is_new:
            self._new_marks.append(mark)

    def attach_to_request(self, request: OpenRequest) -> None:
        """Gives the request what held it up, once: a process that died is forgotten before its requests are concluded."""
        request.pauses = request.pauses or self._find_pauses(request)
        request.marks = request.marks or self._find_marks(request)

    def drain_pauses(self) -> list[Pause]:
        """The new pauses since the last call."""
        pauses, self._new = self._new, []
        return pauses

    def drain_marks(self) -> list[Mark]:
        """The new marks since the last call."""
        marks, self._new_marks = self._new_marks, []
        return marks

    def remove_process(self, ring: int) -> None:
        """The process is gone."""
        self._pauses.pop(ring, None)
        self._marks.pop(ring, None)
        self._pids.pop(ring, None)
        self._parent_pids.pop(ring, None)

    def _find_pauses(self, request: OpenRequest) -> tuple[Pause, ...]:
        """Its own process, but for the time in which it was elsewhere; there, that process and its workers.

        Its own event loop all the time: that brings its reader what comes from elsewhere.
        """
        begin, end = request.arrived_at, request.ended_at
        if not request.fragments or request.submitted is None:
            return tuple(self._pauses_between(request.ring, begin, end))
        away, back = request.submitted.at, min(max((fact.at for fact in request.finished), default=end), end)
        stays = [(request.ring, begin, away), (request.ring, back, end)]
        stays += [(ring, away, back) for ring in self._remote_rings(request)]
        found = [
            Pause(max(pause.started_at, since), min(pause.ended_at, until), pause.cause)
            for ring, since, until in stays
            for pause in self._pauses_between(ring, since, until)
            if ring != request.ring or pause.cause not in semconv.EVENT_LOOP_CAUSES
        ]
        found += [
            pause
            for pause in self._pauses_between(request.ring, begin, end)
            if pause.cause in semconv.EVENT_LOOP_CAUSES
        ]
        # Throttling is told by each process of the group that it befell.
        return tuple(sorted(dict.fromkeys(found), key=_BY_END))

    def _remote_rings(self, request: OpenRequest) -> set[int]:
        """Where it has parts, and who works for those."""
        rings = set(dict(request.fragments))
        pids = {self._pids[ring] for ring in rings if ring in self._pids}
        return rings | {ring for ring, pid in self._parent_pids.items() if pid in pids}

    def _pauses_between(self, ring: int, begin: int, end: int) -> list[Pause]:
        found: list[Pause] = []
        for pauses in self._pauses.get(ring, _NO_PAUSES).values():
            since = itertools.takewhile(lambda pause: pause.ended_at > begin, reversed(pauses))
            found += [pause for pause in since if pause.started_at < end]
        return sorted(found, key=_BY_END)

    def _find_marks(self, request: OpenRequest) -> tuple[Mark, ...]:
        """What happened to its processes while it may have been there."""
        if not self._marks:
            return ()
        begin, end = request.arrived_at, request.ended_at
        found = [
            mark
            for ring in {request.ring, *self._remote_rings(request)}
            for mark in self._marks.get(ring, ())
        ]
        return tuple(mark for mark in found if mark.since < end and mark.at > begin)
