"""This process's rings, made when the first fact is stated, forgotten in a forked child.

There is one `recorder` per process. It is off until the composition root starts it, and then costs one attribute look-up
where nothing is to be said.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from otel_infer import _clock
from otel_infer.ringbuffer import events, layout
from otel_infer.ringbuffer.batch_writer import BatchWriter, HandleTable
from otel_infer.ringbuffer.step_writer import StepWriter
from otel_infer.ringbuffer.writer import Arena, RequestWriter, RingUnavailable

log = logging.getLogger("otel_infer")

SERVER = "server"
"""A process that may stand for its server: one of its others may be that of an engine alone."""
CHECK_NS = 1_000_000_000
REPEAT_NS = 60 * CHECK_NS
"""What holds for long is said again: a reader that was started again finds the first telling overwritten."""
MAX_STARTUP_EVENTS = 128
"""Facts of the start that are kept for the rings to come."""
MAX_STEP_RINGS = 12
"""Step rings of one process; engines beyond it run unrecorded, and are counted."""


class Recorder:
    """Where integrations state facts. Never raises into its caller once started.

    A fact that cannot be stated is lost and counted; the first one is named in the log.
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
        self._maintained_at = self._repeated_at = 0
        self._ring_numbers = itertools.count(1)
        self._free_batch_writers: dict[str, deque[BatchWriter]] = {}
        self._batch_writers: list[BatchWriter] = []
        self._is_step_recording_full = False
        self._hook_reports: dict[str, events.HooksReported] = {}
        self._get_process_start: Callable[[], events.ProcessStarted | None] = lambda: None
        self._startup_events: list[Any] = []
        self._lost_before = 0
        self._make_lock = threading.Lock()
        self._making_thread = 0
        self._is_loss_logged = False
        self.deferred_recorders: dict[str, Callable[[], None]] = {}
        """Each says what could not be said when it happened, before a request ends that it may concern."""
        os.register_at_fork(after_in_child=self.reset_after_fork)

    def start(
        self,
        make_arena: Callable[[], Arena],
        tend: Callable[[], None],
        refused: Callable[[str], Arena | None],
        role: Callable[[], str] = lambda: SERVER,
        born: Callable[[], events.ProcessStarted | None] = lambda: None,
    ) -> None:
        """Facts are taken from now on. Rings are made at the first one.

        `tend` is called when rings were made and then at most once a second from the request path: it sees to it that
        somebody reads. `refused` is told why there is no shared memory and may give another arena. `role` says what this
        process is in its server, and `born` how it began, or None where that is nobody's business; asked when there are rings.
        """
        self._make_arena, self._ensure_reader, self._get_fallback_arena, self._detect_role = (
            make_arena,
            tend,
            refused,
            role,
        )
        self._get_process_start = born
        self._hook_reports.clear()
        self._startup_events.clear()
        self.active = True

    def stop(self) -> None:
        """No more facts; the rings' locks are released, so that the reader finishes."""
        self.active = False
        arena, self.arena, self.requests = self.arena, None, None
        self._retire_batch_writers()
        if arena is not None:
            arena.close()

    def reset_after_fork(self) -> None:
        """In a forked child: the parent's rings are not ours to write."""
        self._make_lock, self._making_thread = threading.Lock(), 0
        self._lost_before = 0
        self._startup_events.clear()
        self._drop_rings()

    def discard_rings(self) -> None:
        """The rings are nobody's any more (their folder was removed): the next fact makes others.

        What was in flight is lost, and counted there.
        """
        if self.requests is not None:
            self._lost_before += self.requests.in_flight
        arena = self.arena
        self._drop_rings()
        if arena is not None:
            arena.close()

    def _drop_rings(self) -> None:
        self.requests = self.arena = None
        self._maintained_at = 0
        self._retire_batch_writers()

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def open_request(self, arrived: events.RequestArrived) -> int:
        """States an arrival and returns the handle; 0 where it could not be recorded."""
        if not self.active:
            return 0
        try:
            if self.requests is not None and arrived.at - self._maintained_at > CHECK_NS:
                self._run_maintenance(arrived.at)
            writer = self.requests or self._make_rings()
            return writer.open_request(arrived) if writer is not None else 0
        except Exception as broken:  # the request goes on without us
            self._report_lost_event(broken)
            return 0

    def _run_maintenance(self, at: int) -> None:
        self._maintained_at = at
        self._ensure_reader()
        if at - self._repeated_at > REPEAT_NS:
            self._repeated_at = at
            for said in list(self._hook_reports.values()):  # another thread may bind hooks just now
                self.record_process(said._replace(at=at))

    def record(self, handle: int, fact: Any) -> None:
        """States a fact about a request."""
        writer = self.requests
        if writer is not None and handle:
            try:
                writer.write_event(handle, fact)
            except Exception as broken:  # the request goes on without us
                self._report_lost_event(broken)

    def close_request(self, handle: int, ended: events.RequestEnded | events.ExchangeEnded) -> None:
        """States the end of a request and frees its slot."""
        writer = self.requests
        if writer is not None and handle:
            try:
                if self.deferred_recorders:
                    for say in list(self.deferred_recorders.values()):
                        say()
                writer.close_request(handle, ended)
            except Exception as broken:  # the request goes on without us
                self._report_lost_event(broken)

    def record_pause(self, cause: str, started_at: int, ended_at: int) -> None:
        """States that this process was held up; nothing where nobody records."""
        self.record_process(events.PauseSeen(ended_at, started_at, cause))

    def count(self, mark: str, since: int, at: int, count: int) -> None:
        """States that something happened so many times; nothing where nobody records."""
        self.record_process(events.MarkSeen(at, since, mark, count))

    def record_process(self, fact: Any) -> None:
        """States a fact of this process, and of no request; nothing where nobody records."""
        writer = self.requests
        if writer is not None:
            try:
                writer.write_event(0, fact)
            except Exception as broken:  # whoever was held up already is not to be stopped as well
                self._report_lost_event(broken)

    def record_startup(self, fact: Any) -> None:
        """States a fact of how this process gets ready; kept until there are rings, so that it starts nothing."""
        if not self.active:
            return
        if len(self._startup_events) < MAX_STARTUP_EVENTS:
            self._startup_events.append(fact)
        self.record_process(fact)

    def _report_lost_event(self, broken: Exception) -> None:
        if self.requests is not None:
            self.requests.words[layout.W_LOST] += 1
        if not self._is_loss_logged:
            self._is_loss_logged = True
            where = traceback.extract_tb(broken.__traceback__)[-1]
            log.error("a fact is lost: %s at %s:%s", type(broken).__name__, where.filename, where.lineno)

    def report_hooks(self, integration: str, active: int, total: int) -> None:
        """Says how many hooks are bound; kept until there are rings, so that it starts nothing by itself."""
        said = self._hook_reports[integration] = events.HooksReported(
            _clock.now(), integration, active, total
        )
        self.record_process(said)

    def ensure_rings(self) -> bool:
        """Makes the rings now (an engine was imported); False where there are none to be had."""
        if not self.active:
            return False
        try:
            made = self.requests is not None or self._make_rings() is not None
            if made:
                self._ensure_reader()
            return made
        except Exception as broken:  # it would be the user's import that fails
            self._report_lost_event(broken)
            return False

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    def acquire_batch_writer(self, engine: str) -> BatchWriter | None:
        """A step log for one engine thread to write to, until it gives it back; None = run unrecorded."""
        if not self.active:
            return None
        free = self._free_batch_writers.get(engine)
        if free:
            try:
                return free.popleft().assign_to_thread()
            except IndexError:
                pass
        if (
            self._is_step_recording_full
            or (self.requests is None and self._make_rings() is None)
            or self.arena is None
        ):
            return None
        try:
            if len(self._batch_writers) >= MAX_STEP_RINGS:
                raise RingUnavailable(f"more than {MAX_STEP_RINGS} engines")
            number = next(self._ring_numbers)
            writer = StepWriter(self.arena, f"{self._prefix}-{number}", engine)
        except RingUnavailable as refusal:
            # Asked again at every step, it would be refused at every step.
            self._is_step_recording_full = True
            if self.requests is not None:
                self.requests.words[layout.W_UNRECORDED] += 1
            log.warning("steps of %s are not recorded: %s", engine, refusal)
            return None
        made = BatchWriter(writer, HandleTable(), number)
        self._batch_writers.append(made)
        return made.assign_to_thread()

    def release_batch_writer(self, engine: str, log: BatchWriter) -> None:
        """This thread is done with the log; the next one may go on with it."""
        if log.alive:
            log.clear_batch()
            log.handles.clear()
            # The next one on this thread goes on with this one: the steps of a request are easier told from one log.
            self._free_batch_writers.setdefault(engine, deque()).appendleft(log)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _make_rings(self) -> RequestWriter | None:
        """This process's rings, made by the first that comes; the others wait. Nothing for what we do meanwhile."""
        if self._make_arena is None or self._making_thread == threading.get_ident():
            return None
        with self._make_lock:
            if self.requests is not None or not self.active:
                return self.requests
            self._making_thread = threading.get_ident()
            try:
                made = self._create_writer(self._make_arena)
            finally:
                self._making_thread = 0
        if made is not None:
            self._ensure_reader()
        # Whoever tends may have given them up, if nobody can be started who reads them.
        return self.requests if made is None or self.requests is made else self._make_rings()

    def _create_writer(self, make_arena: Callable[[], Arena]) -> RequestWriter | None:
        self._prefix, self.role = f"{os.getpid()}-{_clock.now():x}", self._detect_role()
        try:
            arena = make_arena()
            writer = RequestWriter(arena, self._prefix, self.role)
        except RingUnavailable as refusal:
            other = self._get_fallback_arena(str(refusal))
            if other is None:
                self.active = False
                return None
            arena, writer = other, RequestWriter(other, self._prefix, self.role)
        for said in (self._get_process_start(), *self._startup_events, *self._hook_reports.values()):
            if said is not None:
                writer.write_event(0, said)
        writer.words[layout.W_UNRECORDED] += self._lost_before
        self._lost_before, self._repeated_at = 0, _clock.now()
        self.arena, self.requests = arena, writer
        return writer

    def _retire_batch_writers(self) -> None:
        for log in self._batch_writers:
            log.detach_ring()
        self._batch_writers.clear()
        self._free_batch_writers.clear()
        self._is_step_recording_full = False


recorder = Recorder()
"""The recorder of this process."""
