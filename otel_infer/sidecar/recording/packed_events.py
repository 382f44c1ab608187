"""Packed rows of the flight recorder, which are unpacked only when a tape is written. Pure."""

from __future__ import annotations

import marshal
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from otel_infer.export.otlp.deflate import deflate
from otel_infer.ringbuffer import events

EVENT_CODES = {kind: code for code, kind in enumerate(events.EVENT_TYPES)}
MARSHAL_VERSION = 2
"""Version of `marshal` without references, which cost more than they save."""
COMPRESSION_LEVEL = 1

EventRow = tuple[Any, ...]
"""(ring, handle, code of the event, its fields …)."""
AT_INDEX = 3
SPAN_ID_INDEX = AT_INDEX + 3
"""In the events that begin a request, or a part of it."""


class StepSection:
    """Steps of one engine from a keyframe, or a loss, up to the next.

    `ended_spans`: spans of requests that had ended by then and were still in its batch.
    """

    __slots__ = ("at", "ended_spans", "last_at", "new_rows", "packed", "size")

    def __init__(self, at: int) -> None:
        self.at = self.last_at = at
        self.ended_spans: frozenset[bytes] = frozenset()
        self.new_rows: list[EventRow] = []
        self.packed: list[bytes] = []
        self.size = 0

    def pack_new_rows(self) -> int:
        """Packs the new rows; returns the number of bytes added."""
        if not self.new_rows:
            return 0
        self.last_at = self.new_rows[-1][AT_INDEX]
        packed = deflate.compress(marshal.dumps(self.new_rows, MARSHAL_VERSION), COMPRESSION_LEVEL)
        self.packed.append(packed)
        self.size += len(packed)
        self.new_rows = []
        return len(packed)


class RequestRows:
    """Rows of one request, or of a part of it, each after its length. `ended_at`: 0 = in flight."""

    __slots__ = ("arrived_at", "ended_at", "packed", "span_id")

    def __init__(self, arrived_at: int, span_id: bytes) -> None:
        self.arrived_at, self.span_id, self.ended_at = arrived_at, span_id, 0
        self.packed = bytearray()

    def add_row(self, row: EventRow) -> int:
        packed = marshal.dumps(row, MARSHAL_VERSION)
        self.packed += len(packed).to_bytes(4, "little") + packed
        return len(packed) + 4


class PackedSteps(NamedTuple):
    """Steps of one engine, with the number of its step ring."""

    ring: int
    packed: Sequence[bytes]

    def unpack_rows(self) -> list[EventRow]:
        """Returns the rows, from a keyframe on.

        A step with an unknown batch precedes them, because it marks requests that were in flight before.
        """
        rows = [row for packed in self.packed for row in marshal.loads(deflate.decompress(packed))]
        scheduled = EVENT_CODES[events.StepScheduled]
        if not rows or rows[0][2] != scheduled or rows[0][AT_INDEX + 1] <= 1:
            return rows
        at, step = rows[0][AT_INDEX], rows[0][AT_INDEX + 1]
        unknown = events.StepScheduled(at, step - 1, False, 0, (), (), (), 0, 0, 0, 0)
        return [(self.ring, 0, scheduled, *unknown), *rows]


class WindowStateSnapshot(NamedTuple):
    """State before the window at one instant; it does not change any more."""

    process_rows: Sequence[EventRow]
    requests: Sequence[bytes]
    steps: Sequence[PackedSteps]

    def unpack_rows(self) -> list[EventRow]:
        """Returns the rows in order of time."""
        rows = [*self.process_rows, *(row for packed in self.requests for row in _iter_rows(packed))]
        for engine in self.steps:
            rows += engine.unpack_rows()
        return sorted(rows, key=lambda row: row[AT_INDEX])


def _iter_rows(packed: bytes) -> Iterator[EventRow]:
    at = 0
    while at < len(packed):
        end = at + 4 + int.from_bytes(packed[at : at + 4], "little")
        yield marshal.loads(packed[at + 4 : end])
        at = end
