"""Writes request rings. An event makes no system call, waits for no lock, and takes no memory beyond the ring.

Cells and slots are reserved with `next(itertools.count())` and `deque.popleft()`. Both are single C calls:
they are atomic under the GIL, and safe when a garbage-collection hook re-enters the writer in the middle of
an event.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import re
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from otel_infer import _clock
from otel_infer.ringbuffer import events, layout
from otel_infer.ringbuffer.arena import Arena, choose_sizes
from otel_infer.ringbuffer.layout import RingSizes
from otel_infer.ringbuffer.native import native
from otel_infer.ringbuffer.python_threads import PythonThreads
from otel_infer.ringbuffer.stack_signal import stack_signal
from otel_infer.ringbuffer.string_table import StringTable
from otel_infer.ringbuffer.text_limits import pack_text_to_fit


def write_header(
    memory: mmap.mmap | memoryview, sizes: RingSizes, text: dict[str, Any], number: int = 0
) -> memoryview:
    """Fills the header page and returns it as u64 words.

    The magic is written last, because it marks the rest as complete.
    """
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
    words[layout.W_NUMBER] = number
    words[layout.W_MAGIC] = layout.MAGIC
    return words


def _make_counter() -> Callable[[], int]:
    """Returns a counter 0, 1, 2, … that returns each number to one caller only.

    Without a GIL no C call is atomic, so a lock is taken. It is reentrant, because a garbage-collection hook
    may interrupt its holder on the same thread.
    """
    count = itertools.count().__next__
    if getattr(sys, "_is_gil_enabled", lambda: True)():
        return count
    lock = threading.RLock()

    def locked() -> int:
        with lock:
            return count()

    return locked


def _pack_head(code: int, part: int, parts: int) -> int:
    """Returns the head of a cell (code, part, parts) as one number."""
    return int.from_bytes(struct.pack("<BBBx", code, part, parts), "little")


def _make_cell_packer(known: events.EventLayout) -> tuple[Callable[..., None], int, tuple[int, ...]]:
    """Returns the packing function, the head and the string fields of an event that fits one cell.

    The event's fields take the place of the cell's body, so that one call writes it.
    """
    rest = layout.BODY_BYTES - known.packed.size
    cell = struct.Struct(f"<QII{known.packed.format[1:]}{rest}xQ")
    return cell.pack_into, _pack_head(known.code, 0, 1), known.strings


def _name_fields(known: events.EventLayout) -> str:
    """Returns one character per field, for compiled code: as in `struct`, but S and T for texts, x for 8 bytes."""
    fields = re.findall(r"\d+s|[a-zA-Z]", known.packed.format[1:].replace("16s", "X").replace("8s", "x"))
    texts = dict(zip(known.strings, ("ST"["IH".index(fields[i])] for i in known.strings)))
    return "".join(texts.get(i, kind) for i, kind in enumerate(fields))


# An arrival fills two cells, with its fields in place of their parts; the span id is split between them.
_ARRIVED = events.LAYOUT_BY_EVENT[events.RequestArrived].code
_ARRIVED_HEAD, _ARRIVED_REST_HEAD = _pack_head(_ARRIVED, 0, 2), _pack_head(_ARRIVED, 1, 2)
_ARRIVED_FIRST = struct.Struct("<QIIIqq16s4sQ").pack_into
_ARRIVED_REST = struct.Struct("<QIII4s8s8sHHHHH6xQ").pack_into
_EMPTY_SLOT = bytes(layout.LIVE_BYTES)
# Module globals, because every request uses them.
_FIRST_CELL, _CELL_BYTES, _LIVE_BYTES = layout.PAGE, layout.CELL_BYTES, layout.LIVE_BYTES
_SLOT_BITS, _SLOT_MASK, _GENERATIONS = layout.SLOT_BITS, layout.SLOT_MASK, layout.GENERATIONS
_LIVE_INTO = layout.LIVE.pack_into

_CELL_PACKERS = {
    known.event: _make_cell_packer(known)
    for known in events.REQUEST_LAYOUTS
    if known.packed.size <= layout.BODY_BYTES
}
_COMPILED_LAYOUTS = {
    event: (events.LAYOUT_BY_EVENT[event].code, _name_fields(events.LAYOUT_BY_EVENT[event]))
    for event in _CELL_PACKERS
} | {events.AttributeSet: (events.TEXT_CODES[events.AttributeSet], "A")}
"""Codes and fields of the events that compiled code writes; `A` stands for an attribute whose value is a text."""


class RequestWriter:
    """Writer of the request ring, live table and string table of one process; any thread may use it."""

    compiled: Any = None
    """The compiled ring; None where it is not built."""
    open_below_remote: Callable[[list[tuple[bytes, bytes]], str, int, int, bool, bool], Any] | None = None
    """Opens a request by its ASGI headers in one call; None where the compiled module is not built."""

    def __init__(self, arena: Arena, name: str, role: str, sizes: RingSizes | None = None) -> None:
        sizes = sizes or choose_sizes(arena, lambda s: s.requests_bytes)
        self.memory = arena.allocate(name + layout.SUFFIX_REQUESTS, sizes.requests_bytes)
        self.words = write_header(
            self.memory, sizes, {"role": role, "boot_id": layout.read_boot_id(), "parent": os.getppid()}
        )
        self.threads = memoryview(self.memory)[layout.THREADS_AT : layout.PAGE].cast("Q")
        """The table of threads that work for one request."""
        self.python_threads = PythonThreads(self.memory)
        offsets = layout.request_offsets(sizes.cells, sizes.live_slots, sizes.strings)
        self._cells, self._live_offset, self._strings_offset = (
            sizes.cells,
            offsets.live_table,
            offsets.strings,
        )
        self._next_cell = _make_counter()
        self._string_table = StringTable(
            self.memory, self._strings_offset, sizes.strings, self.words, self._write_empty_cell
        )
        self._strings = self._string_table.ids
        self._slots = sizes.live_slots
        self._free_slots = deque(range(sizes.live_slots))
        # Random, so that handles of an earlier ring (before a fork, or discarded) match none of this one.
        first = int.from_bytes(os.urandom(4), "little") % layout.GENERATIONS or 1
        self._generations = [first] * sizes.live_slots
        if native is not None:
            self._use_compiled_ring(native, first)
        stack_signal.start(arena, name, self.words)

    def _use_compiled_ring(self, native: Any, first_generation: int) -> None:
        """Lets compiled code give away the slots, and write all events that fit one cell, and arrivals."""
        ring = self.compiled = native.RequestRing(
            self.memory,
            self._cells,
            self._live_offset,
            self._slots,
            first_generation,
            os.urandom(32),
            _COMPILED_LAYOUTS,
            _ARRIVED,
            self._strings,
            self._string_table.intern,
            self._write_long_event,
        )
        self._string_table.on_cleared = ring.forget_texts
        self._next_cell = ring.next_cell
        self.write_event, self.open_request, self.close_request = (  # type: ignore[method-assign]
            ring.write_event,
            ring.open_request,
            ring.close_request,
        )
        self.open_below_remote = ring.open_below_remote

    def retire(self) -> None:
        """Marks the ring as closed, or as the parent process's, for compiled code that still refers to it."""
        if self.compiled is not None:
            self.compiled.retired = True
        stack_signal.stop()

    def defer_until(self, due_at: int) -> None:
        """Lets compiled code close requests until this instant; the next one runs the deferred recorders."""
        if self.compiled is not None:
            self.compiled.deferred_due_at = due_at

    # ── requests in flight ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def in_flight(self) -> int:
        """Returns the number of requests that have a slot."""
        if self.compiled is not None:
            return int(self.compiled.in_flight)
        return self._slots - len(self._free_slots)

    def open_request(self, arrived: events.RequestArrived) -> int:
        """Gives the request a live slot, records its arrival, and returns its handle (0 = table full).

        A request is counted as offered after its cells are written, so that a reader never misses one that it
        has not read yet. The additions are atomic under the GIL, because nothing is called in between.
        """
        try:
            slot = self._free_slots.popleft()
        except IndexError:
            self.words[layout.W_UNRECORDED] += 1
            self.count_not_recorded(arrived)
            return 0
        handle = slot | self._generations[slot] << _SLOT_BITS
        try:
            self._write_arrival(slot, handle, arrived)
        except Exception:
            self._free_slot(slot)
            raise
        if not arrived.flags & events.JOINED:
            self.words[layout.W_OFFERED] += 1
        return handle

    def _write_arrival(self, slot: int, handle: int, arrived: events.RequestArrived) -> None:
        """Writes the live slot and the two cells of an arrival."""
        offset = self._live_offset + slot * _LIVE_BYTES
        at, wall_at, trace, span, parent, server, flags, operation, provider, model, name = arrived
        memory = self.memory
        _LIVE_INTO(memory, offset, handle, flags, 0, at, wall_at, trace, span, parent, server, 0, handle)
        get_id = self._strings.get
        string_ids: tuple[int | None, ...] = get_id(operation), get_id(provider), get_id(model), get_id(name)
        if None in string_ids:
            string_ids = tuple(map(self._get_string_id, (operation, provider, model, name)))
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
            *string_ids,
            rest,
        )

    def count_not_recorded(self, arrived: events.RequestArrived) -> None:
        """Counts a request that is not recorded; a fragment of another process's request is not counted."""
        if not arrived.flags & events.JOINED:
            self.words[layout.W_NOT_RECORDED] += 1
            self.words[layout.W_OFFERED] += 1

    def close_request(self, handle: int, ended: events.RequestEnded | events.ExchangeEnded) -> None:
        """Records the end and frees the slot.

        The oldest free slot is used next, so that generations repeat late.
        """
        try:
            self.write_event(handle, ended)
        finally:
            slot = handle & _SLOT_MASK
            if handle and handle >> _SLOT_BITS == self._generations[slot]:
                self._free_slot(slot)

    def _free_slot(self, slot: int) -> None:
        offset = self._live_offset + slot * _LIVE_BYTES
        self.memory[offset : offset + _LIVE_BYTES] = _EMPTY_SLOT
        self._generations[slot] = (self._generations[slot] + 1) % _GENERATIONS or 1
        self._free_slots.append(slot)

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────

    def write_event(self, handle: int, event: Any) -> None:
        """Writes one request event; raises only for an object that is no event or does not fit its layout."""
        whole = _CELL_PACKERS.get(type(event))
        if whole is None:
            self._write_long_event(handle, event)
            return
        pack_into, head, strings = whole
        if strings:
            known, event = self._strings, list(event)
            for i in strings:
                text = event[i]
                index = known.get(text)
                event[i] = self._string_table.intern(str(text)) if index is None else index
        cell = self._next_cell()
        offset, counter = _FIRST_CELL + cell % self._cells * _CELL_BYTES, cell + 1
        try:
            pack_into(self.memory, offset, counter, head, handle, *event, counter)
        except struct.error:  # otherwise a reader would wait for this cell
            layout.CELL.pack_into(self.memory, offset, cell + 1, layout.VOID_CODE, 0, 1, 0, b"", cell + 1)
            raise

    def _write_long_event(self, handle: int, event: Any) -> None:
        """Writes an event that may need several cells."""
        known = events.LAYOUT_BY_EVENT.get(type(event))
        if known is None:
            packed, is_cut = pack_text_to_fit(event, layout.MAX_PARTS * layout.PART_BYTES)
            if is_cut:
                self.words[layout.W_VALUES_CUT] += 1
            if packed:
                self._write_cells(events.TEXT_CODES[type(event)], handle, packed)
        else:
            self._write_cells(
                known.code, handle, known.packed.pack(*self._replace_strings(event, known.strings))
            )

    def _replace_strings(self, event: Any, strings: tuple[int, ...]) -> list[Any]:
        """Returns the fields, with strings replaced by their ids in the string table."""
        fields = list(event)
        for i in strings:
            fields[i] = self._get_string_id(fields[i])
        return fields

    def _get_string_id(self, text: str) -> int:
        """Returns the id of this text in the string table, after adding it if it is new."""
        index = self._strings.get(text)
        return self._string_table.intern(str(text)) if index is None else index

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

    def _write_empty_cell(self) -> int:
        """Writes a cell without an event, and returns its number."""
        cell = self._next_cell()
        offset = layout.PAGE + cell % self._cells * layout.CELL_BYTES
        layout.CELL.pack_into(self.memory, offset, cell + 1, layout.VOID_CODE, 0, 1, 0, b"", cell + 1)
        return cell
