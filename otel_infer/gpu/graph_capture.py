"""Tracks CUDA graph captures in this process: during a capture no event here is recorded, queried or read.

A query by another thread breaks a capture in the default mode ("operation not permitted when stream is
capturing"; observed on an H100 with torch 2.11). An event that was recorded into a graph can never be read.
The hooks of `instrumentation.torch.cuda_graphs` call this module.
"""

from __future__ import annotations

import os
import threading
import time

MAX_WAIT_S = 0.1
"""Longest time that a capture waits for a device query; queries end within µs."""

open_captures = 0
"""Captures in progress."""
capture_count = 0
"""Captures begun so far."""
_active_queries = 0
_lock = threading.Lock()


def begin_capture() -> None:
    """Records that a capture is about to begin, and waits until no device query is active."""
    global open_captures, capture_count
    with _lock:
        open_captures, capture_count = open_captures + 1, capture_count + 1
    until = time.monotonic() + MAX_WAIT_S
    while _active_queries and time.monotonic() < until:
        time.sleep(0)


def end_capture() -> None:
    """Records that a capture ended, or did not begin."""
    global open_captures
    with _lock:
        open_captures = max(open_captures - 1, 0)


def try_begin_query() -> bool:
    """Returns whether the device may be queried now; if True, captures wait for `end_query`."""
    global _active_queries
    with _lock:
        if open_captures:
            return False
        _active_queries += 1
        return True


def end_query() -> None:
    """Records that a device query ended."""
    global _active_queries
    with _lock:
        _active_queries -= 1


def _reset_after_fork() -> None:
    """Resets all counts in a forked child, because the threads that raised them do not exist there."""
    global _lock, _active_queries, open_captures
    _lock, _active_queries, open_captures = threading.Lock(), 0, 0


os.register_at_fork(after_in_child=_reset_after_fork)
