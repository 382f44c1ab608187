"""What is remembered of the facts that fell out of the window: what those in it cannot be understood without.

That is: processes, engines and hooks; all that was said of requests which are still in flight; of every engine the steps
since its last keyframe, so that it is known who is in its batch. A request that was in flight when the window began may
have been in steps that are forgotten: it is marked, as one of which steps were lost.
"""

from __future__ import annotations

import marshal
from collections import deque
from collections.abc import Iterable
from typing import Any

from otel_infer import facts, tape

CODES = {kind: code for code, kind in enumerate(tape.KINDS)}
MARSHAL = 2
"""Version of `marshal` without references, which cost more than they save."""
MOST_OF_ONE = 1 << 16
"""Bytes that are remembered of one request: one of which more was said is left out as a whole."""
MOST_STEPS = 1 << 20
"""Bytes of steps since a keyframe; engines say one every second."""
PAUSES = 256
"""Pauses of one process."""

Row = tuple[Any, ...]
"""(ring, handle, code of the fact, its fields …)."""
Key = tuple[int, int]
AT = 3


class Edge:
    """Fed with the rows that leave the window, in their order. `size`: bytes that are held, at most about `limit`."""

    def __init__(self, limit: int) -> None:
        self.size = 0
        self.left_out = 0
        """Requests in flight of which there was too much to remember."""
        self._limit = limit
        self._known: dict[Row, Row] = {}
        self._open: dict[Key, bytearray] = {}
        self._steps: dict[int, list[bytes]] = {}
        self._new_steps: dict[int, list[Row]] = {}
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
            elif (row[0], row[1]) in self._open:
                self._add(row)

    def settle(self) -> None:
        """Packs the steps that were folded since, and sees to the limit; after every few rows."""
        for ring, rows in self._new_steps.items():
            if rows:
                packed = marshal.dumps(rows, MARSHAL)
                self._steps.setdefault(ring, []).append(packed)
                self.size += len(packed)
                if sum(map(len, self._steps[ring])) > MOST_STEPS:
                    self._forget_steps(ring)
        self._new_steps.clear()
        while self.size > self._limit and self._open:
            self._forget(next(iter(self._open)))
            self.left_out += 1

    def rows(self) -> list[Row]:
        """What a reader is told before the window, in order of time."""
        told = [*self._known.values()]
        for packed in self._open.values():
            told += unpacked_rows(packed)
        told += self._pauses_in_flight()
        for ring, blobs in self._steps.items():
            told += _beginning([row for blob in blobs for row in marshal.loads(blob)], ring)
        return sorted(told, key=lambda row: row[AT])

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _arrived(self, row: Row) -> None:
        self._forget((row[0], row[1]))
        self._open[row[0], row[1]] = bytearray()
        self._add(row)

    def _recovered(self, row: Row) -> None:
        if (row[0], row[1]) not in self._open:
            self._arrived(row)

    def _add(self, row: Row) -> None:
        packed = marshal.dumps(row, MARSHAL)
        said = self._open[row[0], row[1]]
        said += len(packed).to_bytes(4, "little") + packed
        self.size += len(packed) + 4
        if len(said) > MOST_OF_ONE:
            self._forget((row[0], row[1]))
            self.left_out += 1

    def _ended(self, row: Row) -> None:
        self._forget((row[0], row[1]))

    def _forget(self, key: Key) -> None:
        self.size -= len(self._open.pop(key, b""))

    def _listed(self, row: Row) -> None:
        living = set(row[AT + 1])
        for key in [key for key in self._open if key[0] == row[0] and key[1] not in living]:
            self._forget(key)

    def _facts_lost(self, row: Row) -> None:
        """That something was lost marks who was in flight; how much was said before the window."""
        self._known[row[0], "lost"] = (*row[: AT + 1], 0, 0)

    def _paused(self, row: Row) -> None:
        self._pauses.setdefault(row[0], deque(maxlen=PAUSES)).append(row)

    def _pauses_in_flight(self) -> list[Row]:
        since: dict[int, int] = {}
        for (ring, _), packed in self._open.items():
            arrived_at = unpacked_rows(packed)[0][AT]
            since[ring] = min(since.get(ring, arrived_at), arrived_at)
        return [
            row
            for ring, pauses in self._pauses.items()
            for row in pauses
            if ring in since and row[AT] > since[ring]
        ]

    # ── processes ────────────────────────────────────────────────────────────────────────────────────────────────

    def _know(self, row: Row) -> None:
        self._known[row[0], row[2]] = row

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
            self._new_steps.pop(engine, None)
        for key in [key for key in self._known if key[0] == ring or key[0] in engines]:
            del self._known[key]
        for request in [key for key in self._open if key[0] == ring]:
            self._forget(request)
        self._pauses.pop(ring, None)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _scheduled(self, row: Row) -> None:
        if row[AT + 2]:  # a keyframe: what was before it is not needed any more
            self._resync(row)
        else:
            self._step(row)

    def _resync(self, row: Row) -> None:
        self._forget_steps(row[0])
        self._new_steps[row[0]] = [row]

    def _step(self, row: Row) -> None:
        """Steps whose keyframe is not known would say nothing."""
        rows = self._new_steps.get(row[0])
        if rows is not None:
            rows.append(row)
        elif row[0] in self._steps:
            self._new_steps[row[0]] = [row]

    def _forget_steps(self, ring: int) -> None:
        self.size -= sum(map(len, self._steps.pop(ring, ())))


def unpacked_rows(packed: bytes | bytearray) -> list[Row]:
    """The rows of one request, each behind its length."""
    rows, at = [], 0
    while at < len(packed):
        end = at + 4 + int.from_bytes(packed[at : at + 4], "little")
        rows.append(marshal.loads(packed[at + 4 : end]))
        at = end
    return rows


def _beginning(rows: list[Row], ring: int) -> list[Row]:
    """The steps since a keyframe, behind one whose batch is not known: it marks who was in flight before them."""
    if not rows or rows[0][2] != CODES[facts.StepScheduled] or rows[0][AT + 1] <= 1:
        return rows
    at, step = rows[0][AT], rows[0][AT + 1]
    unknown = facts.StepScheduled(at, step - 1, False, 0, (), (), (), 0, 0, 0, 0)
    return [(ring, 0, CODES[facts.StepScheduled], *unknown), *rows]
