"""This process's rings, made when the first fact is stated, forgotten in a forked child.

There is one `recorder` per process. It is off until the composition root starts it, and then costs one attribute look-up
where nothing is to be said.
"""

from __future__ import annotations

import itertools
import logging
import os
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from otel_infer import clock, facts
from otel_infer.ring import write
from otel_infer.ring.membership import Handles, StepLog

log = logging.getLogger("otel_infer")

CHECK_NS = 1_000_000_000
MAX_STEP_LOGS = 12
"""Step rings of one process; engines beyond it run unrecorded, and are counted."""


class Recorder:
    """Where integrations state facts. Never raises into its caller once started."""

    def __init__(self) -> None:
        self.active = False
        self.role = "server"
        self.requests: write.RequestWriter | None = None
        self.arena: write.Arena | None = None
        self._make_arena: Callable[[], write.Arena] | None = None
        self._refused: Callable[[str], write.Arena | None] = lambda reason: None
        self._tend: Callable[[], None] = lambda: None
        self._tended_at = 0
        self._names = itertools.count(1)
        self._free_logs: dict[str, deque[StepLog]] = {}
        self._logs: list[StepLog] = []
        self._said: list[facts.HooksReported] = []
        os.register_at_fork(after_in_child=self.forget)

    def start(
        self,
        make_arena: Callable[[], write.Arena],
        tend: Callable[[], None],
        refused: Callable[[str], write.Arena | None],
        role: str = "server",
    ) -> None:
        """Facts are taken from now on. Rings are made at the first one.

        `tend` is called when rings were made and then at most once a second from the request path: it sees to it that
        somebody reads. `refused` is told why there is no shared memory and may give another arena.
        """
        self._make_arena, self._tend, self._refused, self.role = make_arena, tend, refused, role
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
        self.requests = self.arena = None
        self._tended_at = 0
        self._forget_logs()

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self, arrived: facts.RequestArrived) -> int:
        """States an arrival and returns the handle; 0 where it could not be recorded."""
        if not self.active:
            return 0
        try:
            writer = self.requests or self._make()
            if writer is None:
                return 0
            if arrived.at - self._tended_at > CHECK_NS:
                self._tended_at = arrived.at
                self._tend()
            return writer.open(arrived)
        except Exception as broken:  # the request goes on without us
            self._broke(broken)
            return 0

    def state(self, handle: int, fact: Any) -> None:
        """States a fact about a request."""
        writer = self.requests
        if writer is not None and handle:
            try:
                writer.state(handle, fact)
            except Exception as broken:  # the request goes on without us
                self._broke(broken)

    def _broke(self, broken: Exception) -> None:
        """Something of ours is wrong: said once, then nothing is recorded in this process any more."""
        if self.active:
            self.active = False
            where = traceback.extract_tb(broken.__traceback__)[-1]
            log.error("recording stops: %s at %s:%s", type(broken).__name__, where.filename, where.lineno)

    def reached(self, handle: int, state: int) -> None:
        """Notes the last state of a request in flight (`states` of `ring.layout`)."""
        writer = self.requests
        if writer is not None and handle:
            writer.reached(handle, state, clock.now())

    def close(self, handle: int, ended: facts.RequestEnded) -> None:
        """States the end of a request and frees its slot."""
        writer = self.requests
        if writer is not None and handle:
            writer.close(handle, ended)

    def report_hooks(self, integration: str, active: int, total: int) -> None:
        """Says how many hooks are bound; kept until there are rings, so that it starts nothing by itself."""
        said = facts.HooksReported(clock.now(), integration, active, total)
        if self.requests is not None:
            self.requests.state(0, said)
        else:
            self._said.append(said)

    def ensure(self) -> bool:
        """Makes the rings now (an engine was imported); False where there are none to be had."""
        if not self.active:
            return False
        made = self.requests is not None or self._make() is not None
        if made:
            self._tend()
        return made

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    def step_log(self, engine: str) -> StepLog | None:
        """A step log for one engine thread to write to, until it gives it back; None = run unrecorded."""
        if not self.active:
            return None
        free = self._free_logs.get(engine)
        if free:
            try:
                return free.popleft()
            except IndexError:
                pass
        if self.requests is None and self._make() is None:
            return None
        if self.arena is None or len(self._logs) >= MAX_STEP_LOGS:
            return None
        try:
            writer = write.StepWriter(self.arena, f"{self._prefix}-{next(self._names)}", engine)
        except write.RingRefused:
            return None
        log = StepLog(writer, Handles())
        self._logs.append(log)
        return log

    def give_back(self, engine: str, log: StepLog) -> None:
        """This thread is done with the log; the next one may go on with it."""
        if log.alive:
            log.idle()
            log.handles.clear()
            self._free_logs.setdefault(engine, deque()).append(log)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _make(self) -> write.RequestWriter | None:
        if self._make_arena is None:
            return None
        # Two threads may both come here: the one that stores last wins, the other's ring is read and stays empty.
        try:
            self._use(self._make_arena())
        except write.RingRefused as refusal:
            other = self._refused(str(refusal))
            if other is None:
                self.active = False
                return None
            self._use(other)
        for said in self._said:
            self.requests.state(0, said) if self.requests else None
        self._tend()
        return self.requests

    def _use(self, arena: write.Arena) -> None:
        self._prefix = f"{os.getpid()}-{clock.now():x}"
        self.requests = write.RequestWriter(arena, self._prefix, self.role)
        self.arena = arena

    def _forget_logs(self) -> None:
        for log in self._logs:
            log.retire()
        self._logs.clear()
        self._free_logs.clear()


recorder = Recorder()
"""The recorder of this process."""
