"""Whether anybody in this process captures a CUDA graph: meanwhile no event of ours is recorded, queried or read.

A query by another thread breaks a capture in the default mode ("operation not permitted when stream is capturing"; seen on an
H100 with torch 2.11), and an event that was recorded into a graph can never be read. Told by `integrations.cuda`.
"""

from __future__ import annotations

import os
import threading
import time

PATIENCE_S = 0.1
"""Whoever asks a device lets go within µs; a capture does not wait for longer than this."""

open_now = 0
"""Captures that are going on."""
begun = 0
"""Captures that there were, so far."""
_asking = 0
_changing = threading.Lock()


def begin() -> None:
    """A capture is about to begin: nobody asks a device from here on."""
    global open_now, begun
    with _changing:
        open_now, begun = open_now + 1, begun + 1
    until = time.monotonic() + PATIENCE_S
    while _asking and time.monotonic() < until:
        time.sleep(0)


def end() -> None:
    """It is over, or did not begin."""
    global open_now
    with _changing:
        open_now = max(open_now - 1, 0)


def ask() -> bool:
    """Whether a device may be asked now; if so no capture begins until `asked`."""
    global _asking
    with _changing:
        if open_now:
            return False
        _asking += 1
        return True


def asked() -> None:
    """The device has answered."""
    global _asking
    with _changing:
        _asking -= 1


def _forget() -> None:
    """In a forked child nobody asks, whoever was about to."""
    global _changing, _asking, open_now
    _changing, _asking, open_now = threading.Lock(), 0, 0


os.register_at_fork(after_in_child=_forget)
