"""The string table of a request ring: texts that recur get an id, and a text that is not used makes room.

When room gets short, all ids are taken out of use and given back on their next use. After the ring was
written twice since, no cell refers to an id that was not given back, and the id is free for another text. No
step waits for another thread: a lock that is held elsewhere is not awaited.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable

from otel_infer.ringbuffer import events, layout

LOW_SHARE = 1 / 4
"""Share of free ids below which room is made."""
REVOLUTIONS = 2
"""How often the ring is written before an unused id is free. Once would do if no thread ever paused between
looking up an id and writing its cell.
"""


class StringTable:
    """Table of one writer. `ids` is read directly by its events; a text that is missing there is interned.

    `memory`, `offset`: where its `size` entries lie. `take_cell`: writes an empty cell, and returns its number.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        offset: int,
        size: int,
        words: memoryview,
        take_cell: Callable[[], int],
    ) -> None:
        self.ids: dict[str, int] = {"": events.NONE}
        self.on_cleared: Callable[[], object] = lambda: None
        """Called when all ids are taken out of use, for compiled code that stores some."""
        self._memory, self._offset, self._words, self._take_cell = memory, offset, words, take_cell
        self._size, self._ring_cells = size, int(words[layout.W_CELLS])
        self._free = deque(range(1, size + 1))
        self._unused: dict[str, int] = {}
        self._swept_at = self._closed_at = 0
        self._lock = threading.Lock()

    def intern(self, text: str) -> int:
        """Returns the id of a text that is not in `ids`; `layout.STRING_OTHER` while there is no room."""
        if not text:  # another thread has just taken all ids out of use
            return events.NONE
        if len(self._free) < LOW_SHARE * self._size:
            self._make_room()
        known = self._unused.get(text)
        if known is not None:
            self.ids[text] = known
            return known
        try:
            index = self._free.popleft()
        except IndexError:  # the event is still written, with `_OTHER`
            return layout.STRING_OTHER
        encoded = text.encode("utf-8", "replace")[: layout.STRING_MAX]
        offset = self._offset + (index - 1) * layout.STRING_BYTES
        layout.STRING.pack_into(self._memory, offset, encoded, len(encoded))
        self.ids[text] = index
        return index

    def _make_room(self) -> None:
        """Does the next step, if it is due: takes all ids out of use, closes the sweep, frees what is unused."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            cell = self._take_cell()
            if not self._swept_at:
                self._unused = dict(self.ids)
                self.ids.clear()
                self.on_cleared()
                self.ids[""] = events.NONE
                self._swept_at = cell
            elif not self._closed_at:
                if cell - self._swept_at >= REVOLUTIONS * self._ring_cells:
                    self._unused, self._closed_at = {}, cell
            elif (
                cell - self._closed_at >= self._ring_cells // 4
            ):  # an id that was taken meanwhile is in `ids`
                self._free_unused()
                self._swept_at = self._closed_at = 0
        finally:
            self._lock.release()

    def _free_unused(self) -> None:
        taken = {*self.ids.values(), *self._free}
        # Before the first entry is written: a reader forgets what it knows before it sees another text.
        self._words[layout.W_STRINGS_REUSED] += 1
        self._free.extend(index for index in range(1, self._size + 1) if index not in taken)
