"""Notes when the import of a watched module began, which no import hook reports."""

from __future__ import annotations

import sys
import time
from typing import Any

from otel_infer import _clock

PAUSE_NS = 1_000_000_000
"""A series of imports ends where no import begins for so long."""


class ImportStarts:
    """A finder that finds nothing. Python calls it just before it imports a module.

    The start of a watched module is that of the series of imports that it is in: applications import many other
    modules before it, and between two of them.
    """

    def __init__(self) -> None:
        self._started_at: dict[str, int] = {}
        self._series_at = self._latest_at = 0

    def watch_module(self, name: str) -> None:
        """Notes the start of this module's import from now on."""
        self._started_at.setdefault(name, 0)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Notes the instant. A mere search for a module may come earlier, so the last call counts."""
        now = _clock.now()
        if now - self._latest_at > PAUSE_NS:
            self._series_at = now
        self._latest_at = now
        if name in self._started_at:
            self._started_at[name] = self._series_at

    def started_at(self, name: str) -> int:
        """Returns when the import of a module began, monotonic ns; 0 = not seen."""
        return self._started_at.get(name, 0)


import_starts = ImportStarts()
"""The finder of this process."""


def estimate_past_import() -> tuple[int, int]:
    """Returns (start, end) of imports that ended before they were watched, monotonic ns.

    They began with the process, and took no longer than the CPU time that it has used: it may have idled since.
    """
    now, began = _clock.now(), _clock.read_process_start()
    return (began, min(now, began + time.process_time_ns())) if began else (0, now)
