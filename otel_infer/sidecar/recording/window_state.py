"""What is remembered of the facts that fell out of the window: what those in it cannot be understood without.

That is: processes, engines and hooks; all that was said of requests which are still in flight; of every engine the steps
since the keyframe before the oldest of those arrived, with the others that were in them, as far as there is room, and at
least since the last keyframe, so that it is known who is in its batch. A request that may have been in steps which are
forgotten is marked, as one of which steps were lost. Of a request in several processes all parts are remembered, or none.
Who ended and is still in the batch of the first of those steps, or in a step that is not done, is remembered too: an aborted
request's prompt is what a later one waits behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from otel_infer.ringbuffer import events
from otel_infer.sidecar.recording.packed_events import AT, CODES, SPAN_ID, Held, Row, Section, Steps, Told

MOST_OF_ONE = 1 << 16
"""Bytes that are remembered of one request: one of which more was said is left out as a whole."""
MOST_STEPS = 1 << 20
"""Bytes of one engine's steps."""
MOST_SECTIONS = 1024
"""Keyframes of one engine; it says one every second."""
PAUSES = 256
"""Pauses of one process and cause, and marks of a kind."""
LEFT_OUT = 1024
"""Requests that were left out are counted up to so many."""

Key = tuple[int, int]
_NEVER = 1 << 63


