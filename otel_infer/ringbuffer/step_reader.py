"""Reads a step ring: the records that were complete at the previous poll, in order.

After an overwrite, reading continues at the oldest record that is safe, and the loss is reported
(`StepsLost`).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from otel_infer.ringbuffer import events, layout
from otel_infer.ringbuffer.reader import InvalidRing, RingHeader, Words


class StepFile:
    """A file of step rings of equal size, which its writers begin to use one after another."""

    def __init__(self, memory: mmap.mmap, descriptor: int, path: Path | None) -> None:
        self.descriptor, self.path = descriptor, path
        self._memory = memoryview(memory)
        cells = RingHeader(self._memory).cells
        self._ring_bytes = layout.PAGE + cells * layout.CELL_BYTES
        self._unused = list(range(len(memory) // self._ring_bytes))
        if cells < 1 or not self._unused:
            raise InvalidRing("sizes in the header exceed the file")

    @property
    def is_complete(self) -> bool:
        """Whether all of its rings were taken."""
        return not self._unused

    def take_new_rings(self) -> Iterator[memoryview]:
        """Yields the memory of each ring that is in use since the last call."""
        for index in list(self._unused):
            begin = index * self._ring_bytes
            memory = self._memory[begin : begin + self._ring_bytes]
            if memory[: len(layout.MAGIC_BYTES)] == layout.MAGIC_BYTES:
                self._unused.remove(index)
                yield memory


class StepReader:
    """Reader of the step ring of one engine thread. `taken_over`: another reader read it before."""

    def __init__(self, memory: memoryview, ring: int, taken_over: bool = False) -> None:
        self.header = RingHeader(memory)
        self.ring, self.memory = ring, memory
        if self.header.cells < 1 or layout.PAGE + self.header.cells * layout.CELL_BYTES > len(memory):
            raise InvalidRing("sizes in the header exceed the file")
        words = np.frombuffer(memory, np.uint64, self.header.cells * 8, layout.PAGE)
        self._heads: Words = words.reshape(self.header.cells, 8)[:, 0]
        self._next = 0
        self._complete = self._newest_polled = self._scanned = 0
        self._last_read = -1
        self._taken_over = taken_over
        self.lost = 0
        self.fill_ratio = 0.0
        """Share of the ring that was written between the last two polls."""
        self.request_keyframe()

    @property
    def engine(self) -> str:
        """Returns the engine's name, as its writer recorded it."""
        return str(self.header.text.get("engine", ""))

    @property
    def position(self) -> int:
        """The number of cells that were read."""
        return self._next

    def request_keyframe(self) -> None:
        """Requests a keyframe; the writer writes it when it checks next."""
        self.header.words[layout.W_KEYFRAME_REQUESTED] += 1

    def poll(self, now: int, final: bool = False) -> Iterator[events.RecordedEvent]:
        """Yields new events that were complete at the last `observe` or poll; `final`: all that are complete now."""
        if final:
            self.observe()
        while self._next < self._complete:
            before = self._next
            yield from self._read_records()
            if self._next == before:
                yield self._skip_to_safe_record(now)
                break
        if self._is_overrun():
            yield self._skip_to_safe_record(now)
        self.observe()
        before, self._newest_polled = self._newest_polled, self._complete
        self.fill_ratio = (self._complete - before) / self.header.cells

    def observe(self) -> None:
        """Lets the next poll return what is complete now."""
        self._complete = self._scanned = self._scan_complete(max(self._complete, self._scanned, self._next))

    def is_filled_above(self, share: float) -> bool:
        """Returns whether more than this share of the ring was written since the last poll; 0: anything."""
        self._scanned = self._scan_complete(max(self._complete, self._scanned, self._next))
        return self._scanned - self._newest_polled > share * self.header.cells

    def close(self) -> None:
        """Releases the memory."""
        del self._heads, self.header.words
        self.memory = memoryview(b"")

    def _is_overrun(self) -> bool:
        """Returns whether the writer has lapped this reader.

        Then a younger record is complete while the next one is not. Records are overwritten in the order in
        which they were written. While the last record that was read is intact, nothing after it is gone, so
        the ring need not be searched.
        """
        is_first_unwritten = self._next == 0 and self._heads[0] == 0
        if is_first_unwritten or any(
            self._parse_record_head(at) is not None for at in (self._next, self._last_read)
        ):
            return False
        return self._find_newest() > self._next

    def _find_record_starts(self) -> list[int]:
        """Returns the counters at which a record may begin, oldest first.

        Bodies can look like heads, so check each.
        """
        heads = self._heads.astype(np.int64)
        cells = self.header.cells
        own = np.flatnonzero((heads > 0) & ((heads - 1) % cells == np.arange(cells)))
        return list(np.sort(heads[own] - 1).tolist())

    def _find_newest(self) -> int:
        return next(
            (c for c in reversed(self._find_record_starts()) if self._parse_record_head(c) is not None), -1
        )

    def _scan_complete(self, counter: int) -> int:
        """Returns the counter up to which records are complete now."""
        while True:
            record = self._parse_record_head(counter)
            if record is None:
                return counter
            counter += record[0]

    def _parse_record_head(self, counter: int) -> tuple[int, int, int] | None:
        position = counter % self.header.cells
        return _parse_record_head(
            self.memory, layout.PAGE + (position << 6), counter, self.header.cells - position
        )

    def _read_records(self) -> Iterator[events.RecordedEvent]:
        """Yields the complete records, up to the end of the memory or to an inconsistent record.

        All of them are copied together. Records are overwritten in the order in which they were written: if
        the first one is intact after the copy, all of them were.
        """
        position = self._next % self.header.cells
        begin, cells = layout.PAGE + (position << 6), self._complete - self._next
        first = self._parse_record_head(self._next)
        copy = bytes(self.memory[begin : begin + (min(cells, self.header.cells - position) << 6)])
        if first is None or self._parse_record_head(self._next) != first:
            return
        at = 0
        while at < len(copy):
            shape = _parse_record_head(copy, at, self._next, len(copy) - at >> 6)
            if shape is None:
                return
            cells, code, length = shape
            if code != layout.PAD_CODE:
                body = copy[at + layout.RECORD_HEAD.size : at + length - layout.RECORD_TAIL.size]
                try:
                    event = events.unpack_step(code, body)
                except Exception:  # a damaged record is skipped as lost
                    return
                yield events.make_tuple(events.RecordedEvent, (self.ring, 0, event))
            self._last_read = self._next
            self._next += cells
            at += cells << 6

    def _skip_to_safe_record(self, now: int) -> events.RecordedEvent:
        """Skips to the oldest record that is safe from being overwritten; returns the loss."""
        cells = self.header.cells
        starts = [
            counter for counter in self._find_record_starts() if self._parse_record_head(counter) is not None
        ]
        newest = starts[-1] if starts else self._next
        safe = max(newest - cells + cells // 4, self._next + 1)
        resumed = next((counter for counter in starts if counter >= safe), max(newest, self._next + 1))
        lost = 0 if self._taken_over and not self._next else resumed - self._next
        self.lost += lost
        self._next = self._complete = self._scanned = resumed
        self.request_keyframe()
        return events.RecordedEvent(self.ring, 0, events.StepsLost(now, lost))


def _parse_record_head(
    memory: memoryview | bytes, begin: int, counter: int, room: int
) -> tuple[int, int, int] | None:
    """Returns (cells, code, length) of the record at this counter.

    None unless both ends match, within `room` cells.
    """
    head, length, code = layout.RECORD_HEAD.unpack_from(memory, begin)
    if head != counter + 1 or length < layout.RECORD_OVERHEAD:
        return None
    cells = room if code == layout.PAD_CODE else (length + 63) >> 6
    if cells > room:
        return None
    (tail,) = layout.RECORD_TAIL.unpack_from(memory, begin + (cells << 6) - 8)
    return (cells, code, length) if tail == counter + 1 else None
