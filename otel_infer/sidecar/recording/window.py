"""The last two minutes of facts, packed. Pure: no clock, thread or I/O.

Facts are packed as they come and compressed in chunks of at most two seconds. What leaves the window is looked at once
more, for what the rest cannot be understood without (`edge`). Where so many facts come that the limit is reached, the
window holds less time.
"""

from __future__ import annotations

import marshal
import mmap
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from otel_infer.ringbuffer.events import RingFact
from otel_infer.sidecar.recording import file
from otel_infer.sidecar.recording.file import Passage
from otel_infer.sidecar.recording.packed_events import CODES, FASTEST, MARSHAL, Held, Row
from otel_infer.sidecar.recording.window_state import Edge

SPAN_NS = 120_000_000_000
LIMIT = 32 << 20
"""Bytes, of which the edge may take an eighth."""
CHUNK_NS = 2_000_000_000
CHUNK = 1 << 18
"""Bytes before compression."""


class _Chunk(NamedTuple):
    """Compressed wakes, from the horizon before the first of them to that of the last.

    In pages of its own, which are gone when it is: two minutes long it would lie in the heap between what comes and goes.
    """

    packed: mmap.mmap
    began: int
    horizon: int
    facts: int


class Snapshot(NamedTuple):
    """A window as it was at one instant; it does not change any more.

    `began_at`: what was told up to this instant (monotonic ns) has left the window; 0 = nothing has.
    """

    edge: Held
    chunks: tuple[_Chunk, ...]
    requests_left_out: int
    began_at: int

    @property
    def seconds(self) -> float:
        """How long it is."""
        return (self.chunks[-1].horizon - self.chunks[0].began) / 1e9 if self.chunks else 0.0

    @property
    def facts(self) -> int:
        """How many facts are in it, without those of before it."""
        return sum(chunk.facts for chunk in self.chunks)

    def passages(self) -> Iterator[Passage]:
        """As a tape has them: what has to be known first, then each wake."""
        if before := self.edge.rows():
            yield Passage(_said(before), self.began_at)
        for chunk in self.chunks:
            for horizon, rows in _wakes(chunk):
                yield Passage(_said(rows), horizon)


class Window:
    """Holds facts that are not older than `span_ns`, in at most `limit` bytes."""

    def __init__(self, span_ns: int = SPAN_NS, limit: int = LIMIT) -> None:
        self._span_ns, self._limit = span_ns, limit
        self._chunks: deque[_Chunk] = deque()
        self._pending: list[bytes] = []
        self._pending_size = self._pending_facts = self._chunks_size = 0
        self._pending_since = self._horizon = self._began_at = 0
        self._edge = Edge(limit // 8)

    @property
    def size(self) -> int:
        """Bytes that are held."""
        return self._chunks_size + self._pending_size + self._edge.size

    def keep(self, said: Sequence[RingFact], horizon: int) -> None:
        """Takes the facts of one wake and the instant up to which they are complete (monotonic ns)."""
        if said:
            codes = CODES
            rows = [(ring, handle, codes[type(fact)], *fact) for ring, handle, fact in said]
            packed = marshal.dumps((horizon, rows), MARSHAL)
            if not self._pending:
                self._pending_since = self._horizon
            self._pending.append(packed)
            self._pending_size += len(packed)
            self._pending_facts += len(rows)
        self._horizon = horizon
        if self._pending_since <= 0:  # before the first wake nothing was held
            self._pending_since = horizon
        if self._pending and (self._pending_size >= CHUNK or horizon - self._pending_since >= CHUNK_NS):
            self._seal()
        self._forget()

    def snapshot(self) -> Snapshot:
        """What is held now."""
        self._seal()
        return Snapshot(self._edge.held(), tuple(self._chunks), self._edge.left_out, self._began_at)

    def _seal(self) -> None:
        if not self._pending:
            return
        packed = zlib.compress(marshal.dumps(self._pending, MARSHAL), FASTEST)
        pages = mmap.mmap(-1, len(packed), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages[:] = packed
        self._chunks.append(_Chunk(pages, self._pending_since, self._horizon, self._pending_facts))
        self._chunks_size += _on_pages(len(packed))
        self._pending = []
        self._pending_size = self._pending_facts = 0

    def _forget(self) -> None:
        """What is too old, or too much, leaves but for what is needed of it."""
        begin = self._horizon - self._span_ns
        while self._chunks and (self._chunks[0].horizon < begin or self.size > self._limit):
            chunk = self._chunks.popleft()
            self._chunks_size -= _on_pages(len(chunk.packed))
            self._began_at = chunk.horizon
            for _, rows in _wakes(chunk):
                self._edge.fold(rows)
            self._edge.settle()


def _on_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _wakes(chunk: _Chunk) -> Iterator[tuple[int, list[Row]]]:
    for packed in marshal.loads(zlib.decompress(chunk.packed)):
        yield marshal.loads(packed)


def _said(rows: Sequence[Row]) -> list[RingFact]:
    kinds = file.KINDS
    return [RingFact(ring, handle, kinds[code](*fields)) for ring, handle, code, *fields in rows]
