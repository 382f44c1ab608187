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
from otel_infer.ringbuffer.batch_writer import Handles, StepLog
from otel_infer.ringbuffer.step_writer import StepWriter
from otel_infer.ringbuffer.writer import Arena, RequestWriter, RingRefused

log = logging.getLogger("otel_infer")

SERVER = "server"
"""A process that may stand for its server: one of its others may be that of an engine alone."""
CHECK_NS = 1_000_000_000
RESTATE_NS = 60 * CHECK_NS
"""What holds for long is said again: a reader that was started again finds the first telling overwritten."""
MAX_STARTUP = 128
"""Facts of the start that are kept for the rings to come."""
MAX_STEP_LOGS = 12
"""Step rings of one process; engines beyond it run unrecorded, and are counted."""


class Recorder:
    """Where integrations state facts. Never raises into its caller once started.

    A fact that cannot be stated is lost and counted; the first one is named in the log.
    """

    def __init__(self) -> None:
        self.active = False
        self.role = SERVER
        self._role: Callable[[], str] = lambda: SERVER
        self.requests: RequestWriter | None = None
        self.arena: Arena | None = None
        self._make_arena: Callable[[], Arena] | None = None
        self._refused: Callable[[str], Arena | None] = lambda reason: None
        self._tend: Callable[[], None] = lambda: None
        self._tended_at = self._restated_at = 0
        self._names = itertools.count(1)
        self._free_logs: dict[str, deque[StepLog]] = {}
        self._logs: list[StepLog] = []
        self._no_more_logs = False
        self._said: dict[str, events.HooksReported] = {}
        self._born: Callable[[], events.ProcessStarted | None] = lambda: None
        self._startup: list[Any] = []
        self._lost_before = 0
        self._making = threading.Lock()
        self._maker = 0
        self._complained = False
        self.overdue: dict[str, Callable[[], None]] = {}
        """Each says what could not be said when it happened, before a request ends that it may concern."""
        os.register_at_fork(after_in_child=self.forget)

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
        self._make_arena, self._tend, self._refused, self._role = make_arena, tend, refused, role
        self._born = born
        self._said.clear()
        self._startup.clear()
        self.active = True

    def stop(self) -> None:
        """No more facts; the rings' locks are released, so that the reader finishes."""
        self.active = False
        arena, self.arena, self.requests = self.arena, None, None
        self._forget_logs()
        if arena is not None:
            arena.close()

    def forget(self) -> None:
        """In a forked child: the parent's rings are not ours to write."""
        self._making, self._maker = threading.Lock(), 0
        self._lost_before = 0
        self._startup.clear()
        self._let_go()

    def renew(self) -> None:
        """The rings are nobody's any more (their folder was removed): the next fact makes others.

        What was in flight is lost, and counted there.
        """
        if self.requests is not None:
            self._lost_before += self.requests.in_flight
        arena = self.arena
        self._let_go()
        if arena is not None:
            arena.close()

    def _let_go(self) -> None:
        self.requests = self.arena = None
        self._tended_at = 0
        self._forget_logs()

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self, arrived: events.RequestArrived) -> int:
        """States an arrival and returns the handle; 0 where it could not be recorded."""
        if not self.active:
            return 0
        try:
            if self.requests is not None and arrived.at - self._tended_at > CHECK_NS:
                self._look_after(arrived.at)
            writer = self.requests or self._make()
            return writer.open(arrived) if writer is not None else 0
        except Exception as broken:  # the request goes on without us
            self._broke(broken)
            return 0

    def _look_after(self, at: int) -> None:
        self._tended_at = at
        self._tend()
        if at - self._restated_at > RESTATE_NS:
            self._restated_at = at
            for said in list(self._said.values()):  # another thread may bind hooks just now
                self.stated(said._replace(at=at))

    def state(self, handle: int, fact: Any) -> None:
        """States a fact about a request."""
        writer = self.requests
        if writer is not None and handle:
            try:
                writer.state(handle, fact)
            except Exception as broken:  # the request goes on without us
                self._broke(broken)

    def close(self, handle: int, ended: events.RequestEnded | events.ExchangeEnded) -> None:
        """States the end of a request and frees its slot."""
        writer = self.requests
        if writer is not None and handle:
            try:
                if self.overdue:
                    for say in list(self.overdue.values()):
                        say()
                writer.close(handle, ended)
            except Exception as broken:  # the request goes on without us
                self._broke(broken)

    def paused(self, cause: str, started_at: int, ended_at: int) -> None:
        """States that this process was held up; nothing where nobody records."""
        self.stated(events.PauseSeen(ended_at, started_at, cause))

    def marked(self, mark: str, since: int, at: int, count: int) -> None:
        """States that something happened so many times; nothing where nobody records."""
        self.stated(events.MarkSeen(at, since, mark, count))

    def stated(self, fact: Any) -> None:
        """States a fact of this process, and of no request; nothing where nobody records."""
        writer = self.requests
        if writer is not None:
            try:
                writer.state(0, fact)
            except Exception as broken:  # whoever was held up already is not to be stopped as well
                self._broke(broken)

    def startup(self, fact: Any) -> None:
        """States a fact of how this process gets ready; kept until there are rings, so that it starts nothing."""
        if not self.active:
            return
        if len(self._startup) < MAX_STARTUP:
            self._startup.append(fact)
        self.stated(fact)

    def _broke(self, broken: Exception) -> None:
        if self.requests is not None:
            self.requests.words[layout.W_LOST] += 1
        if not self._complained:
            self._complained = True
            where = traceback.extract_tb(broken.__traceback__)[-1]
            log.error("a fact is lost: %s at %s:%s", type(broken).__name__, where.filename, where.lineno)

    def report_hooks(self, integration: str, active: int, total: int) -> None:
        """Says how many hooks are bound; kept until there are rings, so that it starts nothing by itself."""
        said = self._said[integration] = events.HooksReported(_clock.now(), integration, active, total)
        self.stated(said)

    def ensure(self) -> bool:
        """Makes the rings now (an engine was imported); False where there are none to be had."""
        if not self.active:
            return False
        try:
            made = self.requests is not None or self._make() is not None
            if made:
                self._tend()
            return made
        except Exception as broken:  # it would be the user's import that fails
            self._broke(broken)
            return False

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    def step_log(self, engine: str) -> StepLog | None:
        """A step log for one engine thread to write to, until it gives it back; None = run unrecorded."""
        if not self.active:
            return None
        free = self._free_logs.get(engine)
        if free:
            try:
                return free.popleft().handed_over()
            except IndexError:
                pass
        if self._no_more_logs or (self.requests is None and self._make() is None) or self.arena is None:
            return None
        try:
            if len(self._logs) >= MAX_STEP_LOGS:
                raise RingRefused(f"more than {MAX_STEP_LOGS} engines")
            number = next(self._names)
            writer = StepWriter(self.arena, f"{self._prefix}-{number}", engine)
        except RingRefused as refusal:
            # Asked again at every step, it would be refused at every step.
            self._no_more_logs = True
            if self.requests is not None:
                self.requests.words[layout.W_UNRECORDED] += 1
            log.warning("steps of %s are not recorded: %s", engine, refusal)
            return None
        made = StepLog(writer, Handles(), number)
        self._logs.append(made)
        return made.handed_over()

    def give_back(self, engine: str, log: StepLog) -> None:
        """This thread is done with the log; the next one may go on with it."""
        if log.alive:
            log.idle()
            log.handles.clear()
            # The next one on this thread goes on with this one: the steps of a request are easier told from one log.
            self._free_logs.setdefault(engine, deque()).appendleft(log)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _make(self) -> RequestWriter | None:
        """This process's rings, made by the first that comes; the others wait. Nothing for what we do meanwhile."""
        if self._make_arena is None or self._maker == threading.get_ident():
            return None
        with self._making:
            if self.requests is not None or not self.active:
                return self.requests
            self._maker = threading.get_ident()
            try:
                made = self._use(self._make_arena)
            finally:
                self._maker = 0
        if made is not None:
            self._tend()
        # Whoever tends may have given them up, if nobody can be started who reads them.
        return self.requests if made is None or self.requests is made else self._make()

    def _use(self, make_arena: Callable[[], Arena]) -> RequestWriter | None:
        self._prefix, self.role = f"{os.getpid()}-{_clock.now():x}", self._role()
        try:
            arena = make_arena()
            writer = RequestWriter(arena, self._prefix, self.role)
        except RingRefused as refusal:
            other = self._refused(str(refusal))
            if other is None:
                self.active = False
                return None
            arena, writer = other, RequestWriter(other, self._prefix, self.role)
        for said in (self._born(), *self._startup, *self._said.values()):
            if said is not None:
                writer.state(0, said)
        writer.words[layout.W_UNRECORDED] += self._lost_before
        self._lost_before, self._restated_at = 0, _clock.now()
        self.arena, self.requests = arena, writer
        return writer

    def _forget_logs(self) -> None:
        for log in self._logs:
            log.retire()
        self._logs.clear()
        self._free_logs.clear()
        self._no_more_logs = False


recorder = Recorder()
"""The recorder of this process."""
