"""Whether anybody in this process captures a CUDA graph: meanwhile no event of ours is recorded, queried or read.

A query by another thread breaks a capture in the default mode ("operation not permitted when stream is capturing"; seen on an
H100 with torch 2.11), and an event that was recorded into a graph can never be read. Told by `integrations.cuda`.
"""

from __future__ import annotations

import os
import threading
import time

MAX_WAIT_S = 0.1
"""Whoever asks a device lets go within µs; a capture does not wait for longer than this."""

open_captures = 0
"""Captures that are going on."""
capture_count = 0
"""Captures that there were, so far."""
_active_queries = 0
_lock = threading.Lock()


def begin_capture() -> None:
    """A capture is about to begin: nobody asks a device from here on."""
    global open_captures, capture_count
    with _lock:
        open_captures, capture_count = open_captures + 1, capture_count + 1
    until = time.monotonic() + MAX_WAIT_S
    while _active_queries and time.monotonic() < until:
        time.sleep(0)


def end_capture() -> None:
    """It is over, or did not begin."""
    global open_captures
    with _lock:
        open_captures = max(open_captures - 1, 0)


def try_begin_query() -> bool:
    """Whether a device may be asked now; if so no capture begins until `asked`."""
    global _active_queries
    with _lock:
        if open_captures:
            return False
        _active_queries += 1
        return True


def end_query() -> None:
    """The device has answered."""
    global _active_queries
    with _lock:
        _active_queries -= 1


def _reset_after_fork() -> None:
    """In a forked child nobody asks, whoever was about to."""
    global _lock, _active_queries, open_captures
    _lock, _active_queries, open_captures = threading.Lock(), 0, 0


os.register_at_fork(after_in_child=_reset_after_fork)
