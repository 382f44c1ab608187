"""Reads a request ring: the cells that were complete at the previous poll, checked at both ends.

A reader never waits for a writer. It copies cells, then checks that the copied cells are still there.
Overwritten and torn events are counted and reported as an event (`EventsLost`), never guessed.
"""

from __future__ import annotations

import itertools
import json
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otel_infer.ringbuffer import events, layout
from otel_infer.ringbuffer.cell_columns import CellColumn, are_pairs, split_by_code, unpack_bodies
from otel_infer.ringbuffer.events import RecordedEvent, make_tuple

Words = NDArray[np.uint64]

MAX_HOLE_POLLS = 8
"""Polls for which a reserved but unwritten cell is awaited before it counts as torn."""
PENDING_CELLS = 4096
"""Number of later cells after which an event with missing parts counts as torn."""
WINDOW = 256
"""Cells that are examined together. Examining the whole ring at each poll would evict the processor's cache.
"""


MAX_COUNTER = 1 << 48
"""Counters beyond this are damage: a writer of a million events a second reaches it after nine years."""


class RingNotReady(Exception):
    """Failure to read a ring that its writer has not completed yet."""


class InvalidRing(Exception):
    """Failure to read memory that holds no ring of this layout version; the message states why."""


class RingHeader:
    """Header page of a ring file."""

    def __init__(self, memory: mmap.mmap | memoryview) -> None:
        if len(memory) < layout.PAGE:
            raise InvalidRing("shorter than a ring header")
        self.words = memoryview(memory)[: layout.HEADER_WORDS * 8].cast("Q")
        magic = self.words[layout.W_MAGIC]
        if not magic:
            raise RingNotReady("its header is not complete yet")
        if magic != layout.MAGIC:
            raise InvalidRing("not a ring")
        version = self.words[layout.W_VERSION]
        if version != layout.VERSION:
            raise InvalidRing(
                f"layout version {version}, this reader supports {layout.VERSION}: use one otel-infer version"
            )
        (length,) = layout.TEXT_LENGTH.unpack_from(memory, layout.TEXT_OFFSET)
        begin = layout.TEXT_OFFSET + layout.TEXT_LENGTH.size
        try:
            self.text: dict[str, Any] = json.loads(
                bytes(memory[begin : begin + min(length, layout.TEXT_MAX)])
            )
        except ValueError as error:
            raise InvalidRing("header text is not valid JSON") from error
        self.pid = self.words[layout.W_PID]
        self.cells = self.words[layout.W_CELLS]


class _Strings(dict[int, str]):
    """The strings of a string table that were read so far, by id; a lookup reads a missing one."""

    def __init__(self, read: Callable[[int], str | None]) -> None:
        super().__init__({0: ""})
        self._read = read

    def __missing__(self, index: int) -> str:
        text = self._read(index)
        if text is None:
            return events.OTHER
        self[index] = text
        return text


