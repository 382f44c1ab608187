"""Whether anybody in this process captures a CUDA graph: meanwhile no event of ours is recorded, queried or read.

A query by another thread breaks a capture in the default mode ("operation not permitted when stream is capturing"; seen on an
H100 with torch 2.11), and an event that was recorded into a graph can never be read. Told by `integrations.cuda`.
"""

from __future__ import annotations

open_now = 0
"""Captures that are going on."""
begun = 0
"""Captures that there were, so far."""


def begin() -> None:
    """A capture is about to begin."""
    global open_now, begun
    open_now, begun = open_now + 1, begun + 1


def end() -> None:
    """It is over, or did not begin."""
    global open_now
    open_now = max(open_now - 1, 0)
