"""Builds the record of each process start from its events. Pure.

    process began ─ imports ─ weights ─ compile, capture ─▶ ready (lifespan | engine | request)

An ASGI server is ready when its lifespan reports it. Without a lifespan, a process is ready by its first
request at the latest; if its engine was ready before that, the process was too. A child process that runs an
engine is ready when its engine is. Requests that a server sends to itself for warmup do not count: behind an
ASGI server, only HTTP requests do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from otel_infer import semconv
from otel_infer.assembly.records.process import Phase, StartRecord
from otel_infer.ringbuffer import events

NO_SPAN_ID = bytes(8)
"""In place of a parent span id: there is none."""

ASGI_SERVERS = ("uvicorn", "hypercorn")
"""Packages that run the lifespan of an application."""
ENGINES = ("vllm", "transformers", "torch")
"""Packages that name the engine if no event does, in order of preference."""
MAX_PHASES = 1024
"""Phases stored per start."""


IMPORT_GAP_NS = 1_000_000_000
"""Between two watched imports: other modules are imported, or the process idles, which cannot be told apart."""

STARTUP_EVENTS = (
    events.ProcessStarted,
    events.ModuleImported,
    events.PhaseBegan,
    events.PhaseEnded,
    events.ProcessLeft,
)
"""The events that `StartupTracker.apply_event` handles, besides pauses."""


class StartupTracker:
    """The starts of all processes, by their rings."""

    def __init__(self) -> None:
        self._startups: dict[int, ProcessStartup] = {}
        self._processes: dict[int, tuple[int, int, str]] = {}
        self._finished: list[StartRecord] = []
        self._ended_ids: set[tuple[bytes, bytes]] = set()
        self.serving: set[int] = set()
        """Processes with recorded steps: their start is over without a report, except behind an ASGI server.

        There, steps before the report are warmup.
        """

    def add_process(self, ring: int, pid: int, reported_until: int, role: str) -> None:
        """Adds a process. An earlier reader reported the starts that ended by `reported_until`."""
        self._processes[ring] = pid, reported_until, role

    def apply_event(self, ring: int, handle: int, event: Any) -> None:
        """Applies an event of a process."""
        start = self._startups.get(ring)
        if isinstance(event, events.ProcessStarted):
            if (event.trace_id, event.span_id) in self._ended_ids:
                return  # a process that was spawned after the others of its server had ended
            start = self._find_shared(event) or ProcessStartup(event, *self._processes.get(ring, (0, 0, "")))
            start.add_process(ring, event)
            self._startups[ring] = start
        elif start is not None:
            start.apply_event(ring, event)

    def _find_shared(self, event: events.ProcessStarted) -> ProcessStartup | None:
        """Returns the start that this process, or one that it was forked with, has begun already."""
        ids = event.trace_id, event.span_id
        return next((start for start in self._startups.values() if start.ids == ids), None)

    def record_arrival(self, ring: int, event: events.RequestArrived) -> tuple[bytes, bytes] | None:
        """Records an arrival. Returns trace and span id of the start for the first served request, else None."""
        start = self._startups.get(ring)
        return start.ids if start is not None and start.record_arrival(event) else None

    def is_startup_pause(self, ring: int, event: events.PauseSeen) -> bool:
        """Returns whether the pause is a phase of a start that is not over."""
        start = self._startups.get(ring) if event.cause in semconv.STARTUP_PAUSES else None
        return start is not None and start.is_ongoing and (start.behind_server or ring not in self.serving)

    def remove_process(self, ring: int, event: events.ProcessDied) -> None:
        """Removes a process that died; no more events follow."""
        start = self._startups.pop(ring, None)
        self.serving.discard(ring)
        if start is not None:
            start.apply_event(ring, event)
            self._finished += start.take_record(start.ended_at)
            if start not in self._startups.values():
                self._ended_ids.add(start.ids)

    def drain_starts(self, horizon: int) -> list[StartRecord]:
        """Returns the starts that were over by `horizon`, each once."""
        finished, self._finished = self._finished, []
        return finished + [
            record for start in self._startups.values() for record in start.take_record(horizon)
        ]


class ProcessStartup:
    """The start of one process, or of a process and those that it forked. `ended_at`: 0 while it is not over.

    `behind_server`: an ASGI server runs the application, so its lifespan reports when it is ready.
    """

    def __init__(self, start_event: events.ProcessStarted, pid: int, reported_until: int, role: str) -> None:
        self._start_event = start_event
        self._pid = pid
        self._reported_until = reported_until
        self._role = role
        self._parent = b"" if start_event.parent_span_id == NO_SPAN_ID else start_event.parent_span_id
        self._imports: list[_Import] = []
        self._phases: list[Phase] = []
        self._open_phases: list[tuple[int, events.PhaseBegan]] = []
        self._living: set[int] = set()
        self._engine = self._ready_by = self._error_type = ""
        self.behind_server = self._abandoned = False
        self._engine_ready_at = 0
        self.ended_at = 0
        self._is_reported = self._is_served = False
        self._handlers: dict[type, Callable[[int, Any], None]] = {
            events.ModuleImported: self._add_import,
            events.PhaseBegan: self._begin_phase,
            events.PhaseEnded: self._end_phase,
            events.PauseSeen: self._add_pause,
            events.ProcessLeft: self._end_on_exit,
            events.ProcessDied: self._end_on_death,
        }

    @property
    def ids(self) -> tuple[bytes, bytes]:
        """Trace and span id of the start."""
        return self._start_event.trace_id, self._start_event.span_id

    @property
    def is_ongoing(self) -> bool:
        """Whether the process is not known to be ready yet."""
        return not self.ended_at and (self.behind_server or not self._engine_ready_at)

    def add_process(self, ring: int, event: events.ProcessStarted) -> None:
        """Adds a process with this ring. The start began with the first of them."""
        self._living.add(ring)
        if not self.ended_at and event.at < self._start_event.at:
            self._start_event = event

    def apply_event(self, ring: int, event: Any) -> None:
        """Applies an event of a process; events after the start are ignored."""
        if not self.ended_at:
            self._handlers[type(event)](ring, event)

    def record_arrival(self, event: events.RequestArrived) -> bool:
        """Records an arrival. Returns whether it is the first served request."""
        if self._is_served or self._abandoned or (self.behind_server and event.operation):
            return False
        self._is_served = True
        if not self.ended_at and not self._end_if_engine_ready():
            self._set_end(event.at, events.BY_REQUEST)
        return True

    def take_record(self, horizon: int) -> list[StartRecord]:
        """Returns the record once, when the start was over by `horizon`.

        Empty for a process that was no server, and for a start that an earlier reader reported.
        """
        if self._is_reported or not 0 < self.ended_at <= horizon:
            return []
        self._is_reported = True
        return [] if self._abandoned or self.ended_at <= self._reported_until else [self._build_record()]

    def _build_record(self) -> StartRecord:
        inside = [phase for phase in self._phases if phase.ended_at <= self.ended_at]
        begun = [phase.started_at for phase in inside if phase.name in (events.WEIGHTS, events.READY)]
        until = min([self.ended_at, *begun, *(event.at for _, event in self._open_phases)])
        imported = [known for known in self._imports if self._start_event.at < known.at <= until]
        inside += _build_import_phases(imported, self._start_event.at)
        last_of_each = {known.package: known.at for known in sorted(imported)}
        return StartRecord(
            *self.ids,
            pid=self._pid,
            started_at=self._start_event.at,
            ended_at=self.ended_at,
            wall_offset=self._start_event.wall_at - self._start_event.at,
            phases=tuple(sorted(inside, key=lambda phase: (phase.started_at, -phase.ended_at))),
            imported=tuple((at, name) for name, at in last_of_each.items()),
            engine=self._engine or self._find_imported_engine(),
            ready_by=self._ready_by,
            error_type=self._error_type,
            failed_phase=self._find_failed_phase() if self._error_type else "",
            role=self._role,
            parent_span_id=self._parent,
        )

    # ── events ──────────────────────────────────────────────────────────────────────────────────────────────

    def _add_import(self, ring: int, event: events.ModuleImported) -> None:
        package = event.module.partition(".")[0]
        self._imports.append(_Import(event.at, package, event.started_at))
        self.behind_server = self.behind_server or package in ASGI_SERVERS

    def _begin_phase(self, ring: int, event: events.PhaseBegan) -> None:
        self._open_phases.append((ring, event))
        self.behind_server = self.behind_server or event.phase == events.READY

    def _end_phase(self, ring: int, event: events.PhaseEnded) -> None:
        begun = ring, events.PhaseBegan(event.started_at, event.phase)
        if begun in self._open_phases:
            self._open_phases.remove(begun)
        if len(self._phases) < MAX_PHASES and event.started_at < event.at:
            self._phases.append(Phase(event.phase, event.started_at, event.at, event.model, event.error_type))
        if event.phase == events.WEIGHTS:
            self._engine = self._engine or event.by
        elif event.phase != events.READY:
            return
        elif event.by == events.BY_ENGINE and not self._parent:
            self._engine_ready_at = self._engine_ready_at or event.at
        else:
            self._set_end(event.at, "" if event.error_type else event.by, event.error_type)

    def _add_pause(self, ring: int, event: events.PauseSeen) -> None:
        if event.cause in semconv.STARTUP_PAUSES and len(self._phases) < MAX_PHASES:
            self._phases.append(Phase(event.cause, event.started_at, event.at))

    # ── end of the start ────────────────────────────────────────────────────────────────────────────────────

    def _set_end(self, at: int, ready_by: str, error_type: str = "") -> None:
        self.ended_at, self._ready_by, self._error_type = at, ready_by, error_type

    def _end_if_engine_ready(self) -> bool:
        """Ends the start when its engine was ready, if it was. Returns whether it did.

        Without a lifespan, there is no better evidence.
        """
        at = 0 if self.behind_server else self._engine_ready_at
        if at:
            self._set_end(at, events.BY_ENGINE)
        return bool(at)

    def _end_on_exit(self, ring: int, event: events.ProcessLeft) -> None:
        """Ends the start. A process that exits without any failure was a script and no server."""
        self._living.discard(ring)
        if self._end_if_engine_ready() or (self._living and not event.error_type):
            return
        failed = self._last_failed_phase()
        error_type = event.error_type or (failed.error_type if failed else "")
        self._abandoned = not error_type
        self._set_end(event.at, "", error_type)

    def _end_on_death(self, ring: int, event: events.ProcessDied) -> None:
        """Ends the start. Only a phase that was open, or an ASGI server that was not ready, shows a failure.

        Other processes end without a word on a normal stop: SIGTERM ends a gRPC server, and a child of
        `multiprocessing` exits without the functions of `atexit`.
        """
        self._living.discard(ring)
        interrupted = any(opened_by == ring for opened_by, _ in self._open_phases)
        if self._end_if_engine_ready() or (self._living and not interrupted):
            return
        failed = self._last_failed_phase()
        error_type = failed.error_type if failed else ""
        if interrupted or (self.behind_server and self._phases):
            error_type = semconv.ERROR_PROCESS_DIED
        self._abandoned = not error_type
        self._set_end(event.at, "", error_type)

    def _last_failed_phase(self) -> Phase | None:
        """Returns the last phase that failed; None if none did."""
        return next((phase for phase in reversed(self._phases) if phase.error_type), None)

    def _find_failed_phase(self) -> str:
        """Returns the phase that was open at the end, else the last one that failed; empty if there is none."""
        failed = self._last_failed_phase()
        return self._open_phases[-1][1].phase if self._open_phases else failed.name if failed else ""

    def _find_imported_engine(self) -> str:
        names = {known.package for known in self._imports}
        return next((engine for engine in ENGINES if engine in names), "")


class _Import(NamedTuple):
    """The import of a watched package. `started_at`: 0 = not seen, so it may have begun with the process."""

    at: int
    package: str
    started_at: int


def _build_import_phases(imported: list[_Import], process_started_at: int) -> list[Phase]:
    """Returns the times in which watched packages were imported, from the start of the process on.

    Gaps up to `IMPORT_GAP_NS` are a part of them. A longer one is idle time, or belongs to other modules.
    """
    phases: list[Phase] = []
    for known in sorted(imported):
        started_at = max(known.started_at, process_started_at)
        while phases and started_at <= phases[-1].ended_at + IMPORT_GAP_NS:
            started_at = min(started_at, phases.pop().started_at)
        if started_at <= process_started_at + IMPORT_GAP_NS:
            started_at = process_started_at
        phases.append(Phase(semconv.SPAN_IMPORTS, started_at, known.at))
    return phases