class Edge:
    """Fed with the rows that leave the window, in their order. `size`: bytes that are held, at most about `limit`."""

    def __init__(self, limit: int) -> None:
        self.size = 0
        self._limit = limit
        self._known: dict[Row, Row] = {}
        self._told: dict[Key, Told] = {}
        self._left_out: dict[Key, bytes] = {}
        self._steps: dict[int, deque[Section]] = {}
        self._undone: dict[int, int] = {}
        """Of each engine with steps in flight, the last of them."""
        self._pauses: dict[tuple[int, str], deque[Row]] = {}
        self._clocks: deque[Row] = deque(maxlen=PAUSES)
        self._handlers = {
            CODES[kind]: handler
            for kind, handler in (
                (events.RequestArrived, self._arrived),
                (events.LiveRecovered, self._recovered),
                (events.RequestEnded, self._ended),
                (events.LiveListed, self._listed),
                (events.FactsLost, self._facts_lost),
                (events.StepScheduled, self._scheduled),
                (events.StepDone, self._done),
                (events.StepsLost, self._resync),
                (events.PauseSeen, self._paused),
                (events.MarkSeen, self._paused),
                (events.GpuClocksThrottled, self._clocks.append),
                (events.ProcessSeen, self._know),
                (events.EngineSeen, self._know),
                (events.HooksReported, self._hooks),
                (events.ProcessDied, self._died),
            )
        }

    @property
    def left_out(self) -> int:
        """Requests in flight of which there was too much to remember."""
        return len(set(self._left_out.values()))

    def fold(self, rows: Iterable[Row]) -> None:
        """Takes what leaves the window."""
        handlers = self._handlers
        for row in rows:
            handler = handlers.get(row[2])
            if handler is not None:
                handler(row)
            elif (row[0], row[1]) in self._told:
                self._add(row)

    def settle(self) -> None:
        """Packs the steps that were folded since, forgets what nobody needs, and sees to the limit."""
        oldest = self._oldest()
        for ring, sections in list(self._steps.items()):
            self.size += sum(section.pack() for section in sections)
            needed = oldest.get(self._process_of(ring), _NEVER)
            while len(sections) > 1 and (sections[1].at <= needed or _is_too_much(sections)):
                self.size -= sections.popleft().size
            if _is_too_much(sections):
                self._lose_steps(ring, sections[0].last_at)
        self._forget_ended()
        while self.size > self._limit and self._forget_section():
            self._forget_ended()
        self._forget_oldest()

    def held(self) -> Held:
        """What a reader is told before the window; little work, since others may wait for who asks."""
        self.size += sum(section.pack() for sections in self._steps.values() for section in sections)
        return Held(
            [*self._known.values(), *self._pauses_in_flight()],
            [bytes(told.packed) for told in self._told.values()],
            [
                Steps(ring, [packed for section in sections for packed in section.packed])
                for ring, sections in self._steps.items()
            ],
        )

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _arrived(self, row: Row) -> None:
        key = row[0], row[1]
        self._forget(key)
        self._left_out.pop(key, None)
        self._told[key] = Told(row[AT], row[SPAN_ID])
        self._add(row)

    def _recovered(self, row: Row) -> None:
        if (row[0], row[1]) not in self._told:
            self._arrived(row)

    def _ended(self, row: Row) -> None:
        key = row[0], row[1]
        told = self._told.get(key)
        if told is not None:
            told.ended_at = row[AT]
            self._add(row)
        self._left_out.pop(key, None)

    def _add(self, row: Row) -> None:
        told = self._told[row[0], row[1]]
        self.size += told.add(row)
        if len(told.packed) > MOST_OF_ONE:
            self._leave_out({told.span_id})

    def _leave_out(self, spans: set[bytes]) -> None:
        for key, told in [item for item in self._told.items() if item[1].span_id in spans]:
            if not told.ended_at:
                self._left_out[key] = told.span_id
            self._forget(key)
        while len(self._left_out) > LEFT_OUT:
            del self._left_out[next(iter(self._left_out))]

    def _forget(self, key: Key) -> None:
        told = self._told.pop(key, None)
        self.size -= len(told.packed) if told is not None else 0

    def _forget_oldest(self) -> None:
        """As many as there is no room for."""
        over, gone = self.size - self._limit, set[bytes]()
        for told in self._told.values():
            if over <= 0:
                break
            gone.add(told.span_id)
            over -= len(told.packed)
        if gone:
            self._leave_out(gone)

    def _forget_ended(self) -> None:
        """Those that were in no step that is remembered."""
        begin: dict[int, int] = {}
        needed: set[bytes] = set()
        for ring, sections in self._steps.items():
            process = self._process_of(ring)
            begin[process] = min(begin.get(process, _NEVER), sections[0].at)
            needed |= sections[0].ended
        busy = {*self._oldest(), *(self._process_of(ring) for ring in self._undone)}
        needed |= {
            told.span_id
            for (ring, _), told in self._told.items()
            if not told.ended_at or (told.ended_at > begin.get(ring, _NEVER) and ring in busy)
        }
        for key in [key for key, told in self._told.items() if told.span_id not in needed]:
            self._forget(key)

    def _oldest(self) -> dict[int, int]:
        """When the oldest request in flight arrived, by process."""
        in_flight = {told.span_id for told in self._told.values() if not told.ended_at}
        oldest: dict[int, int] = {}
        for (ring, _), told in self._told.items():
            if told.span_id in in_flight:
                oldest[ring] = min(oldest.get(ring, _NEVER), told.arrived_at)
        return oldest

    def _listed(self, row: Row) -> None:
        living = set(row[AT + 1])
        for key in [
            key for key in (*self._told, *self._left_out) if key[0] == row[0] and key[1] not in living
        ]:
            self._forget(key)
            self._left_out.pop(key, None)

    def _facts_lost(self, row: Row) -> None:
        """That something was lost marks who was in flight; how much was said before the window."""
        self._known[row[0], "lost"] = (*row[: AT + 1], 0, 0)

    def _paused(self, row: Row) -> None:
        """Of pauses and of marks alike, what it was stands third."""
        self._pauses.setdefault((row[0], row[AT + 2]), deque(maxlen=PAUSES)).append(row)

    def _pauses_in_flight(self) -> list[Row]:
        since = self._oldest()
        begin = min(since.values(), default=_NEVER)
        return [row for row in self._clocks if row[AT + 1] >= begin] + [
            row
            for (ring, _), pauses in self._pauses.items()
            for row in pauses
            if ring in since and row[AT] > since[ring]
        ]

    # ── processes ────────────────────────────────────────────────────────────────────────────────────────────────

    def _know(self, row: Row) -> None:
        self._known[row[0], row[2]] = row

    def _process_of(self, engine: int) -> int:
        seen = self._known.get((engine, CODES[events.EngineSeen]))
        return int(seen[AT + 1]) if seen is not None else 0

    def _hooks(self, row: Row) -> None:
        self._known[row[0], row[2], row[AT + 1]] = row

    def _died(self, row: Row) -> None:
        ring = row[0]
        engine_seen = CODES[events.EngineSeen]
        engines = [
            known[0] for known in self._known.values() if known[2] == engine_seen and known[AT + 1] == ring
        ]
        for engine in engines:
            self._forget_steps(engine)
        for key in [key for key in self._known if key[0] == ring or key[0] in engines]:
            del self._known[key]
        for request in [key for key in (*self._told, *self._left_out) if key[0] == ring]:
            self._forget(request)
            self._left_out.pop(request, None)
        for pauses in [key for key in self._pauses if key[0] == ring]:
            del self._pauses[pauses]

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _scheduled(self, row: Row) -> None:
        self._undone[row[0]] = row[AT + 1]
        if not row[AT + 2]:
            self._step(row)
            return
        self._resync(row)
        process = self._process_of(row[0])
        members = [self._told.get((process, handle)) for handle in row[AT + 5]]
        self._steps[row[0]][-1].ended = frozenset(told.span_id for told in members if told and told.ended_at)

    def _done(self, row: Row) -> None:
        if row[AT + 1] >= self._undone.get(row[0], 0):
            self._undone.pop(row[0], None)
        self._step(row)

    def _resync(self, row: Row) -> None:
        section = Section(row[AT])
        section.new.append(row)
        self._steps.setdefault(row[0], deque()).append(section)

    def _step(self, row: Row) -> None:
        """Steps whose keyframe is not known say nothing but that there were some."""
        sections = self._steps.get(row[0])
        if sections:
            sections[-1].new.append(row)
        else:
            self._lose_steps(row[0], row[AT])

    def _lose_steps(self, ring: int, at: int) -> None:
        """Whoever is in flight then is marked."""
        self._forget_steps(ring)
        self._resync((ring, 0, CODES[events.StepsLost], at, 0))

    def _forget_section(self) -> bool:
        """The oldest steps of all engines; False if those that are left are needed."""
        several = [sections for sections in self._steps.values() if len(sections) > 1]
        if not several:
            return False
        self.size -= min(several, key=lambda sections: sections[0].at).popleft().size
        return True

    def _forget_steps(self, ring: int) -> None:
        self._undone.pop(ring, None)
        self.size -= sum(section.size for section in self._steps.pop(ring, ()))


def _is_too_much(sections: deque[Section]) -> bool:
    return len(sections) > MOST_SECTIONS or sum(section.size for section in sections) > MOST_STEPS
