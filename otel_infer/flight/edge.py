"""What is remembered of the facts that fell out of the window: what those in it cannot be understood without.

That is: processes, engines and hooks; all that was said of requests which are still in flight; of every engine the steps
since the keyframe before the oldest of those arrived, with the others that were in them, as far as there is room, and at
least since the last keyframe, so that it is known who is in its batch. A request that may have been in steps which are
forgotten is marked, as one of which steps were lost.
"""

from __future__ import annotations

import marshal
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from otel_infer import facts, tape

CODES = {kind: code for code, kind in enumerate(tape.KINDS)}
MARSHAL = 2
"""Version of `marshal` without references, which cost more than they save."""
MOST_OF_ONE = 1 << 16
"""Bytes that are remembered of one request: one of which more was said is left out as a whole."""
MOST_STEPS = 1 << 20
"""Bytes of one engine's steps."""
MOST_SECTIONS = 1024
"""Keyframes of one engine; it says one every second."""
FASTEST = 1
PAUSES = 256
"""Pauses, and marks, of one process."""

Row = tuple[Any, ...]
"""(ring, handle, code of the fact, its fields …)."""
Key = tuple[int, int]
AT = 3
_NEVER = 1 << 63


class _Section:
    """Steps of one engine from a keyframe, or a loss, up to the next."""

    __slots__ = ("at", "last_at", "new", "packed", "size")

    def __init__(self, at: int) -> None:
        self.at = self.last_at = at
        self.new: list[Row] = []
        self.packed: list[bytes] = []
        self.size = 0

    def pack(self) -> int:
        """Packs what is new; how many bytes that is."""
        if not self.new:
            return 0
        self.last_at = self.new[-1][AT]
        packed = zlib.compress(marshal.dumps(self.new, MARSHAL), FASTEST)
        self.packed.append(packed)
        self.size += len(packed)
        self.new = []
        return len(packed)

    def rows(self) -> list[Row]:
        return [row for blob in self.packed for row in marshal.loads(zlib.decompress(blob))] + self.new


class _Told:
    """What was said of one request: rows, each behind its length. `ended_at`: 0 = it is in flight."""

    __slots__ = ("arrived_at", "ended_at", "packed")

    def __init__(self, arrived_at: int) -> None:
        self.arrived_at, self.ended_at = arrived_at, 0
        self.packed = bytearray()

    def add(self, row: Row) -> int:
        packed = marshal.dumps(row, MARSHAL)
        self.packed += len(packed).to_bytes(4, "little") + packed
        return len(packed) + 4

    def rows(self) -> Iterator[Row]:
        packed, at = self.packed, 0
        while at < len(packed):
            end = at + 4 + int.from_bytes(packed[at : at + 4], "little")
            yield marshal.loads(packed[at + 4 : end])
            at = end


