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

NOBODY = bytes(8)

SERVERS = ("uvicorn", "hypercorn")
"""What calls the lifespan of an application."""
ENGINES = ("vllm", "transformers", "torch")
"""Packages that a server is named after, if nothing else tells."""
MOST = 1024
"""Phases of one start that are remembered."""


FACTS = (
    events.ProcessStarted,
    events.ModuleImported,
    events.PhaseBegan,
    events.PhaseEnded,
    events.ProcessLeft,
)
"""What `Starts.take` takes, besides pauses."""


class Starts:
    """The starts of all processes, by their rings."""

    def __init__(self) -> None:
        self._of: dict[int, Start] = {}
        self._seen: dict[int, tuple[int, int, str]] = {}
        self._over: list[StartRecord] = []
        self.serving: set[int] = set()
        """Processes in which steps were seen: who should say that they are ready may never do. Those behind a server do, and what
        they do before is a warm-up."""

    def seen(self, ring: int, pid: int, told_until: int, role: str) -> None:
        """A process is there; starts that were over by `told_until` were handed on by an earlier reader."""
        self._seen[ring] = pid, told_until, role

    def take(self, ring: int, handle: int, fact: Any) -> None:
        """Takes what was told of a process."""
        start = self._of.get(ring)
        if isinstance(fact, events.ProcessStarted):
            self._of[ring] = Start(fact, *self._seen.get(ring, (0, 0, "")))
        elif start is not None:
            start.take(fact)

    def arrived(self, ring: int, fact: events.RequestArrived) -> tuple[bytes, bytes] | None:
        """Takes an arrival; trace and span id of the start if it is the first request that was served."""
        start = self._of.get(ring)
        return start.ids if start is not None and start.arrived(fact) else None

    def has(self, ring: int, fact: events.PauseSeen) -> bool:
        """Whether this pause is a phase of a start that goes on."""
        start = self._of.get(ring) if fact.cause in semconv.STARTUP_PAUSES else None
        return start is not None and start.goes_on and (start.behind_server or ring not in self.serving)

    def died(self, ring: int, fact: events.ProcessDied) -> None:
        """The process is gone, and nothing more will be told of it."""
        start = self._of.pop(ring, None)
        self.serving.discard(ring)
        if start is not None:
            start.take(fact)
            self._over += start.concluded(start.ended_at)

    def concluded(self, horizon: int) -> list[StartRecord]:
        """Those that were over by `horizon`, once each."""
        over, self._over = self._over, []
        return over + [record for start in self._of.values() for record in start.concluded(horizon)]


