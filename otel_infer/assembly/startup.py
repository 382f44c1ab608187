"""How one process got ready, from what was told of it. Pure.

    process began ─ imports ─ weights ─ compile, capture ─▶ ready (lifespan | engine | request)

It is ready when its application says so (the lifespan of an ASGI server). Where there is no such word, the first request
shows that it is; an engine that was started by then was ready as soon as that, and one in a process of its own always is. What the process asks of itself to warm up
is no request of that kind: behind an ASGI server only those count that came over HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otel_infer import semconv
from otel_infer.assembly.records.process import Phase, StartRecord
from otel_infer.ringbuffer import events

NO_SPAN_ID = bytes(8)

ASGI_SERVERS = ("uvicorn", "hypercorn")
"""What calls the lifespan of an application."""
ENGINES = ("vllm", "transformers", "torch")
"""Packages that a server is named after, if nothing else tells."""
MAX_PHASES = 1024
"""Phases of one start that are remembered."""


STARTUP_EVENTS = (
    events.ProcessStarted,
    events.ModuleImported,
    events.PhaseBegan,
    events.PhaseEnded,
    events.ProcessLeft,
)
"""What `Starts.take` takes, besides pauses."""


class StartupTracker:
    """The starts of all processes, by their rings."""

    def __init__(self) -> None:
        self._startups: dict[int, ProcessStartup] = {}
        self._processes: dict[int, tuple[int, int, str]] = {}
        self._finished: list[StartRecord] = []
        self.serving: set[int] = set()
        """Processes in which steps were seen: who should say that they are ready may never do. Those behind a server do, and what
        they do before is a warm-up."""

    def add_process(self, ring: int, pid: int, told_until: int, role: str) -> None:
        """A process is there; starts that were over by `told_until` were handed on by an earlier reader."""
        self._processes[ring] = pid, told_until, role

    def apply_event(self, ring: int, handle: int, fact: Any) -> None:
        """Takes what was told of a process."""
        start = self._startups.get(ring)
        if isinstance(fact, events.ProcessStarted):
            self._startups[ring] = ProcessStartup(fact, *self._processes.get(ring, (0, 0, "")))
        elif start is not None:
            start.apply_event(fact)

    def record_arrival(self, ring: int, fact: events.RequestArrived) -> tuple[bytes, bytes] | None:
        """Takes an arrival; trace and span id of the start if it is the first request that was served."""
        start = self._startups.get(ring)
        return start.ids if start is not None and start.record_arrival(fact) else None

    def is_startup_pause(self, ring: int, fact: events.PauseSeen) -> bool:
        """Whether this pause is a phase of a start that goes on."""
        start = self._startups.get(ring) if fact.cause in semconv.STARTUP_PAUSES else None
        return start is not None and start.is_ongoing and (start.behind_server or ring not in self.serving)

    def remove_process(self, ring: int, fact: events.ProcessDied) -> None:
        """The process is gone, and nothing more will be told of it."""
        start = self._startups.pop(ring, None)
        self.serving.discard(ring)
        if start is not None:
            start.apply_event(fact)
            self._finished += start.take_record(start.ended_at)

    def drain_starts(self, horizon: int) -> list[StartRecord]:
        """Those that were over by `horizon`, once each."""
        over, self._finished = self._finished, []
        return over + [record for start in self._startups.values() for record in start.take_record(horizon)]


class ProcessStartup:
    """The start of one process. `ended_at` 0: it goes on. `behind_server`: of its application, which says when it is ready."""

    def __init__(self, began: events.ProcessStarted, pid: int, told_until: int, role: str) -> None:
        self._start_event, self._pid, self._reported_until, self._role = began, pid, told_until, role
        self._parent = b"" if began.parent_span_id == NO_SPAN_ID else began.parent_span_id
        self._imports: list[tuple[int, str]] = []
        self._phases: list[Phase] = []
        self._open_phases: list[events.PhaseBegan] = []
        self._engine = self._ready_by = self._error_type = ""
        self.behind_server = self._abandoned = False
        self._engine_ready_at = 0
        self.ended_at = 0
        self._is_reported = self._is_served = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            events.ModuleImported: self._add_import,
            events.PhaseBegan: self._begin_phase,
            events.PhaseEnded: self._end_phase,
            events.PauseSeen: self._add_pause,
            events.ProcessLeft: self._end_on_exit,
            events.ProcessDied: self._end_on_death,
        }

    @property
    def ids(self) -> tuple[bytes, bytes]:
        """Trace and span id."""
        return self._start_event.trace_id, self._start_event.span_id

    @property
    def is_ongoing(self) -> bool:
        """Whether it is not ready, as far as is known by now."""
        return not self.ended_at and (self.behind_server or not self._engine_ready_at)

    def apply_event(self, fact: Any) -> None:
        """Takes what was told of the process; what comes after the start is no part of it."""
        if not self.ended_at:
            self._handlers[type(fact)](fact)

    def record_arrival(self, fact: events.RequestArrived) -> bool:
        """Takes an arrival; whether it is the first request that was served."""
        if self._is_served or self._abandoned or (self.behind_server and fact.operation):
            return False
        self._is_served = True
        if not self.ended_at and not self._end_if_engine_ready():
            self._set_end(fact.at, events.BY_REQUEST)
        return True

    def take_record(self, horizon: int) -> list[StartRecord]:
        """What is to be told of it once it was over by `horizon`: nothing of what was no server, or was told before."""
        if self._is_reported or not 0 < self.ended_at <= horizon:
            return []
        self._is_reported = True
        return [] if self._abandoned or self.ended_at <= self._reported_until else [self._build_record()]

    def _build_record(self) -> StartRecord:
        inside = [phase for phase in self._phases if phase.ended_at <= self.ended_at]
        begun = [phase.started_at for phase in inside if phase.name in (events.WEIGHTS, events.READY)]
        until = min([self.ended_at, *begun, *(fact.at for fact in self._open_phases)])
        imported = [(at, name) for at, name in self._imports if self._start_event.at < at <= until]
        if imported:
            inside.append(Phase(semconv.SPAN_IMPORTS, self._start_event.at, max(imported)[0]))
        last_of_each = {name: at for at, name in sorted(imported)}
        return StartRecord(
            *self.ids,
            self._pid,
            self._start_event.at,
            self.ended_at,
            self._start_event.wall_at - self._start_event.at,
            tuple(sorted(inside, key=lambda phase: (phase.started_at, -phase.ended_at))),
            tuple((at, name) for name, at in last_of_each.items()),
            self._engine or self._find_imported_engine(),
            self._ready_by,
            self._error_type,
            self._find_failed_phase() if self._error_type else "",
            self._role,
            self._parent,
        )

    # ── what was told ────────────────────────────────────────────────────────────────────────────────────────────

    def _add_import(self, fact: events.ModuleImported) -> None:
        package = fact.module.partition(".")[0]
        self._imports.append((fact.at, package))
        self.behind_server = self.behind_server or package in ASGI_SERVERS

    def _begin_phase(self, fact: events.PhaseBegan) -> None:
        self._open_phases.append(fact)
        self.behind_server = self.behind_server or fact.phase == events.READY

    def _end_phase(self, fact: events.PhaseEnded) -> None:
        begun = events.PhaseBegan(fact.started_at, fact.phase)
        if begun in self._open_phases:
            self._open_phases.remove(begun)
        if len(self._phases) < MAX_PHASES and fact.started_at < fact.at:
            self._phases.append(Phase(fact.phase, fact.started_at, fact.at, fact.model, fact.error_type))
        if fact.phase == events.WEIGHTS:
            self._engine = self._engine or fact.by
        elif fact.phase != events.READY:
            return
        elif fact.by == events.BY_ENGINE and not self._parent:
            self._engine_ready_at = self._engine_ready_at or fact.at
        else:
            self._set_end(fact.at, "" if fact.error_type else fact.by, fact.error_type)

    def _add_pause(self, fact: events.PauseSeen) -> None:
        if fact.cause in semconv.STARTUP_PAUSES and len(self._phases) < MAX_PHASES:
            self._phases.append(Phase(fact.cause, fact.started_at, fact.at))

    # ── how it ends ──────────────────────────────────────────────────────────────────────────────────────────────

    def _set_end(self, at: int, ready_by: str, error_type: str = "") -> None:
        self.ended_at, self._ready_by, self._error_type = at, ready_by, error_type

    def _end_if_engine_ready(self) -> bool:
        """Whether an engine was started, which is the best that is known where nobody says more."""
        at = 0 if self.behind_server else self._engine_ready_at
        if at:
            self._set_end(at, events.BY_ENGINE)
        return bool(at)

    def _end_on_exit(self, fact: events.ProcessLeft) -> None:
        """Whoever leaves in order, without having failed at anything, was a script and no server."""
        if not self._end_if_engine_ready():
            failed = self._last_failed_phase()
            error_type = fact.error_type or (failed.error_type if failed else "")
            self._abandoned = not error_type
            self._set_end(fact.at, "", error_type)

    def _end_on_death(self, fact: events.ProcessDied) -> None:
        """It may have been anything, unless it was seen to get ready."""
        if not self._end_if_engine_ready():
            self._abandoned = not (self._phases or self._open_phases)
            self._set_end(fact.at, "", semconv.ERROR_PROCESS_DIED)

    def _last_failed_phase(self) -> Phase | None:
        """The last phase that failed."""
        return next((phase for phase in reversed(self._phases) if phase.error_type), None)

    def _find_failed_phase(self) -> str:
        """The phase that it was in at the end, or else the one that failed."""
        failed = self._last_failed_phase()
        return self._open_phases[-1].phase if self._open_phases else failed.name if failed else ""

    def _find_imported_engine(self) -> str:
        names = {name for _, name in self._imports}
        return next((engine for engine in ENGINES if engine in names), "")
