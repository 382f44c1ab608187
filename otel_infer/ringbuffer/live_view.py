"""Reads what the requests of a process do now: those that work in a thread of their own, and which are in an engine.

The events of a ring are read every few seconds. In between, this view reads the live table, and the code and handle of
each cell that was written since the last look. A cell that is torn is read again as an event later.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from otel_infer.ringbuffer import events, layout

_SUBMITTED, _FINISHED, *_ENDED = (
    events.LAYOUT_BY_EVENT[event].code
    for event in (events.RequestSubmitted, events.EngineFinished, events.RequestEnded, events.ExchangeEnded)
)
_SLOT_WORDS = layout.LIVE_BYTES // 8
_THREAD_WORD = layout.LIVE_THREAD_AT // 8
_WINDOW = 256
"""Cells that are looked at together."""


class LiveThread(NamedTuple):
    """A request for which alone a thread works. `thread`: as `thread_ids.pack_thread` packs it."""

    handle: int
    thread: int
    seen_at: int


class LiveView:
    """View of the request ring of one process."""

    def __init__(self, memory: mmap.mmap, cells: int, slots: int, live_table: int) -> None:
        self._heads = np.frombuffer(memory, np.uint64, cells * 8, layout.PAGE).reshape(cells, 8)[:, :2]
        table = np.frombuffer(memory, np.uint64, slots * _SLOT_WORDS, live_table).reshape(slots, _SLOT_WORDS)
        self._handles, self._arrivals, self._threads = table[:, 0], table[:, 1], table[:, _THREAD_WORD]
        self._cells = cells
        self._offsets = np.arange(min(_WINDOW, cells))
        self.newest = 0
        """Counter of the newest cell of the last look."""
        self.in_engine: set[int] = set()
        """Handles of the requests that were submitted to an engine, and have not left it."""
        self.left_engine: set[int] = set()
        """Handles of those that left it since the last look."""
        self.ended = 0
        """Requests that ended since the last look."""

    def read_threads(self, now: int) -> dict[int, LiveThread]:
        """Returns the requests for which a thread works, by handle. `now`: the instant of this look."""
        rows = np.flatnonzero(self._threads)
        handles, threads = self._handles[rows] & 0xFFFFFFFF, self._threads[rows]
        return {
            handle: LiveThread(handle, thread, now)
            for handle, thread in zip(handles.tolist(), threads.tolist())
            if handle and thread
        }

    def list_arrivals(self, threads: Collection[int]) -> list[int]:
        """Returns when those requests arrived that are in an engine, or that a thread works for (monotonic ns)."""
        rows = np.flatnonzero(self._handles)
        handles, arrivals = (self._handles[rows] & 0xFFFFFFFF).tolist(), self._arrivals[rows].tolist()
        return [at for handle, at in zip(handles, arrivals) if handle in self.in_engine or handle in threads]

    def look_at_cells(self, since: int) -> None:
        """Follows the cells that were written since the last look. `since`: older ones were read as events."""
        self.left_engine, self.ended = set(), 0
        if since > self.newest + self._cells // 2:
            self.newest = since
        while True:
            counters = self.newest + self._offsets
            cells = self._heads[counters % self._cells]
            written = np.flatnonzero(cells[:, 0] == counters.astype(np.uint64) + 1)
            for word in cells[written, 1].tolist():
                self._follow(word & 0xFF, word >> 32)
            if not len(written):
                return
            self.newest += int(written[-1]) + 1

    def _follow(self, code: int, handle: int) -> None:
        if code == _SUBMITTED:
            self.in_engine.add(handle)
        elif code == _FINISHED and handle in self.in_engine:
            self.in_engine.discard(handle)
            self.left_engine.add(handle)
        elif code in _ENDED:
            self.ended += 1
            self.in_engine.discard(handle)
