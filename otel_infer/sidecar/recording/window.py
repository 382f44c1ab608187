"""Holds the last two minutes of events, packed. Pure: no clock, thread or I/O.

Events are packed on arrival and compressed in chunks of at most two seconds. Events that leave the window
pass through `window_state`, which keeps those without which the rest cannot be interpreted. If so many events
arrive that the size limit is reached, the window covers less time.
"""

from __future__ import annotations

import marshal
import mmap
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from otel_infer.export.otlp.deflate import deflate
from otel_infer.ringbuffer.events import EVENT_TYPES, RecordedEvent
from otel_infer.sidecar.recording.file import EventBatch
from otel_infer.sidecar.recording.packed_events import (
    COMPRESSION_LEVEL,
    EVENT_CODES,
    MARSHAL_VERSION,
    EventRow,
    WindowStateSnapshot,
)
from otel_infer.sidecar.recording.window_state import WindowState

WINDOW_NS = 120_000_000_000
MAX_BYTES = 32 << 20
"""Bytes; the state before the window may take an eighth of them."""
CHUNK_NS = 2_000_000_000
CHUNK_BYTES = 1 << 18
"""Bytes before compression."""


class _CompressedChunk(NamedTuple):
    """Compressed cycles, from the horizon before the first of them to the horizon of the last.

    It has separate memory pages, which are freed with it. In the heap it would lie for two minutes between
    short-lived objects.
    """

    packed: mmap.mmap
    began_at: int
    horizon: int
    event_count: int


class WindowSnapshot(NamedTuple):
    """Window at one instant; it does not change any more.

    `began_at`: events up to this instant (monotonic ns) have left the window; 0 = none have.
    """

    state: WindowStateSnapshot
    chunks: tuple[_CompressedChunk, ...]
    dropped_requests: int
    began_at: int

    @property
    def seconds(self) -> float:
        """Returns the length of the window, s."""
        return (self.chunks[-1].horizon - self.chunks[0].began_at) / 1e9 if self.chunks else 0.0

    @property
    def event_count(self) -> int:
        """Returns the number of events in the window, without the state before it."""
        return sum(chunk.event_count for chunk in self.chunks)

    def iter_batches(self) -> Iterator[EventBatch]:
        """Yields the batches of a tape: the state before the window, then each cycle."""
        if before := self.state.unpack_rows():
            yield EventBatch(_rows_to_events(before), self.began_at)
        for chunk in self.chunks:
            for horizon, rows in _unpack_chunk(chunk):
                yield EventBatch(_rows_to_events(rows), horizon)


class EventWindow:
    """Buffer of events that are not older than `span_ns`, in at most `limit` bytes."""

    def __init__(self, span_ns: int = WINDOW_NS, limit: int = MAX_BYTES) -> None:
        self._window_ns, self._limit = span_ns, limit
        self._chunks: deque[_CompressedChunk] = deque()
        self._pending: list[bytes] = []
        self._pending_size = self._pending_event_count = self._chunks_size = 0
        self._pending_since = self._horizon = self._began_at = 0
        self._state = WindowState(limit // 8)

    @property
    def size(self) -> int:
        """Returns the number of bytes held."""
        return self._chunks_size + self._pending_size + self._state.size

    def add_events(self, recorded: Sequence[RecordedEvent], horizon: int) -> None:
        """Adds the events of one cycle, which are complete up to `horizon` (monotonic ns)."""
        if recorded:
            codes = EVENT_CODES
            rows = [(ring, handle, codes[type(event)], *event) for ring, handle, event in recorded]
            packed = marshal.dumps((horizon, rows), MARSHAL_VERSION)
            if not self._pending:
                self._pending_since = self._horizon
            self._pending.append(packed)
            self._pending_size += len(packed)
            self._pending_event_count += len(rows)
        self._horizon = horizon
        if self._pending_since <= 0:  # nothing was held before the first cycle
            self._pending_since = horizon
        if self._pending and (self._pending_size >= CHUNK_BYTES or horizon - self._pending_since >= CHUNK_NS):
            self._seal_chunk()
        self._evict_chunks()

    def take_snapshot(self) -> WindowSnapshot:
        """Returns what the window holds now."""
        self._seal_chunk()
        return WindowSnapshot(
            self._state.take_snapshot(), tuple(self._chunks), self._state.dropped_requests, self._began_at
        )

    def _seal_chunk(self) -> None:
        if not self._pending:
            return
        packed = deflate.compress(marshal.dumps(self._pending, MARSHAL_VERSION), COMPRESSION_LEVEL)
        pages = mmap.mmap(-1, len(packed), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages[:] = packed
        self._chunks.append(
            _CompressedChunk(pages, self._pending_since, self._horizon, self._pending_event_count)
        )
        self._chunks_size += _round_to_pages(len(packed))
        self._pending = []
        self._pending_size = self._pending_event_count = 0

    def _evict_chunks(self) -> None:
        """Evicts chunks that are too old or exceed the limit; the state keeps the necessary events."""
        begin = self._horizon - self._window_ns
        while self._chunks and (self._chunks[0].horizon < begin or self.size > self._limit):
            chunk = self._chunks.popleft()
            self._chunks_size -= _round_to_pages(len(chunk.packed))
            self._began_at = chunk.horizon
            for _, rows in _unpack_chunk(chunk):
                self._state.add_rows(rows)
            self._state.pack_and_evict()


def _round_to_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _unpack_chunk(chunk: _CompressedChunk) -> Iterator[tuple[int, list[EventRow]]]:
    for packed in marshal.loads(deflate.decompress(chunk.packed)):
        yield marshal.loads(packed)


def _rows_to_events(rows: Sequence[EventRow]) -> list[RecordedEvent]:
    kinds = EVENT_TYPES
    return [RecordedEvent(ring, handle, kinds[code](*fields)) for ring, handle, code, *fields in rows]
