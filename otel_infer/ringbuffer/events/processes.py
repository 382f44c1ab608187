"""Events about processes: hooks, pauses, start and exit.

The events from `EventsLost` on are never written to a ring: the reader or the sidecar adds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from otel_infer import semconv

# Phases of a process start, and the sources that determine its end.
WEIGHTS = "weights"
WARMUP = "warmup"
READY = "ready"
BY_LIFESPAN, BY_ENGINE, BY_REQUEST = "lifespan", "engine", "request"


class HooksReported(NamedTuple):
    """Number of hooks of one instrumentor that are installed in this process, out of `total`."""

    at: int
    integration: str
    active: int
    total: int


PAUSE_GC, PAUSE_COMPILE, PAUSE_CAPTURE, PAUSE_EVENT_LOOP = (
    semconv.CAUSE_GC,
    semconv.CAUSE_COMPILE,
    semconv.CAUSE_CAPTURE,
    semconv.CAUSE_EVENT_LOOP,
)
"""Causes of pauses that instrumentations record."""


class PauseSeen(NamedTuple):
    """Pause of this process from `started_at` to `at`, whatever request it was serving.

    `cause`: gc, compile, …
    """

    at: int
    started_at: int
    cause: str


class MarkSeen(NamedTuple):
    """Number of occurrences in this process between `since` and `at`; their durations are unknown."""

    at: int
    since: int
    mark: str
    times: int


class ProcessStarted(NamedTuple):
    """Start of this process, as the operating system reports it; `wall_at` (unix ns) pairs with `at`.

    The ids are those of the trace of the start. `parent_span_id`: the start that this one is a part of; zeros
    = none.
    """

    at: int
    wall_at: int
    trace_id: bytes
    span_id: bytes
    parent_span_id: bytes = bytes(8)


class ModuleImported(NamedTuple):
    """Import of a watched module, with all that it imports. `started_at`: 0 = not seen."""

    at: int
    module: str
    started_at: int = 0


class PhaseBegan(NamedTuple):
    """Start of a phase before the process serves: `weights`, `warmup` or `ready`."""

    at: int
    phase: str


class PhaseEnded(NamedTuple):
    """End of a phase; `error_type` names the exception if it failed.

    `by`: the engine that loaded, or the source that determined that the server is ready.
    """

    at: int
    started_at: int
    phase: str
    by: str
    model: str
    error_type: str


class ProcessLeft(NamedTuple):
    """Orderly exit of the process, recorded just before it. `error_type`: the uncaught exception, if any."""

    at: int
    error_type: str


class ServerBound(NamedTuple):
    """The address on which the process receives HTTP requests. A request on another one has attributes of its own."""

    at: int
    address: str
    port: int


class EventsLost(NamedTuple):
    """Loss, added by the reader: events of this process were overwritten (`lost`) or torn before `at`."""

    at: int
    lost: int
    torn: int


class ProcessSeen(NamedTuple):
    """Process of the server, added by the reader with the data of its header.

    `parent`: its parent's process id. `processed_until`: requests that an earlier reader exported before this
    instant are not exported again; 0 = no such reader.
    """

    at: int
    pid: int
    role: str
    processed_until: int
    parent: int = 0


class EngineSeen(NamedTuple):
    """Engine of the process with ring `process`, added by the reader: this ring holds its steps.

    `ring_number`: the number of this ring among those of its process.
    """

    at: int
    process: int
    pid: int
    engine: str
    ring_number: int = 0


class ThreadSeen(NamedTuple):
    """Kernel counters of an engine's thread in (`since`, `at`], added by the sidecar.

    `ran_ns`: time on a CPU. `waited_ns`: time runnable without a CPU. `system_ns`: time in the kernel (in
    whole ticks). `faults`: minor page faults.
    """

    at: int
    since: int
    ran_ns: int
    waited_ns: int
    system_ns: int
    faults: int


class ThreadRan(NamedTuple):
    """Kernel counters of a thread for one generation, which began at `since`, recorded by itself at its end.

    `ring_number`: of its steps. Times in µs, as of `ThreadSeen`.
    """

    at: int
    since: int
    engine: str
    ring_number: int
    ran_us: int
    waited_us: int
    system_us: int
    faults: int


class CpuSeen(NamedTuple):
    """CPU time on the cores that a server may use, in (`since`, `at`], added by the sidecar; ns.

    `busy_ns`: of all processes, but those of low priority (nice). `server_ns`: of the server's processes.
    `other_threads_ns`: of the server's threads that Python started, are no main thread and run no engine.
    """

    at: int
    since: int
    cores: int
    busy_ns: int
    server_ns: int
    other_threads_ns: int


STALLED_STEP, STALLED_REQUEST, STALLED_PROCESS = semconv.LATE_STEP, semconv.LATE_REQUEST, semconv.LATE_PROCESS
"""Reasons for a sample of code, besides an event loop (`PAUSE_EVENT_LOOP`)."""


class CodeLocated(NamedTuple):
    """The code that a late thread was in at `at`, added by the sidecar. The handle is that of the late request, if any.

    `reason`: what is late since `since`: `event_loop`, `step`, `request` or `process`. `function`, `file`, `line`: "" and
    0 = unknown. `callee`: "FUNCTION FILE:LINE" of a library's code that the function had called; "" = none. `waiter`:
    likewise, of the late thread, if the function is another thread's, which holds the lock that it waits for. `stacks`:
    of all threads, of a process that hangs.
    """

    at: int
    since: int
    reason: str
    function: str
    file: str
    line: int
    callee: str = ""
    waiter: str = ""
    stacks: str = ""


class HangSeen(NamedTuple):
    """Server that hangs since `since`, with so many requests in flight, added by the sidecar; 0 = it goes on."""

    at: int
    since: int
    requests: int


class ProcessDied(NamedTuple):
    """Death of a writer, added by the reader; its requests in flight died with it."""

    at: int


class LiveListed(NamedTuple):
    """Handles in the live table, added by the reader after a loss; all other requests have ended."""

    at: int
    live: Sequence[int]


class LiveRecovered(NamedTuple):
    """Request from the live table, added by the reader, which did not read its arrival.

    The arrival was overwritten, or an earlier reader read it.
    """

    at: int
    wall_at: int
    trace_id: bytes
    span_id: bytes
    parent_span_id: bytes
    flags: int


PROCESS_EVENTS = (
    HooksReported, PauseSeen, MarkSeen, ProcessStarted, ModuleImported, PhaseBegan, PhaseEnded, ProcessLeft,
    ServerBound, EventsLost, ProcessSeen, EngineSeen, ThreadSeen, ThreadRan, CpuSeen, CodeLocated, HangSeen, ProcessDied, LiveListed, LiveRecovered,
)  # fmt: skip
"""The types that this module defines."""
