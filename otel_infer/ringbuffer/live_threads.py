"""Notes which thread works for one request, so that the sidecar finds the thread of a request that is late."""

from __future__ import annotations

import threading

from otel_infer.ringbuffer import layout


def note_thread(words: memoryview, handle: int, at: int) -> int:
    """Notes that the calling thread works for a request from `at` on; returns the entry of the table.

    `words`: of the table. Returns -1, and notes nothing, if a thread is noted for the request, or the entry is taken.
    """
    entry = handle % layout.THREADS * layout.THREAD_WORDS
    if not handle or words[entry]:
        return -1
    words[entry + 1], words[entry + 2] = threading.get_native_id(), at
    words[entry] = handle
    return entry
