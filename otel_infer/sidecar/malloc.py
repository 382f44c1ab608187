"""Returns free memory to the system that the C library would keep.

Batches, chunks of the flight recorder and columns of steps differ in size and age. The memory that they free
therefore lies between memory in use. By itself glibc returns only the end of its heaps. `malloc_trim`
(malloc(3)) returns the rest as well, page by page; it takes some ms, without the GIL. Other C libraries are
left alone.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable

import numpy as np

TRIM_INTERVAL_NS = 5_000_000_000
M_ARENA_MAX = -8
"""As in malloc.h."""
NUMPY_CACHE_SIZES, NUMPY_CACHE_DEPTH = range(1, 1024), 7


def use_single_arena() -> None:
    """Makes threads started from now on share one heap, so that they reuse each other's freed memory."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def fill_numpy_cache() -> None:
    """Fills numpy's cache of small buffers now, so that the buffers lie beside each other."""
    for size in NUMPY_CACHE_SIZES:
        arrays = [np.empty(size, np.uint8) for _ in range(NUMPY_CACHE_DEPTH)]
        del arrays  # into the cache from which the next arrays of this size come


class MallocTrimmer:
    """Periodic return of free memory. `trim`: replaces `malloc_trim`."""

    def __init__(self, trim: Callable[[int], object] | None = None) -> None:
        self._trim = trim
        self._due_at = 0
        if trim is None:
            with contextlib.suppress(AttributeError, OSError, TypeError):
                self._trim = ctypes.CDLL(None).malloc_trim

    def tick(self, now: int) -> None:
        """Trims if that is due at `now` (monotonic ns)."""
        if now >= self._due_at and self._trim is not None:
            self._due_at = now + TRIM_INTERVAL_NS
            self._trim(0)
