"""Asks the reader of this process's rings to export everything, and waits for its answer."""

from __future__ import annotations

import threading
from typing import Any

from otel_infer import _clock
from otel_infer.ringbuffer import layout

POLL_S = 0.02


def request_flush(words: Any, timeout: float) -> bool | None:
    """Returns whether the receivers accepted everything; None if `timeout` s were not enough.

    `words`: the header of this process's request ring.
    """
    requested = words[layout.W_FLUSH_REQUESTED] = words[layout.W_FLUSH_REQUESTED] + 1
    deadline = _clock.now() + int(timeout * 1e9)
    while _clock.now() < deadline:
        if words[layout.W_FLUSH_DONE] >= requested:
            return bool(words[layout.W_FLUSH_REFUSED] < requested)
        threading.Event().wait(POLL_S)
    return None
