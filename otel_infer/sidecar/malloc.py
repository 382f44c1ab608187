"""Memory that is free and that the C library keeps all the same.

Batches, chunks of the flight recorder and columns of steps are of all sizes and ages, so that what they leave lies between what
stays: by itself glibc gives back the end of its heaps alone. Here it is asked for the rest as well, page by page (`malloc_trim`,
malloc(3)): some ms, without the GIL. Other C libraries are left alone.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable

import numpy as np

TRIM_INTERVAL_NS = 5_000_000_000
M_ARENA_MAX = -8
"""As malloc.h has it."""
NUMPY_CACHE_SIZES, NUMPY_CACHE_DEPTH = range(1, 1024), 7


def use_single_arena() -> None:
    """Has threads that are begun from now on take memory from the same heap: what one of them gave back, another takes."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def fill_numpy_cache() -> None:
    """Has numpy take at once, and beside each other, what it keeps in the end."""
    for size in NUMPY_CACHE_SIZES:
        arrays = [np.empty(size, np.uint8) for _ in range(NUMPY_CACHE_DEPTH)]
        del arrays  # to where the next ones of this size come from


class MallocTrimmer:
    """Gives back what is free, once in a while. `trim`: how."""

    def __init__(self, trim: Callable[[int], object] | None = None) -> None:
        self._trim = trim
        self._due_at = 0
        if trim is None:
            with contextlib.suppress(AttributeError, OSError, TypeError):
                self._trim = ctypes.CDLL(None).malloc_trim

    def tick(self, now: int) -> None:
        """At this instant (monotonic ns)."""
        if now >= self._due_at and self._trim is not None:
            self._due_at = now + TRIM_INTERVAL_NS
            self._trim(0)