class Start:
    """The start of one process. `ended_at` 0: it goes on. `behind_server`: of its application, which says when it is ready."""

    def __init__(self, began: events.ProcessStarted, pid: int, told_until: int, role: str) -> None:
        self._began, self._pid, self._told_until, self._role = began, pid, told_until, role
        self._parent = b"" if began.parent_span_id == NOBODY else began.parent_span_id
        self._imports: list[tuple[int, str]] = []
        self._phases: list[Phase] = []
        self._open: list[events.PhaseBegan] = []
        self._engine = self._ready_by = self._error_type = ""
        self.behind_server = self._abandoned = False
        self._engine_ready_at = 0
        self.ended_at = 0
        self._is_told = self._is_served = False
        self._takes: dict[type, Callable[[Any], None]] = {
            events.ModuleImported: self._imported,
            events.PhaseBegan: self._phase_began,
            events.PhaseEnded: self._phase_ended,
            events.PauseSeen: self._paused,
            events.ProcessLeft: self._left,
            events.ProcessDied: self._died,
        }

    @property
    def ids(self) -> tuple[bytes, bytes]:
        """Trace and span id."""
        return self._began.trace_id, self._began.span_id

    @property
    def goes_on(self) -> bool:
        """Whether it is not ready, as far as is known by now."""
        return not self.ended_at and (self.behind_server or not self._engine_ready_at)

    def take(self, fact: Any) -> None:
        """Takes what was told of the process; what comes after the start is no part of it."""
        if not self.ended_at:
            self._takes[type(fact)](fact)

    def arrived(self, fact: events.RequestArrived) -> bool:
        """Takes an arrival; whether it is the first request that was served."""
        if self._is_served or self._abandoned or (self.behind_server and fact.operation):
            return False
        self._is_served = True
        if not self.ended_at and not self._was_ready():
            self._end(fact.at, events.BY_REQUEST)
        return True

    def concluded(self, horizon: int) -> list[StartRecord]:
        """What is to be told of it once it was over by `horizon`: nothing of what was no server, or was told before."""
        if self._is_told or not 0 < self.ended_at <= horizon:
            return []
        self._is_told = True
        return [] if self._abandoned or self.ended_at <= self._told_until else [self._record()]

    def _record(self) -> StartRecord:
        inside = [phase for phase in self._phases if phase.ended_at <= self.ended_at]
        begun = [phase.started_at for phase in inside if phase.name in (events.WEIGHTS, events.READY)]
        until = min([self.ended_at, *begun, *(fact.at for fact in self._open)])
        imported = [(at, name) for at, name in self._imports if self._began.at < at <= until]
        if imported:
            inside.append(Phase(semconv.SPAN_IMPORTS, self._began.at, max(imported)[0]))
        last_of_each = {name: at for at, name in sorted(imported)}
        return StartRecord(
            *self.ids,
            self._pid,
            self._began.at,
            self.ended_at,
            self._began.wall_at - self._began.at,
            tuple(sorted(inside, key=lambda phase: (phase.started_at, -phase.ended_at))),
            tuple((at, name) for name, at in last_of_each.items()),
            self._engine or self._imported_engine(),
            self._ready_by,
            self._error_type,
            self._died_in() if self._error_type else "",
            self._role,
            self._parent,
        )

    # ── what was told ────────────────────────────────────────────────────────────────────────────────────────────

    def _imported(self, fact: events.ModuleImported) -> None:
        package = fact.module.partition(".")[0]
        self._imports.append((fact.at, package))
        self.behind_server = self.behind_server or package in SERVERS

    def _phase_began(self, fact: events.PhaseBegan) -> None:
        self._open.append(fact)
        self.behind_server = self.behind_server or fact.phase == events.READY

    def _phase_ended(self, fact: events.PhaseEnded) -> None:
        begun = events.PhaseBegan(fact.started_at, fact.phase)
        if begun in self._open:
            self._open.remove(begun)
        if len(self._phases) < MOST and fact.started_at < fact.at:
            self._phases.append(Phase(fact.phase, fact.started_at, fact.at, fact.model, fact.error_type))
        if fact.phase == events.WEIGHTS:
            self._engine = self._engine or fact.by
        elif fact.phase != events.READY:
            return
        elif fact.by == events.BY_ENGINE and not self._parent:
            self._engine_ready_at = self._engine_ready_at or fact.at
        else:
            self._end(fact.at, "" if fact.error_type else fact.by, fact.error_type)

    def _paused(self, fact: events.PauseSeen) -> None:
        if fact.cause in semconv.STARTUP_PAUSES and len(self._phases) < MOST:
            self._phases.append(Phase(fact.cause, fact.started_at, fact.at))

    # ── how it ends ──────────────────────────────────────────────────────────────────────────────────────────────

    def _end(self, at: int, ready_by: str, error_type: str = "") -> None:
        self.ended_at, self._ready_by, self._error_type = at, ready_by, error_type

    def _was_ready(self) -> bool:
        """Whether an engine was started, which is the best that is known where nobody says more."""
        at = 0 if self.behind_server else self._engine_ready_at
        if at:
            self._end(at, events.BY_ENGINE)
        return bool(at)

    def _left(self, fact: events.ProcessLeft) -> None:
        """Whoever leaves in order, without having failed at anything, was a script and no server."""
        if not self._was_ready():
            failed = self._failed()
            error_type = fact.error_type or (failed.error_type if failed else "")
            self._abandoned = not error_type
            self._end(fact.at, "", error_type)

    def _died(self, fact: events.ProcessDied) -> None:
        """It may have been anything, unless it was seen to get ready."""
        if not self._was_ready():
            self._abandoned = not (self._phases or self._open)
            self._end(fact.at, "", semconv.ERROR_PROCESS_DIED)

    def _failed(self) -> Phase | None:
        """The last phase that failed."""
        return next((phase for phase in reversed(self._phases) if phase.error_type), None)

    def _died_in(self) -> str:
        """The phase that it was in at the end, or else the one that failed."""
        failed = self._failed()
        return self._open[-1].phase if self._open else failed.name if failed else ""

    def _imported_engine(self) -> str:
        names = {name for _, name in self._imports}
        return next((engine for engine in ENGINES if engine in names), "")
