"""Records of processes: pauses, marks, and starts with their phases. Instants are monotonic ns."""

from __future__ import annotations

from typing import NamedTuple


class Pause(NamedTuple):
    """An interval in which a whole process or its event loop was stopped, and its cause (gc, compile, …)."""

    started_at: int
    ended_at: int
    cause: str


class Mark(NamedTuple):
    """Something that happened `times` times in a process between `since` and `at`. Its duration is unknown."""

    since: int
    at: int
    name: str
    times: int


class Phase(NamedTuple):
    """A phase of a start: imports, weights, compile, … `error_type`: empty unless the phase failed."""

    name: str
    started_at: int
    ended_at: int
    model: str = ""
    error_type: str = ""


class StartRecord(NamedTuple):
    """The start of one process, until it was ready or failed.

    `error_type`: empty if it did not fail. `wall_offset`: unix ns − monotonic ns. `ready_by`: the evidence
    that it is ready: lifespan, engine or request; empty if it never was. `failed_phase`: the phase in which
    it failed or died, if any. `imported`: instant and name of each watched package, in order of time; several
    phases may be imports.
    `parent_span_id`: the start that this one belongs to, as the process with this `role`; empty if there is
    none.
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
        """From the start of the process until it was ready or failed, ns."""
        return self.ended_at - self.started_at
