"""TODO ringbuffer.events.processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Phases of a start, and by what it is known that it is over.
WEIGHTS = "weights"
WARMUP = "warmup"
READY = "ready"
BY_LIFESPAN, BY_ENGINE, BY_REQUEST = "lifespan", "engine", "request"


class HooksReported(NamedTuple):
    """How many hooks of one integration are bound in this process."""

    at: int
    integration: str
    active: int
    total: int


class PauseSeen(NamedTuple):
    """Something held up this process, whatever request it was at, from `started_at` to `at`. `cause`: gc, compile, …"""

    at: int
    started_at: int
    cause: str


class MarkSeen(NamedTuple):
    """Something happened so many times in this process between `since` and `at`; how long it took, nobody knows."""

    at: int
    since: int
    mark: str
    times: int


class ProcessStarted(NamedTuple):
    """This process began, as its system says; `wall_at` (unix ns) pairs with `at`. The ids are those of its start's trace.

    `parent_span_id`: of the start that this one is a part of; zeros if it is nobody's.
    """

    at: int
    wall_at: int
    trace_id: bytes
    span_id: bytes
    parent_span_id: bytes = bytes(8)


class ModuleImported(NamedTuple):
    """A module that we wait for was imported, at `at` or before."""

    at: int
    module: str


class PhaseBegan(NamedTuple):
    """The process began with something that it does before it serves: `weights`, `warmup`, `ready`."""

    at: int
    phase: str


class PhaseEnded(NamedTuple):
    """It is over; `error_type` says of what it failed. `by`: the engine that loaded, or who says that the server is ready."""

    at: int
    started_at: int
    phase: str
    by: str
    model: str
    error_type: str


class ProcessLeft(NamedTuple):
    """The process is about to end in an orderly way, with an exception that nobody caught if `error_type` names one."""

    at: int
    error_type: str


class EventsLost(NamedTuple):
    """Said by the reader: facts of this process were overwritten (`lost`) or torn before `at`."""

    at: int
    lost: int
    torn: int


class ProcessSeen(NamedTuple):
    """Said by the reader: a process of the server, with what its header says. `parent`: the process id of its parent.

    `concluded_at`: what an earlier reader concluded before this instant is not to be concluded again; 0 = no such reader.
    """

    at: int
    pid: int
    role: str
    processed_until: int
    parent: int = 0


class EngineSeen(NamedTuple):
    """Said by the reader: this ring, its process's number `log`, holds the steps of an engine in the process of ring `process`."""

    at: int
    process: int
    pid: int
    engine: str
    log: int = 0


class ThreadSeen(NamedTuple):
    """Said by the reader: what the kernel counted of an engine's thread in (`since`, `at`].

    `ran_ns` on a CPU, `waited_ns` for one while it could have run, `system_ns` in the kernel (in whole ticks); pages
    mapped to it one by one (`faults`).
    """

    at: int
    since: int
    ran_ns: int
    waited_ns: int
    system_ns: int
    faults: int


class ProcessDied(NamedTuple):
    """Said by the reader: a writer is gone, with whatever was in flight."""

    at: int


class LiveListed(NamedTuple):
    """Said by the reader after a loss: the handles in the live table; whatever else was open has ended unseen."""

    at: int
    live: Sequence[int]


class LiveRecovered(NamedTuple):
    """Said by the reader, from the live table: a request whose arrival was overwritten or happened before us."""

    at: int
    wall_at: int
    trace_id: bytes
    span_id: bytes
    parent_span_id: bytes
    flags: int
