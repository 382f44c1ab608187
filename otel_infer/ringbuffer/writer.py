"""The writing side of the rings: stating a fact makes no system call, takes no lock, and never grows.

Cells and slots are reserved with `next(itertools.count())` and `deque.popleft()`: single C calls, so they are atomic
under the GIL and safe when a garbage-collection hook re-enters the writer in the middle of a fact.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from otel_infer import _clock
from otel_infer.ringbuffer import events, layout
from otel_infer.ringbuffer.arena import (
    MAX_TOTAL_BYTES,
    Arena,
    FileArena,
    MemoryArena,
    RingUnavailable,
    choose_sizes,
)
from otel_infer.ringbuffer.layout import RingSizes

__all__ = [
    "MAX_TOTAL_BYTES",
    "Arena",
    "FileArena",
    "MemoryArena",
    "RequestWriter",
    "RingUnavailable",
    "choose_sizes",
]


def write_header(memory: mmap.mmap, sizes: RingSizes, text: dict[str, Any]) -> memoryview:
    """Fills the header page and returns it as u64 words; the magic goes last, since it says that the rest is there."""
    words = memoryview(memory)[: layout.HEADER_WORDS * 8].cast("Q")
    started_at, wall = _clock.read_clocks()
    encoded = json.dumps(text).encode()[: layout.TEXT_MAX]
    layout.TEXT_LENGTH.pack_into(memory, layout.TEXT_OFFSET, len(encoded))
    begin = layout.TEXT_OFFSET + layout.TEXT_LENGTH.size
    memory[begin : begin + len(encoded)] = encoded
    words[layout.W_VERSION] = layout.VERSION
    words[layout.W_PID] = os.getpid()
    words[layout.W_STARTED_AT] = started_at
    words[layout.W_STARTED_WALL] = wall
    words[layout.W_CELLS] = sizes.cells
    words[layout.W_LIVE_SLOTS] = sizes.live_slots
    words[layout.W_STRINGS] = sizes.strings
    words[layout.W_MAGIC] = layout.MAGIC
    return words


def _make_counter() -> Callable[[], int]:
    """0, 1, 2, …, each to one caller only.

    Where there is no GIL nothing makes a single C call atomic, so a lock does; one that the same thread may take again, since
    a garbage-collection hook may come in between.
    """
    count = itertools.count().__next__
    if getattr(sys, "_is_gil_enabled", lambda: True)():
        return count
    lock = threading.RLock()

    def locked() -> int:
        with lock:
            return count()

    return locked


def _pack_text_to_fit(fact: Any) -> bytes:
    """A free-text fact, its texts halved until the ring takes it; what is no text is left out of one that is too long."""
    most = layout.MAX_PARTS * layout.PART_BYTES
    packed = events.pack_text(fact)
    while len(packed) > most:
        fact = type(fact)(*(_shorten_field(field) for field in fact))
        packed = events.pack_text(fact)
    return packed


def _shorten_field(field: Any) -> Any:
    if isinstance(field, str):
        return field[: len(field) // 2]
    if isinstance(field, dict):
        return {}
    return field if isinstance(field, float) or (isinstance(field, int) and field < 1 << 63) else ""


def _pack_head(code: int, part: int, parts: int) -> int:
    """What a cell says of its body, as the one number that lies there."""
    return int.from_bytes(struct.pack("<BBBx", code, part, parts), "little")


def _make_cell_packer(known: events.EventLayout) -> tuple[Callable[..., None], int, tuple[int, ...]]:
    """How a fact that fits is written by one call: its cell with its fields in the place of the body."""
    rest = layout.BODY_BYTES - known.packed.size
    cell = struct.Struct(f"<QII{known.packed.format[1:]}{rest}xQ")
    return cell.pack_into, _pack_head(known.code, 0, 1), known.strings


# An arrival as two cells with its fields in the place of their parts; the span id is cut.
_ARRIVED = events.LAYOUT_BY_EVENT[events.RequestArrived].code
_ARRIVED_HEAD, _ARRIVED_REST_HEAD = _pack_head(_ARRIVED, 0, 2), _pack_head(_ARRIVED, 1, 2)
_ARRIVED_FIRST = struct.Struct("<QIIIqq16s4sQ").pack_into
_ARRIVED_REST = struct.Struct("<QIII4s8s8sHHHHH6xQ").pack_into
_EMPTY_SLOT = bytes(layout.LIVE_BYTES)
# Looked up once, for what every request comes through.
_FIRST_CELL, _CELL_BYTES, _LIVE_BYTES = layout.PAGE, layout.CELL_BYTES, layout.LIVE_BYTES
_SLOT_BITS, _SLOT_MASK, _GENERATIONS = layout.SLOT_BITS, layout.SLOT_MASK, layout.GENERATIONS
_LIVE_INTO = layout.LIVE.pack_into

_CELL_PACKERS = {
    known.event: _make_cell_packer(known)
    for known in events.REQUEST_LAYOUTS
    if known.packed.size <= layout.BODY_BYTES
}


class RequestWriter:
    """Request ring, live table and string table of one process; any thread may state a fact."""

    def __init__(self, arena: Arena, name: str, role: str, sizes: RingSizes | None = None) -> None:
        sizes = sizes or choose_sizes(arena, lambda s: s.requests_bytes)
        self.memory = arena.allocate(name + layout.SUFFIX_REQUESTS, sizes.requests_bytes)
        self.words = write_header(
            self.memory, sizes, {"role": role, "boot_id": layout.read_boot_id(), "parent": os.getppid()}
        )
        offsets = layout.request_offsets(sizes.cells, sizes.live_slots, sizes.strings)
        self._cells, self._live_offset, self._strings_offset = (
            sizes.cells,
            offsets.live_table,
            offsets.strings,
        )
        self._strings_max = sizes.strings
        self._next_cell = _make_counter()
        self._next_string = _make_counter()
        self._strings: dict[str, int] = {"": events.NONE}
        self._slots = sizes.live_slots
        self._free_slots = deque(range(sizes.live_slots))
        # Handles of another ring (before a fork, of rings that were given up) must not be taken for ours.
        first = int.from_bytes(os.urandom(4), "little") % layout.GENERATIONS or 1
        self._generations = [first] * sizes.live_slots

    # ── requests in flight ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def in_flight(self) -> int:
        """How many requests have a slot."""
        return self._slots - len(self._free_slots)

    def open_request(self, arrived: events.RequestArrived) -> int:
        """Gives the request a slot of the live table, states its arrival, and returns its handle (0 = table full)."""
        try:
            slot = self._free_slots.popleft()
        except IndexError:
            self.words[layout.W_UNRECORDED] += 1
            return 0
        handle = slot | self._generations[slot] << _SLOT_BITS
        offset = self._live_offset + slot * _LIVE_BYTES
        at, wall_at, trace, span, parent, server, flags, operation, provider, model, name = arrived
        memory = self.memory
        _LIVE_INTO(memory, offset, handle, flags, 0, at, wall_at, trace, span, parent, server, 0, handle)
        known = self._strings.get
        said: tuple[int | None, ...] = known(operation), known(provider), known(model), known(name)
        if None in said:
            said = tuple(map(self._get_string_id, (operation, provider, model, name)))
        cell, rest, cells = self._next_cell() + 1, self._next_cell() + 1, self._cells
        first, offset = cell & 0xFFFFFFFF, _FIRST_CELL + (cell - 1) % cells * _CELL_BYTES
        _ARRIVED_FIRST(memory, offset, cell, _ARRIVED_HEAD, handle, first, at, wall_at, trace, span, cell)
        offset = _FIRST_CELL + (rest - 1) % cells * _CELL_BYTES
        _ARRIVED_REST(
            memory,
            offset,
            rest,
            _ARRIVED_REST_HEAD,
            handle,
            first,
            span[4:],
            parent,
            server,
            flags,
            *said,
            rest,
        )
        return handle

    def close_request(self, handle: int, ended: events.RequestEnded | events.ExchangeEnded) -> None:
        """States the end and gives the slot back; the oldest free slot is used next, so generations last long."""
        try:
            self.write_event(handle, ended)
        finally:
            slot, generations = handle & _SLOT_MASK, self._generations
            generation = generations[slot]
            if handle and handle >> _SLOT_BITS == generation:
                offset = self._live_offset + slot * _LIVE_BYTES
                self.memory[offset : offset + _LIVE_BYTES] = _EMPTY_SLOT
                generations[slot] = (generation + 1) % _GENERATIONS or 1
                self._free_slots.append(slot)

    # ── facts ────────────────────────────────────────────────────────────────────────────────────────────────────

    def write_event(self, handle: int, fact: Any) -> None:
        """States one request fact. Raises only for what is not a fact, or does not fit into one."""
        whole = _CELL_PACKERS.get(type(fact))
        if whole is None:
            self._write_long_event(handle, fact)
            return
        pack_into, head, strings = whole
        if strings:
            known, fact = self._strings, list(fact)
            for i in strings:
                text = fact[i]
                fact[i] = known[text] if text in known else self._intern_string(str(text))
        cell = self._next_cell()
        offset, counter = _FIRST_CELL + cell % self._cells * _CELL_BYTES, cell + 1
        try:
            pack_into(self.memory, offset, counter, head, handle, *fact, counter)
        except struct.error:  # a reader would wait for the rest of it
            layout.CELL.pack_into(self.memory, offset, cell + 1, layout.VOID_CODE, 0, 1, 0, b"", cell + 1)
            raise

    def _write_long_event(self, handle: int, fact: Any) -> None:
        """One that may need several cells."""
        known = events.LAYOUT_BY_EVENT.get(type(fact))
        if known is None:
            self._write_cells(events.TEXT_CODES[type(fact)], handle, _pack_text_to_fit(fact))
        else:
            self._write_cells(
                known.code, handle, known.packed.pack(*self._replace_strings(fact, known.strings))
            )

    def _replace_strings(self, fact: Any, strings: tuple[int, ...]) -> list[Any]:
        """The fields, those that are strings as numbers of the string table."""
        fields = list(fact)
        for i in strings:
            fields[i] = self._get_string_id(fields[i])
        return fields

    def _get_string_id(self, text: str) -> int:
        """This text's place in the string table, in which it gets one if it has none."""
        return self._strings[text] if text in self._strings else self._intern_string(str(text))

    def _write_cells(self, code: int, handle: int, body: bytes) -> None:
        if len(body) <= layout.BODY_BYTES:
            cell = self._next_cell()
            offset = layout.PAGE + cell % self._cells * layout.CELL_BYTES
            layout.CELL.pack_into(self.memory, offset, cell + 1, code, 0, 1, handle, body, cell + 1)
            return
        size, pack_into = layout.PART_BYTES, layout.PART_CELL.pack_into
        parts = -(-len(body) // size)
        first = 0
        for part in range(parts):
            cell = self._next_cell()
            first = first if part else (cell + 1) & 0xFFFFFFFF
            piece = body[part * size : part * size + size]
            offset = layout.PAGE + cell % self._cells * layout.CELL_BYTES
            pack_into(self.memory, offset, cell + 1, code, part, parts, handle, first, piece, cell + 1)

    def _intern_string(self, text: str) -> int:
        if text == "":
            return events.NONE
        index = self._next_string()
        if index >= self._strings_max:  # no fact is lost by that: it is stated, of `_OTHER`
            return layout.STRING_OTHER
        encoded = text.encode("utf-8", "replace")[: layout.STRING_MAX]
        layout.STRING.pack_into(
            self.memory, self._strings_offset + index * layout.STRING_BYTES, encoded, len(encoded)
        )
        self._strings[text] = index + 1
        return index + 1
