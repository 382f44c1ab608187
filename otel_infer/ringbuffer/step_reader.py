"""The reading side of a step ring: what was complete at the previous wake, in order; what was overwritten is skipped to the
oldest record that is safe, and said (`StepsLost`)."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator

import numpy as np

from otel_infer.ringbuffer import events, layout
from otel_infer.ringbuffer.reader import InvalidRing, RingHeader, Words


class StepReader:
    """Reads the step ring of one engine thread. `taken_over`: another reader was there before."""

    def __init__(self, memory: mmap.mmap, ring: int, taken_over: bool = False) -> None:
        self.header = RingHeader(memory)
        self.ring = ring
        self._memory = memory
        if layout.PAGE + self.header.cells * layout.CELL_BYTES > len(memory):
            raise InvalidRing("sizes in the header exceed the file")
        words = np.frombuffer(memory, np.uint64, self.header.cells * 8, layout.PAGE)
        self._heads: Words = words.reshape(self.header.cells, 8)[:, 0]
        self._next = 0
        self._complete = 0
        self._last_read = -1
        self._taken_over = taken_over
        self.lost = 0
        self.fill_ratio = 0.0
        """The share of the ring that was written between the last two polls."""
        self.request_keyframe()

    @property
    def engine(self) -> str:
        """The engine's name, as the writer said it."""
        return str(self.header.text.get("engine", ""))

    def request_keyframe(self) -> None:
        """Has the writer state the whole batch, as soon as it looks again."""
        self.header.words[layout.W_KEYFRAME_REQUESTED] += np.uint64(1)

    def poll(self, now: int, final: bool = False) -> Iterator[events.RecordedEvent]:
        """What is new and was complete at the previous poll; `final`: everything that is complete now."""
        if final:
            self._complete = self._scan_complete(self._complete)
        while self._next < self._complete:
            before = self._next
            yield from self._read_records()
            if self._next == before:
                yield self._skip_to_safe_record(now)
                break
        if self._is_overrun():
            yield self._skip_to_safe_record(now)
        before = max(self._complete, self._next)
        self._complete = self._scan_complete(before)
        self.fill_ratio = (self._complete - before) / self.header.cells

    def close(self) -> None:
        """Lets go of the memory."""
        del self._heads, self.header.words
        self._memory = mmap.mmap(-1, 1)

    def _is_overrun(self) -> bool:
        """Whether the writer has lapped us: a younger record is complete while ours is not.

        Records are overwritten in the order in which they were written, so while the last one that was read is there,
        nothing after it is gone: no need to search the ring.
        """
        is_first_unwritten = self._next == 0 and self._heads[0] == 0
        if is_first_unwritten or any(
            self._parse_record_head(at) is not None for at in (self._next, self._last_read)
        ):
            return False
        return self._find_newest() > self._next

    def _find_record_starts(self) -> list[int]:
        """Counters at which a record may begin, oldest first; bodies can look like heads, so check each."""
        heads = self._heads.astype(np.int64)
        cells = self.header.cells
        own = np.flatnonzero((heads > 0) & ((heads - 1) % cells == np.arange(cells)))
        return list(np.sort(heads[own] - 1).tolist())

    def _find_newest(self) -> int:
        return next(
            (c for c in reversed(self._find_record_starts()) if self._parse_record_head(c) is not None), -1
        )

    def _scan_complete(self, counter: int) -> int:
        """The counter up to which records are complete now."""
        while True:
            record = self._parse_record_head(counter)
            if record is None:
                return counter
            counter += record[0]

    def _parse_record_head(self, counter: int) -> tuple[int, int, int] | None:
        position = counter % self.header.cells
        return _parse_record_head(
            self._memory, layout.PAGE + (position << 6), counter, self.header.cells - position
        )

    def _read_records(self) -> Iterator[events.RecordedEvent]:
        """Goes on to what is complete, or to the end of the memory, or to before a record that is not what it should be.

        All of it is copied at once. Records are overwritten in the order in which they were written: if the first one is
        still there after the copy, so were all.
        """
        position = self._next % self.header.cells
        begin, cells = layout.PAGE + (position << 6), self._complete - self._next
        first = self._parse_record_head(self._next)
        copy = self._memory[begin : begin + (min(cells, self.header.cells - position) << 6)]
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
                    fact = events.unpack_step(code, body)
                except (ValueError, struct.error):
                    return
                yield events.make_tuple(events.RecordedEvent, (self.ring, 0, fact))
            self._last_read = self._next
            self._next += cells
            at += cells << 6

    def _skip_to_safe_record(self, now: int) -> events.RecordedEvent:
        """Goes on at the oldest record that is safe from being overwritten, and says what was skipped."""
        cells = self.header.cells
        starts = [
            counter for counter in self._find_record_starts() if self._parse_record_head(counter) is not None
        ]
        newest = starts[-1] if starts else self._next
        safe = max(newest - cells + cells // 4, self._next + 1)
        resumed = next((counter for counter in starts if counter >= safe), max(newest, self._next + 1))
        lost = 0 if self._taken_over and not self._next else resumed - self._next
        self.lost += lost
        self._next = self._complete = resumed
        self.request_keyframe()
        return events.RecordedEvent(self.ring, 0, events.StepsLost(now, lost))


def _parse_record_head(
    memory: mmap.mmap | bytes, begin: int, counter: int, room: int
) -> tuple[int, int, int] | None:
    """(cells, code, length) of the record at this counter, or None unless both ends are there, within `room` cells."""
    head, length, code = layout.RECORD_HEAD.unpack_from(memory, begin)
    if head != counter + 1 or length < layout.RECORD_OVERHEAD:
        return None
    cells = room if code == layout.PAD_CODE else (length + 63) >> 6
    if cells > room:
        return None
    (tail,) = layout.RECORD_TAIL.unpack_from(memory, begin + (cells << 6) - 8)
    return (cells, code, length) if tail == counter + 1 else None
