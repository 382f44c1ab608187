"""Allocates step rings: the first engine threads of a process get large ones, many more get small ones.

A file of small rings holds several, one after another, each with its own header. So a thousand engine threads
need a few dozen files, and as many descriptors.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from typing import NamedTuple

from otel_infer.ringbuffer import layout
from otel_infer.ringbuffer.arena import Arena, RingLimitReached
from otel_infer.ringbuffer.step_writer import StepWriter

LARGE_RINGS = 4
"""Rings with a file of their own, as large as there is room for."""
RESERVED_BYTES = 1 << 20
"""What small rings leave to the server's other processes."""


class RingClass(NamedTuple):
    """Small rings: for engine threads up to number `upto`, `cells` each, `per_file` in a file.

    The interpreter lets one thread run at a time, so the more threads there are, the fewer steps each does.
    """

    upto: int
    cells: int
    per_file: int


SMALL_RINGS = (RingClass(16, 1024, 4), RingClass(64, 256, 16), RingClass(1 << 30, 64, 16))


class StepRingAllocator:
    """Allocator of the step rings of one process; its files are named after `prefix`. Any thread may use it."""

    def __init__(self, arena: Arena, prefix: str) -> None:
        self._arena, self._prefix = arena, prefix
        self._lock = threading.Lock()
        self._numbers, self._file_numbers = itertools.count(1), itertools.count(1)
        self._free: dict[int, deque[memoryview]] = {each.cells: deque() for each in SMALL_RINGS}

    def create_writer(self, engine: str) -> tuple[StepWriter, int]:
        """Returns the writer of a new ring and its number, from 1; raises `RingUnavailable`."""
        number = next(self._numbers)
        if number <= LARGE_RINGS:
            return StepWriter(self._arena, self._name_file(), engine, number=number), number
        chosen = next(each for each in SMALL_RINGS if number <= each.upto)
        free = self._free[chosen.cells]
        with self._lock:  # else each of many threads that begin together would allocate a file
            if not free:
                self._allocate_file(chosen)
            memory = free.popleft()
        sizes = layout.RingSizes(step_cells=chosen.cells)
        return StepWriter.from_memory(memory, sizes, engine, number), number

    def _allocate_file(self, chosen: RingClass) -> None:
        ring_bytes = layout.RingSizes(step_cells=chosen.cells).steps_bytes
        size = chosen.per_file * ring_bytes
        if not self._arena.can_allocate(size) or self._arena.remaining_bytes() < size + RESERVED_BYTES:
            raise RingLimitReached("the memory for the rings of one server is used up")
        memory = memoryview(self._arena.allocate(self._name_file() + layout.SUFFIX_STEPS, size))
        self._free[chosen.cells].extend(
            memory[start : start + ring_bytes] for start in range(0, size, ring_bytes)
        )

    def _name_file(self) -> str:
        return f"{self._prefix}-{next(self._file_numbers)}"
