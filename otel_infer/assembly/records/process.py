"""TODO assembly.records.process."""

from __future__ import annotations

from typing import NamedTuple


class Pause(NamedTuple):
    """A time in which the whole process was held up, or its event loop, and by what (gc, compile, …, event_loop)."""

    started_at: int
    ended_at: int
    cause: str


class Mark(NamedTuple):
    """Something that happened to the process so many times between two looks, of unknown length."""

    since: int
    at: int
    name: str
    times: int


class Phase(NamedTuple):
    """A part of a start: imports, weights, compile, …; `error_type` says of what it failed."""

    name: str
    started_at: int
    ended_at: int
    model: str = ""
    error_type: str = ""


class StartRecord(NamedTuple):
    """How one process got ready, or did not (`error_type`). `wall_offset`: unix ns − monotonic ns.

    `ready_by`: by what it is known: lifespan, engine, request; empty if it never was. `died_in`: the phase that it did not
    survive, if it was in one. `imported`: instant and name of the packages that were waited for, in order of time.
    `parent_span_id`: of the start that this one is a part of, as the process with this `role`; empty if it is nobody's.
    """

    trace_id: bytes
    span_id: bytes
    pid: int
    started_at: int
    ended_at: int
    wall_offset: int
    phases: tuple[Phase, ...]
    imported: tuple[tuple[int, str], ...] = ()
    engine: str = ""
    ready_by: str = ""
    error_type: str = ""
    failed_phase: str = ""
    role: str = ""
    parent_span_id: bytes = b""

    @property
    def duration_ns(self) -> int:
        """From the start of the process to when it was ready, or gave up."""
        return self.ended_at - self.started_at
