"""Records events into the rings of this process.

The rings are created at the first event and dropped in a forked child. There is one `recorder` per process.
It is inactive until the bootstrap starts it. While it is inactive, a probe costs one attribute look-up.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from otel_infer import _clock
from otel_infer.ringbuffer import events, layout
from otel_infer.ringbuffer.arena import Arena, RingUnavailable
from otel_infer.ringbuffer.batch_writer import BatchWriter, HandleTable
from otel_infer.ringbuffer.forks import call_in_child
from otel_infer.ringbuffer.step_rings import StepRingAllocator
from otel_infer.ringbuffer.writer import RequestWriter

log = logging.getLogger("otel_infer")

SERVER = "server"
"""Role of a process that may represent its server; another process of it may run an engine only."""
CHECK_NS = 1_000_000_000
"""Interval at which an arriving request checks that a reader runs."""
REPEAT_NS = 60 * CHECK_NS
"""Interval at which lasting state is recorded again, for a restarted reader."""
MAX_STARTUP_EVENTS = 128
"""Startup events that are held until the rings exist."""
DEFERRED_NS = 100_000_000
"""Shortest interval of the calls of `deferred_recorders`."""
RETRY_NS = 1_000_000_000
"""After a step ring found no room, time until the next is tried."""


class Recorder:
    """Entry point for probes that record events. Once started, it never raises into its caller.

    An event that cannot be recorded is lost and counted; the log names the first one.
    """

    def __init__(self) -> None:
        self.active = False
        self.role = SERVER
        self._detect_role: Callable[[], str] = lambda: SERVER
        self.requests: RequestWriter | None = None
        self.arena: Arena | None = None
        self._make_arena: Callable[[], Arena] | None = None
        self._get_fallback_arena: Callable[[str], Arena | None] = lambda reason: None
        self._ensure_reader: Callable[[], None] = lambda: None
        self.maintained_at = self._repeated_at = self._deferred_due_at = 0
        self._step_rings: StepRingAllocator | None = None
        self._free_batch_writers: dict[str, deque[BatchWriter]] = {}
        self._batch_writers: list[BatchWriter] = []
        self._no_room_until = 0
        self._is_no_room_logged = False
        self._hook_reports: dict[str, events.HooksReported] = {}
        self._get_process_start: Callable[[], events.ProcessStarted | None] = lambda: None
        self._startup_events: list[Any] = []
        self._lost_before = 0
        self._make_lock = threading.Lock()
        self._making_thread = 0
        self._is_loss_logged = False
        self.deferred_recorders: dict[str, Callable[[], None]] = {}
        """Record events that could not be recorded when they happened, before a request ends that they concern."""
        call_in_child(self.reset_after_fork)

    def start(
        self,
        make_arena: Callable[[], Arena],
        ensure_reader: Callable[[], None],
        get_fallback_arena: Callable[[str], Arena | None],
        role: Callable[[], str] = lambda: SERVER,
        get_process_start: Callable[[], events.ProcessStarted | None] = lambda: None,
    ) -> None:
        """Starts recording; the rings are created at the first event.

        `ensure_reader` is called after the rings are created, then at most once a second from the request
        path; it ensures that a reader runs. `get_fallback_arena` receives the reason why there is no shared
        memory and may return another arena. `role` returns the role of this process in its server.
        `get_process_start` returns the process start, or None if it is not to be recorded. Both are called
        when the rings are created.
        """
        self._make_arena, self._ensure_reader, self._detect_role = make_arena, ensure_reader, role
        self._get_fallback_arena, self._get_process_start = get_fallback_arena, get_process_start
        self._hook_reports.clear()
        self._startup_events.clear()
        self.active = True

    def stop(self) -> None:
        """Stops recording and releases the rings' locks, so that the reader finishes."""
        self.active = False
        arena = self.arena
        self._drop_rings()
        if arena is not None:
            arena.close()

    def reset_after_fork(self) -> None:
        """Drops the rings in a forked child, because they belong to the parent."""
        self._make_lock, self._making_thread = threading.Lock(), 0
        self._lost_before = 0
        self._startup_events.clear()
        self._drop_rings()

    def discard_rings(self) -> None:
        """Discards rings whose folder was removed; the next event creates others.

        The requests in flight are lost, and counted in the new rings.
        """
        if self.requests is not None:
            self._lost_before += self.requests.in_flight
        arena = self.arena
        self._drop_rings()
        if arena is not None:
            arena.close()

    def are_rings_unreachable(self) -> bool:
        """Returns whether no reader has opened the rings of this process, and none can find them any more."""
        if self.requests is None or self.arena is None or self.requests.words[layout.W_PROCESSED_UNTIL]:
            return False
        return not self.arena.is_visible()

    def _drop_rings(self) -> None:
        if self.requests is not None:
            self.requests.retire()
        self.requests = self.arena = None
        self.maintained_at = 0
        self._retire_batch_writers()

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def open_request(self, arrived: events.RequestArrived) -> int:
        """Records an arrival and returns the handle; 0 where it could not be recorded."""
        if not self.active:
            return 0
        try:
            if self.requests is not None and arrived.at - self.maintained_at > CHECK_NS:
                self.run_maintenance(arrived.at)
            writer = self.requests or self._make_rings()
            return writer.open_request(arrived) if writer is not None else 0
        except Exception as error:  # the request continues unrecorded
            self.report_lost_event(error)
            if self.requests is not None:
                self.requests.count_not_recorded(arrived)
            return 0

    def run_maintenance(self, at: int) -> None:
        """Does what is due every `CHECK_NS`."""
        self.maintained_at = at
        self._ensure_reader()
        if at - self._repeated_at > REPEAT_NS:
            self._repeated_at = at
            for report in list(self._hook_reports.values()):  # another thread may be installing hooks
                self.record_process(report._replace(at=at))

    def record(self, handle: int, event: Any) -> None:
        """Records an event of a request."""
        if handle:
            self._write_event(handle, event)

    def _write_event(self, handle: int, event: Any) -> None:
        writer = self.requests
        if writer is not None:
            try:
                writer.write_event(handle, event)
            except Exception as error:  # the request, or the process, continues unrecorded
                self.report_lost_event(error)

    def close_request(self, handle: int, ended: events.RequestEnded | events.ExchangeEnded) -> None:
        """Records the end of a request and frees its slot."""
        writer = self.requests
        if writer is not None and handle:
            if ended[0] >= self._deferred_due_at:
                self.run_deferred_recorders(ended[0])
            try:
                writer.close_request(handle, ended)
            except Exception as error:  # the request continues unrecorded
                self.report_lost_event(error)

    def run_deferred_recorders(self, at: int) -> None:
        """Calls the deferred recorders, which are due again `DEFERRED_NS` after `at`."""
        self._deferred_due_at = at + DEFERRED_NS
        if self.requests is not None:
            self.requests.defer_until(self._deferred_due_at)
        for record_deferred in list(self.deferred_recorders.values()):
            try:
                record_deferred()
            except Exception as error:  # the end of the request is recorded nevertheless
                self.report_lost_event(error)

    def record_pause(self, cause: str, started_at: int, ended_at: int) -> None:
        """Records that this process was held up; does nothing where there are no rings."""
        self.record_process(events.PauseSeen(ended_at, started_at, cause))

    def count(self, mark: str, since: int, at: int, count: int) -> None:
        """Records that something happened `count` times; does nothing where there are no rings."""
        self.record_process(events.MarkSeen(at, since, mark, count))

    def record_process(self, event: Any) -> None:
        """Records an event of this process, not of a request; does nothing where there are no rings."""
        self._write_event(0, event)

    def record_startup(self, event: Any) -> None:
        """Records an event of the process start.

        It is held until there are rings, because it must not create them.
        """
        if not self.active:
            return
        if len(self._startup_events) < MAX_STARTUP_EVENTS:
            self._startup_events.append(event)
        self.record_process(event)

    def report_lost_event(self, error: Exception) -> None:
        """Counts an event that could not be recorded, and logs the first one."""
        if self.requests is not None:
            self.requests.words[layout.W_LOST] += 1
        if not self._is_loss_logged:
            self._is_loss_logged = True
            where = traceback.extract_tb(error.__traceback__)[-1]
            log.error(
                "event lost because of %s at %s:%s; further losses are only counted",
                type(error).__name__,
                where.filename,
                where.lineno,
            )

    def report_hooks(self, integration: str, active: int, due: int) -> None:
        """Records how many of the `due` hooks are installed; held until there are rings, creating none."""
        report = self._hook_reports[integration] = events.HooksReported(
            _clock.now(), integration, active, due
        )
        self.record_process(report)

    def ensure_rings(self) -> bool:
        """Creates the rings now (an engine was imported); returns False where that is impossible."""
        try:
            has_rings = self.active and (self.requests is not None or self._make_rings() is not None)
            if has_rings:
                self._ensure_reader()
            return has_rings
        except Exception as error:  # the user's import must not fail
            self.report_lost_event(error)
            return False

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    def acquire_batch_writer(self, engine: str) -> BatchWriter | None:
        """Returns the writer of one engine thread's steps, until it is released; None = run unrecorded."""
        if not self.active:
            return None
        free = self._free_batch_writers.get(engine)
        if free:
            try:
                return free.popleft().assign_to_thread()
            except IndexError:
                pass
        if _clock.now() < self._no_room_until:  # otherwise every step would try again, and fail again
            return None
        try:
            return self._create_batch_writer(engine)
        except RingUnavailable as reason:
            self._no_room_until = _clock.now() + RETRY_NS
            if not self._is_no_room_logged:
                self._is_no_room_logged = True
                log.warning("steps of some requests are not recorded, and counted: %s", reason)
        except Exception as error:  # the engine continues unrecorded
            self.report_lost_event(error)
        return None

    def _create_batch_writer(self, engine: str) -> BatchWriter | None:
        if (self.requests is None and self._make_rings() is None) or self._step_rings is None:
            return None
        writer, number = self._step_rings.create_writer(engine)
        batch_writer = BatchWriter(writer, HandleTable(), number)
        self._batch_writers.append(batch_writer)
        return batch_writer.assign_to_thread()

    def record_missing_steps(self, handle: int) -> None:
        """Records that steps of a request are not recorded, because `acquire_batch_writer` returned None."""
        if self.requests is not None and handle:
            self.requests.words[layout.W_UNRECORDED] += 1
            self.record(handle, events.StepsUnrecorded(_clock.now()))

    def release_batch_writer(self, engine: str, writer: BatchWriter) -> None:
        """Takes a writer back from this thread, so that another one can continue with it."""
        if writer.alive:
            writer.clear_batch()
            writer.handles.clear()
            # The next run on this thread reuses it: a request's steps are easier to assemble from one ring.
            self._free_batch_writers.setdefault(engine, deque()).appendleft(writer)

    # ── creation ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _make_rings(self) -> RequestWriter | None:
        """Returns this process's rings, created by the first thread that needs them; other threads wait.

        None for events that the creation itself causes.
        """
        if self._make_arena is None or self._making_thread == threading.get_ident():
            return None
        with self._make_lock:
            if self.requests is not None or not self.active:
                return self.requests
            self._making_thread = threading.get_ident()
            try:
                writer = self._create_writer(self._make_arena)
            finally:
                self._making_thread = 0
        if writer is not None:
            self._ensure_reader()
        # `ensure_reader` may have discarded them, if no reader can be started.
        return self.requests if writer is None or self.requests is writer else self._make_rings()

    def _create_writer(self, make_arena: Callable[[], Arena]) -> RequestWriter | None:
        self._prefix, self.role = f"{os.getpid()}-{_clock.now():x}", self._detect_role()
        try:
            arena = make_arena()
            writer = RequestWriter(arena, self._prefix, self.role)
        except RingUnavailable as reason:
            fallback = self._get_fallback_arena(str(reason))
            if fallback is None:
                self.active = False
                return None
            arena, writer = fallback, RequestWriter(fallback, self._prefix, self.role)
        for event in (self._get_process_start(), *self._startup_events, *self._hook_reports.values()):
            if event is not None:
                writer.write_event(0, event)
        for word in (layout.W_UNRECORDED, layout.W_OFFERED, layout.W_NOT_RECORDED):
            writer.words[word] += self._lost_before
        self._lost_before, self._repeated_at = 0, _clock.now()
        self.arena, self._step_rings = arena, StepRingAllocator(arena, self._prefix)
        self.requests = writer
        return writer

    def _retire_batch_writers(self) -> None:
        for writer in self._batch_writers:
            writer.detach_ring()
        self._batch_writers.clear()
        self._free_batch_writers.clear()
        self._step_rings, self._no_room_until = None, 0


recorder = Recorder()
"""The recorder of this process."""