class RequestReader:
    """Reader of the request ring, live table and string table of one process."""

    def __init__(self, memory: mmap.mmap, ring: int) -> None:
        self.header = RingHeader(memory)
        self.ring = ring
        self.memory = memory
        cells = self.header.cells
        slots, strings = self.header.words[layout.W_LIVE_SLOTS], self.header.words[layout.W_STRINGS]
        self._offsets = layout.request_offsets(cells, slots, strings)
        if cells < 1 or self._offsets.end > len(memory):
            raise InvalidRing("sizes in the header exceed the file")
        words = np.frombuffer(memory, np.uint64, cells * 8, layout.PAGE)
        self._cells: Words = words.reshape(cells, 8)
        self._ends = self._cells[:, ::7]
        self._cell_words = memoryview(memory)[layout.PAGE : layout.PAGE + cells * layout.CELL_BYTES].cast("Q")
        self._slots = slots
        self._strings = _Strings(self._read_string)
        self._strings_reused = 0
        self._window = np.arange(min(WINDOW, cells))
        self._next = 0
        self._complete = self._newest_polled = 0
        self._hole_polls = 0
        self._pending: dict[int, tuple[int, dict[int, bytes]]] = {}
        self._taken_over = self.header.words[layout.W_PROCESSED_UNTIL] > 0
        self._lost_by_writer = self.header.words[layout.W_LOST] if self._taken_over else 0
        self.lost = self.torn = 0
        self._reported = 0, 0
        self._has_hole = False
        self._latest_event_at = 0
        self.fill_ratio = 0.0
        """Share of the ring that was written between the last two polls; above 1 = cells were overwritten."""

    def poll(self, now: int, final: bool = False) -> Iterator[events.RecordedEvent]:
        """Yields new events that were complete at the last `observe` or poll; `final`: all that are complete now."""
        if self._strings_reused != (reused := self.header.words[layout.W_STRINGS_REUSED]):
            self._strings, self._strings_reused = _Strings(self._read_string), reused
        newest = self._find_newest()
        self.fill_ratio, self._newest_polled = (newest - self._newest_polled) / self.header.cells, newest
        upto, self._complete = (newest if final else min(self._complete, newest)), newest
        # A quarter of the ring is left to the writer, which may overtake this reader during the copy.
        oldest = newest - self.header.cells + self.header.cells // 4
        skips = oldest > self._next
        if skips:  # an earlier reader most likely read the cells before
            self.lost += 0 if self._taken_over and not self._next else oldest - self._next
            self._next, self._has_hole = oldest, True
        recorded = self._read_cells(upto, final)
        lost_by_writer = self.header.words[layout.W_LOST]
        self.lost += lost_by_writer - self._lost_by_writer
        self._lost_by_writer = lost_by_writer
        yield from self._yield_losses(recorded, now, final)
        yield from recorded
        if recorded:
            self._latest_event_at = max(self._latest_event_at, recorded[-1].event.at)

    @property
    def position(self) -> int:
        """The number of cells that were read."""
        return self._next

    @property
    def is_waiting(self) -> bool:
        """Whether a reserved cell is awaited that its writer has not written yet."""
        return self._hole_polls > 0

    def observe(self) -> None:
        """Lets the next poll return what is complete now."""
        self._complete = self._find_newest()

    def is_filled_above(self, share: float) -> bool:
        """Returns whether more than this share of the ring was written since the last poll; 0: anything.

        It reads one cell only.
        """
        counter = self._newest_polled + int(share * self.header.cells)
        return self._cell_words[counter % self.header.cells * 8] > counter

    def _yield_losses(
        self, recorded: list[events.RecordedEvent], now: int, final: bool
    ) -> Iterator[events.RecordedEvent]:
        """Yields what was lost since the last report.

        A hole is reported at the instant of the first event after it. At the instant of the poll it would
        come too late: requests that ended in between would be finished without the mark.
        """
        (lost, torn), has_hole = self._reported, self._has_hole
        if (self.lost, self.torn) == (lost, torn) and not has_hole:
            return
        if has_hole and not recorded and not final:
            return
        at = max(self._latest_event_at, recorded[0].event.at) if has_hole and recorded else now
        self._reported, self._has_hole = (self.lost, self.torn), False
        yield events.RecordedEvent(self.ring, 0, events.EventsLost(at, self.lost - lost, self.torn - torn))

    def read_live_requests(self) -> Iterator[tuple[int, events.LiveRecovered]]:
        """Yields (handle, arrival) of every request in flight."""
        base, size = self._offsets.live_table, layout.LIVE_BYTES
        table = self.memory[base : base + self._slots * size]
        for slot in range(self._slots):
            fields = layout.LIVE.unpack_from(table, slot * size)
            handle, flags, _, at, wall_at, trace, span, parent, _, _, again = fields
            if handle and handle == again:
                yield handle, events.LiveRecovered(at, wall_at, trace, span, parent, flags)

    def get_string(self, index: int) -> str:
        """Returns the string with this id, or `_OTHER` where the table does not hold it."""
        return self._strings[index]

    def _read_string(self, index: int) -> str | None:
        offset = self._offsets.strings + (index - 1) * layout.STRING_BYTES
        if index < 1 or offset + layout.STRING_BYTES > self._offsets.end:
            return None
        text, length = layout.STRING.unpack_from(self.memory, offset)
        return text[:length].decode("utf-8", "replace") if length else None

    def close(self) -> None:
        """Releases the memory."""
        del self._cells, self._ends, self._cell_words, self.header.words
        self.memory = mmap.mmap(-1, 1)

    def _find_newest(self) -> int:
        """Returns the newest counter that was written.

        Cells behind a whole window of unwritten cells are not seen yet.
        """
        begin, count = max(self._next, self._complete), len(self._window)
        while True:
            newest = self._max_counter((begin + self._window) % self.header.cells, begin)
            if newest < begin + count:
                return max(newest, begin)
            if newest > begin + count:  # the writer has lapped this reader
                return self._max_counter(np.arange(self.header.cells), begin)
            begin = newest

    def _max_counter(self, positions: Any, known: int) -> int:
        """Returns the largest counter at these positions that a writer can have put there. `known`: one that was.

        A cell with a torn head and a new tail is torn, not unwritten, so both ends count. An end that is far
        beyond all whole cells is damage.
        """
        ends = self._ends[positions]
        belongs = (ends - np.uint64(1)) % np.uint64(self.header.cells) == positions[:, None].astype(np.uint64)
        belongs &= ends < MAX_COUNTER
        whole = belongs[:, 0] & belongs[:, 1] & (ends[:, 0] == ends[:, 1])
        newest_whole = int(ends[whole, 0].max(initial=0))
        reach = max(newest_whole, known) + len(self._window)
        return int(ends[belongs & (ends <= reach)].max(initial=0))

    def _read_cells(self, upto: int, final: bool) -> list[events.RecordedEvent]:
        if upto <= self._next:
            return []
        counters = np.arange(self._next + 1, upto + 1, dtype=np.uint64)
        index = (counters - np.uint64(1)) % np.uint64(self.header.cells)
        copy = self._cells[index]
        whole = (copy[:, 0] == counters) & (copy[:, 7] == counters) & (self._cells[index, 0] == counters)
        if whole.all():
            self._next, self._hole_polls = upto, 0
        else:
            copy = self._select_whole(copy, whole, counters, final)
        recorded = self._decode_cells(copy)
        if self._pending:
            self._expire_pending()
        return recorded

    def _select_whole(self, copy: Words, whole: NDArray[np.bool_], counters: Words, final: bool) -> Words:
        """Returns the whole cells up to the first that may still be written; counts the broken ones before it."""
        for i in np.flatnonzero(~whole).tolist():
            polls = 0 if i else self._hole_polls
            if copy[i, 0] > counters[i]:
                self.lost += 1
            elif polls < MAX_HOLE_POLLS and not final:
                self._next, self._hole_polls = self._next + i, polls + 1
                return copy[:i][whole[:i]]
            else:
                self.torn += 1
        self._next, self._hole_polls = self._next + len(whole), 0
        return copy[whole]

    def _decode_cells(self, cells: Words) -> list[events.RecordedEvent]:
        """Returns the events of whole cells, in their order. Cells of one code are decoded together."""
        octets, handles = cells.view(np.uint8), cells.view(np.uint32)[:, layout.CELL_HANDLE_WORD]
        codes, is_single = octets[:, layout.CELL_CODE_AT], octets[:, layout.CELL_PARTS_AT] <= 1
        columns = list(split_by_code(codes, handles, np.flatnonzero(is_single), octets[:, layout.CELL_BODY]))
        if len(several := np.flatnonzero(~is_single)):
            columns += self._join_cells(octets, codes, handles, several)
        decoded: list[tuple[events.RecordedEvent, ...]] = [()] * len(cells)
        for code, positions, of, bodies in columns:
            if code != layout.VOID_CODE:
                for at, recorded in zip(positions, self._decode_column(code, of, bodies)):
                    decoded[at] = recorded
        return [*itertools.chain.from_iterable(decoded)]

    def _join_cells(self, octets: Any, codes: Any, handles: Any, at: Any) -> Iterable[CellColumn]:
        """Returns the events whose parts are in the cells at these positions, at the position of the last part."""
        first, second = at[::2], at[1::2]
        pieces = octets[:, layout.CELL_PIECE]
        if not self._pending and len(first) == len(second) and are_pairs(octets, first, second):  # mostly
            bodies = np.zeros((len(codes), 2 * layout.PART_BYTES), np.uint8)
            bodies[second] = np.concatenate((pieces[first], pieces[second]), axis=1)
            return split_by_code(codes, handles, second, bodies)
        columns = []
        for position in at.tolist():
            counter, code, part, parts, handle, body, _ = layout.CELL.unpack(octets[position].tobytes())
            whole = self._join_parts(counter, part, parts, body)
            if whole is not None:
                columns.append((code, [position], [handle], [whole]))
        return columns

    def _decode_column(
        self, code: int, handles: Sequence[int], bodies: Any
    ) -> Iterable[tuple[events.RecordedEvent, ...]]:
        """Returns the recorded events of each body of this code: nearly always one. `bodies`: bytes, or rows of octets."""
        text_of, ring = self._strings.__getitem__, self.ring
        try:
            unpacked = unpack_bodies(code, bodies, text_of)
        except Exception:  # whatever a damaged cell holds, the others are read
            if len(bodies) > 1:
                alone = zip(handles, map(bytes, bodies))
                return [
                    each for handle, body in alone for each in self._decode_column(code, [handle], [body])
                ]
            self.torn += 1
            return [()]
        if type(unpacked[0]) not in events.EXPANDED_EVENTS:  # mostly
            rows = zip(itertools.repeat(ring), handles, unpacked)
            return zip(map(make_tuple, itertools.repeat(RecordedEvent), rows))
        return [
            tuple([make_tuple(RecordedEvent, (ring, handle, each)) for each in events.expand(event)])
            for handle, event in zip(handles, unpacked)
        ]

    def _join_parts(self, counter: int, part: int, parts: int, body: bytes) -> bytes | None:
        first, piece = layout.PART.unpack(body)
        waiting = self._pending.get(first)
        if waiting is None:
            self._pending[first] = counter, {part: piece}
            return None
        _, seen = waiting
        seen[part] = piece
        if len(seen) < parts:
            return None
        del self._pending[first]
        return b"".join([seen[i] for i in sorted(seen)])

    def _expire_pending(self) -> None:
        stale = [
            first for first, (counter, _) in self._pending.items() if counter + PENDING_CELLS < self._next
        ]
        for first in stale:
            del self._pending[first]
            self.torn += 1
