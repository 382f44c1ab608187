"""Writes a step ring: the records of one engine thread. The usual records are written by one call."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from typing import NamedTuple

from otel_infer.ringbuffer import events, layout
from otel_infer.ringbuffer.arena import Arena, choose_sizes
from otel_infer.ringbuffer.layout import RingSizes
from otel_infer.ringbuffer.step_ring import CONSTANTS, StepRing
from otel_infer.ringbuffer.writer import write_header

MAX_CHANGE_WORDS = 64
"""Words of a small change: positions of members that left, handles of newcomers, and (position, tokens)
pairs.
"""


class ChangeLayout(NamedTuple):
    """Layout of a change with a given number of words, which is written by one call.

    Its fields are the counts and load, then the change itself.
    """

    pack_into: Callable[..., None]
    head: int
    """Length and code, as one number."""
    cells: int


def _make_change_layout(words: int) -> ChangeLayout:
    fields = f"{events.SCHEDULED_HEAD.format[1:]}{4 * words}s"
    length = struct.calcsize(f"<QI{fields}Q")
    cells = -(-length // layout.CELL_BYTES)
    record = struct.Struct(f"<QI{fields}{cells * layout.CELL_BYTES - length}xQ")
    return ChangeLayout(record.pack_into, events.SCHEDULED_CODE << 16 | length, cells)


CHANGE_LAYOUTS = tuple(_make_change_layout(words) for words in range(MAX_CHANGE_WORDS + 1))
"""Indexed by the number of words."""
_RECORD_STRUCTS = tuple(layout.record_struct(cells) for cells in range(64))


class StepWriter(StepRing):
    """Writer of the step ring of one engine thread: one writer, records of any length."""

    __slots__ = ("_max_record_bytes", "memory", "words")

    def __init__(
        self, arena: Arena, name: str, engine: str, sizes: RingSizes | None = None, number: int = 1
    ) -> None:
        """Creates the ring in a file of its own. `number`: of this ring among those of its process."""
        sizes = sizes or choose_sizes(arena, lambda s: s.steps_bytes)
        self._use_memory(arena.allocate(name + layout.SUFFIX_STEPS, sizes.steps_bytes), sizes, engine, number)

    @classmethod
    def from_memory(
        cls, memory: mmap.mmap | memoryview, sizes: RingSizes, engine: str, number: int
    ) -> StepWriter:
        """Returns the writer of a ring in memory that is a part of a file."""
        writer = cls.__new__(cls)
        writer._use_memory(memory, sizes, engine, number)
        return writer

    def _use_memory(self, memory: mmap.mmap | memoryview, sizes: RingSizes, engine: str, number: int) -> None:
        last_offset = layout.PAGE + (sizes.step_cells - 1) * layout.CELL_BYTES
        super().__init__(memory, last_offset, *CONSTANTS)
        self.memory = memory
        self.words = write_header(
            memory, sizes._replace(cells=sizes.step_cells), {"engine": engine}, number=number
        )
        self._max_record_bytes = min(layout.RECORD_MAX, sizes.step_cells // 4 * layout.CELL_BYTES)

    def write_record(self, code: int, body: bytes) -> None:
        """Writes one step event; a body longer than the ring allows is counted as lost."""
        length = len(body) + layout.RECORD_OVERHEAD
        if length > self._max_record_bytes:
            self.words[layout.W_LOST] += 1
            return
        cells = (length + 63) >> 6
        record = _RECORD_STRUCTS[cells] if cells < len(_RECORD_STRUCTS) else layout.record_struct(cells)
        offset = self.reserve_cells(cells)
        counter = self.cells_written - cells + 1
        # One call, which zeroes the record first and stores the counter at its end last.
        record.pack_into(self.memory, offset, counter, length, code, body, counter)

    def reserve_cells(self, cells: int) -> int:
        """Returns the offset of the next record of `cells` adjacent cells, and counts them as written."""
        offset = self.offset
        behind = offset + (cells << 6)
        if behind > self.last_offset:
            return self._reserve_at_end(offset, cells)
        self.offset = behind
        self.cells_written += cells
        return offset

    def _reserve_at_end(self, offset: int, cells: int) -> int:
        behind = offset + (cells << 6)
        if behind > self.last_offset + layout.CELL_BYTES:
            self._pad_to_end(offset)
            offset, behind = layout.PAGE, layout.PAGE + (cells << 6)
        self.offset = behind if behind <= self.last_offset else layout.PAGE
        self.cells_written += cells
        return offset

    def _pad_to_end(self, offset: int) -> None:
        counter, end = self.cells_written + 1, self.last_offset + layout.CELL_BYTES
        layout.RECORD_HEAD.pack_into(self.memory, offset, counter, layout.RECORD_OVERHEAD, layout.PAD_CODE)
        layout.RECORD_TAIL.pack_into(self.memory, end - layout.RECORD_TAIL.size, counter)
        self.cells_written += (end - offset) // layout.CELL_BYTES
