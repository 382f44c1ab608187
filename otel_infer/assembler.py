"""Facts in, records out. Pure: no clock, thread, I/O or OpenTelemetry; the same facts give the same records anywhere.

Facts come ordered by time. Requests are known by (ring of their process, handle), steps by (ring of their engine, number).
A request is concluded a little after its last fact, because the step that held its last token may be told later than the
end that another thread saw. Intervals are derived from instants; a stage that was not seen is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from otel_infer import facts
from otel_infer.conclusion import Request, conclude
from otel_infer.records import RequestRecord, StepRecord
from otel_infer.steplog import StepLog

GRACE_NS = 300_000_000
"""How long an ended request waits for facts that were stated before its end and are read after it."""

Key = tuple[int, int]


class Assembler:
    """Feed it facts; drain `concluded` and `steps`."""

    def __init__(self) -> None:
        self.open: dict[Key, Request] = {}
        self.engines: dict[int, StepLog] = {}
        self.pids: dict[int, tuple[int, str]] = {}
        self.hooks: dict[tuple[int, str], tuple[int, int]] = {}
        self.facts_lost = 0
        self.facts_torn = 0
        self.steps: list[StepRecord] = []
        self._ended: list[tuple[int, Key]] = []
        self._concluded_at: dict[int, int] = {}
        self._handlers: dict[type, Callable[[int, int, Any], None]] = {
            facts.RequestArrived: self._arrived,
            facts.LiveRecovered: self._recovered,
            facts.RequestEnded: self._request_ended,
            facts.HooksReported: self._hooks,
            facts.StepScheduled: self._scheduled,
            facts.StepDone: self._done,
            facts.StepsLost: self._steps_lost,
            facts.FactsLost: self._facts_lost,
            facts.LiveListed: self._listed,
            facts.ProcessSeen: self._process_seen,
            facts.EngineSeen: self._engine_seen,
            facts.ProcessDied: self._died,
        }

    def feed(self, said: Iterable[facts.RingFact]) -> None:
        """Takes facts in order of time."""
        for ring, handle, fact in said:
            handler = self._handlers.get(type(fact))
            if handler is not None:
                handler(ring, handle, fact)
                continue
            request = self.open.get((ring, handle))
            if request is not None:
                request.take(fact)

    def concluded(self, horizon: int) -> list[RequestRecord]:
        """The requests that ended long enough before `horizon` (monotonic ns) that nothing more can come."""
        due = [(at, key) for at, key in self._ended if at + GRACE_NS <= horizon]
        if not due:
            return []
        self._ended = [(at, key) for at, key in self._ended if at + GRACE_NS > horizon]
        records = []
        for _, key in due:
            request = self.open.pop(key, None)
            if request is not None and request.ended_at + GRACE_NS > self._concluded_at.get(request.ring, 0):
                records.append(conclude(request))
        return records

    def drain_steps(self) -> list[StepRecord]:
        """The steps done since the last call."""
        steps, self.steps = self.steps, []
        return steps

    def active(self) -> dict[str, int]:
        """How many requests are in flight, by `queued` (not scheduled yet) and `running`."""
        counts = {"queued": 0, "running": 0}
        for request in self.open.values():
            if not request.ended_at:
                counts["running" if request.is_scheduled else "queued"] += 1
        return counts

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _arrived(self, ring: int, handle: int, fact: facts.RequestArrived) -> None:
        self.open[ring, handle] = Request(ring, handle, fact)

    def _recovered(self, ring: int, handle: int, fact: facts.LiveRecovered) -> None:
        if (ring, handle) not in self.open:
            arrived = facts.RequestArrived(
                *fact[:5], bytes(8), fact.flags & ~facts.OWN_SERVER_SPAN, "", "", "", ""
            )
            request = self.open[ring, handle] = Request(ring, handle, arrived)
            request.telemetry_lost = True

    def _request_ended(self, ring: int, handle: int, fact: facts.RequestEnded) -> None:
        request = self.open.get((ring, handle))
        if request is not None and not request.ended_at:
            request.end(fact)
            self._ended.append((fact.at, (ring, handle)))

    def _died(self, ring: int, handle: int, fact: facts.ProcessDied) -> None:
        for (owner, number), request in list(self.open.items()):
            if owner == ring and not request.ended_at:
                ended = facts.RequestEnded(fact.at, facts.ERROR, "process_died", 0, 0, 0, 0)
                self._request_ended(owner, number, ended)

    def _listed(self, ring: int, handle: int, fact: facts.LiveListed) -> None:
        living = set(fact.live)
        for (owner, number), request in list(self.open.items()):
            if owner == ring and number not in living and not request.ended_at:
                request.telemetry_lost = True
                self._request_ended(owner, number, facts.RequestEnded(fact.at, facts.OK, "", 0, 0, 0, 0))

    def _facts_lost(self, ring: int, handle: int, fact: facts.FactsLost) -> None:
        self.facts_lost += fact.lost
        self.facts_torn += fact.torn
        for (owner, _), request in self.open.items():
            if owner == ring:
                request.telemetry_lost = True

    # ── processes ────────────────────────────────────────────────────────────────────────────────────────────────

    def _process_seen(self, ring: int, handle: int, fact: facts.ProcessSeen) -> None:
        self.pids[ring] = (fact.pid, fact.role)
        self._concluded_at[ring] = fact.concluded_at

    def _engine_seen(self, ring: int, handle: int, fact: facts.EngineSeen) -> None:
        self.engines[ring] = StepLog(fact.engine, fact.pid, fact.process)

    def _hooks(self, ring: int, handle: int, fact: facts.HooksReported) -> None:
        self.hooks[ring, fact.integration] = (fact.active, fact.total)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _request_of(self, process: int) -> Callable[[int], Request | None]:
        opened = self.open
        return lambda handle: opened.get((process, handle))

    def _scheduled(self, ring: int, handle: int, fact: facts.StepScheduled) -> None:
        engine = self.engines.get(ring)
        if engine is not None:
            engine.scheduled(fact, self._request_of(engine.process))

    def _done(self, ring: int, handle: int, fact: facts.StepDone) -> None:
        engine = self.engines.get(ring)
        if engine is not None:
            record = engine.done(fact, self._request_of(engine.process))
            if record is not None and fact.at > self._concluded_at.get(engine.process, 0):
                self.steps.append(record)

    def _steps_lost(self, ring: int, handle: int, fact: facts.StepsLost) -> None:
        self.facts_lost += fact.lost
        engine = self.engines.get(ring)
        if engine is None:
            return
        engine.lost(self._request_of(engine.process))
        for (owner, _), request in self.open.items():
            if owner == engine.process:
                request.telemetry_lost = True