class Edge:
    """Fed with the rows that leave the window, in their order. `size`: bytes that are held, at most about `limit`."""

    def __init__(self, limit: int) -> None:
        self.size = 0
        self.left_out = 0
        """Requests in flight of which there was too much to remember."""
        self._limit = limit
        self._known: dict[Row, Row] = {}
        self._told: dict[Key, _Told] = {}
        self._steps: dict[int, deque[_Section]] = {}
        self._pauses: dict[int, deque[Row]] = {}
        self._handlers = {
            CODES[kind]: handler
            for kind, handler in (
                (facts.RequestArrived, self._arrived),
                (facts.LiveRecovered, self._recovered),
                (facts.RequestEnded, self._ended),
                (facts.LiveListed, self._listed),
                (facts.FactsLost, self._facts_lost),
                (facts.StepScheduled, self._scheduled),
                (facts.StepDone, self._step),
                (facts.StepsLost, self._resync),
                (facts.PauseSeen, self._paused),
                (facts.MarkSeen, self._paused),
                (facts.ProcessSeen, self._know),
                (facts.EngineSeen, self._know),
                (facts.HooksReported, self._hooks),
                (facts.ProcessDied, self._died),
            )
        }

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
        while self.size > self._limit and self._told:
            key, told = next(iter(self._told.items()))
            self.left_out += not told.ended_at
            self._forget(key)

    def rows(self) -> list[Row]:
        """What a reader is told before the window, in order of time."""
        told = [*self._known.values()]
        for request in self._told.values():
            told += request.rows()
        told += self._pauses_in_flight()
        for ring, sections in self._steps.items():
            told += _beginning([row for section in sections for row in section.rows()], ring)
        return sorted(told, key=lambda row: row[AT])

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _arrived(self, row: Row) -> None:
        self._forget((row[0], row[1]))
        self._told[row[0], row[1]] = _Told(row[AT])
        self._add(row)

    def _recovered(self, row: Row) -> None:
        if (row[0], row[1]) not in self._told:
            self._arrived(row)

    def _ended(self, row: Row) -> None:
        told = self._told.get((row[0], row[1]))
        if told is not None:
            told.ended_at = row[AT]
            self._add(row)

    def _add(self, row: Row) -> None:
        told = self._told[row[0], row[1]]
        self.size += told.add(row)
        if len(told.packed) > MOST_OF_ONE:
            self._forget((row[0], row[1]))
            self.left_out += 1

    def _forget(self, key: Key) -> None:
        told = self._told.pop(key, None)
        self.size -= len(told.packed) if told is not None else 0

    def _forget_ended(self) -> None:
        """Those that were in no step that is remembered."""
        begin: dict[int, int] = {}
        for ring, sections in self._steps.items():
            process = self._process_of(ring)
            begin[process] = min(begin.get(process, _NEVER), sections[0].at)
        oldest = self._oldest()
        for key, told in list(self._told.items()):
            is_beside = told.ended_at > begin.get(key[0], _NEVER) and key[0] in oldest
            if told.ended_at and not is_beside:
                self._forget(key)

    def _oldest(self) -> dict[int, int]:
        """When the oldest request in flight arrived, by process."""
        oldest: dict[int, int] = {}
        for (ring, _), told in self._told.items():
            if not told.ended_at:
                oldest[ring] = min(oldest.get(ring, _NEVER), told.arrived_at)
        return oldest

    def _listed(self, row: Row) -> None:
        living = set(row[AT + 1])
        for key in [key for key in self._told if key[0] == row[0] and key[1] not in living]:
            self._forget(key)

    def _facts_lost(self, row: Row) -> None:
        """That something was lost marks who was in flight; how much was said before the window."""
        self._known[row[0], "lost"] = (*row[: AT + 1], 0, 0)

    def _paused(self, row: Row) -> None:
        self._pauses.setdefault(row[0], deque(maxlen=PAUSES)).append(row)

    def _pauses_in_flight(self) -> list[Row]:
        since = self._oldest()
        return [
            row
            for ring, pauses in self._pauses.items()
            for row in pauses
            if ring in since and row[AT] > since[ring]
        ]

    # ── processes ────────────────────────────────────────────────────────────────────────────────────────────────

    def _know(self, row: Row) -> None:
        self._known[row[0], row[2]] = row

    def _process_of(self, engine: int) -> int:
        seen = self._known.get((engine, CODES[facts.EngineSeen]))
        return int(seen[AT + 1]) if seen is not None else 0

    def _hooks(self, row: Row) -> None:
        self._known[row[0], row[2], row[AT + 1]] = row

    def _died(self, row: Row) -> None:
        ring = row[0]
        engine_seen = CODES[facts.EngineSeen]
        engines = [
            known[0] for known in self._known.values() if known[2] == engine_seen and known[AT + 1] == ring
        ]
        for engine in engines:
            self._forget_steps(engine)
        for key in [key for key in self._known if key[0] == ring or key[0] in engines]:
            del self._known[key]
        for request in [key for key in self._told if key[0] == ring]:
            self._forget(request)
        self._pauses.pop(ring, None)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _scheduled(self, row: Row) -> None:
        if row[AT + 2]:  # a keyframe
            self._resync(row)
        else:
            self._step(row)

    def _resync(self, row: Row) -> None:
        section = _Section(row[AT])
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
        self._resync((ring, 0, CODES[facts.StepsLost], at, 0))

    def _forget_section(self) -> bool:
        """The oldest steps of all engines; False if those that are left are needed."""
        several = [sections for sections in self._steps.values() if len(sections) > 1]
        if not several:
            return False
        self.size -= min(several, key=lambda sections: sections[0].at).popleft().size
        return True

    def _forget_steps(self, ring: int) -> None:
        self.size -= sum(section.size for section in self._steps.pop(ring, ()))


def _is_too_much(sections: deque[_Section]) -> bool:
    return len(sections) > MOST_SECTIONS or sum(section.size for section in sections) > MOST_STEPS


def _beginning(rows: list[Row], ring: int) -> list[Row]:
    """The steps since a keyframe, behind one whose batch is not known: it marks who was in flight before them."""
    if not rows or rows[0][2] != CODES[facts.StepScheduled] or rows[0][AT + 1] <= 1:
        return rows
    at, step = rows[0][AT], rows[0][AT + 1]
    unknown = facts.StepScheduled(at, step - 1, False, 0, (), (), (), 0, 0, 0, 0)
    return [(ring, 0, CODES[facts.StepScheduled], *unknown), *rows]
