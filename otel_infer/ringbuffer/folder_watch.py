"""Detects that names in a folder were added or removed, by one system call instead of a listing."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from otel_infer.config import private_files

RECHECK_NS = 10_000_000_000
"""A change is reported at least this often, because the folder's path may lead to another folder by now."""
CLOCK_TICK_NS = 50_000_000
"""Longer than a tick of the clock of file systems: names that change within one tick share one time."""


class FolderWatch:
    """Watch of one folder. The first call of `has_changed` returns True."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor = -1
        self._changed_at = self._checked_at = 0

    def has_changed(self, now: int) -> bool:
        """Returns whether names may have changed since the last call. `now`: monotonic ns."""
        if now - self._checked_at >= RECHECK_NS or self._descriptor < 0:
            self._checked_at = now
            self._open()
            return True
        status = os.fstat(self._descriptor)
        if not status.st_nlink:  # removed, and perhaps created again
            self._open()
            return True
        if status.st_mtime_ns == self._changed_at:
            return False
        self._store_time(status.st_mtime_ns)
        return True

    def close(self) -> None:
        """Closes the folder."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        """Opens the folder that has the path now; without a folder, each call reports a change."""
        self.close()
        with contextlib.suppress(OSError), private_files.open_private_folder(self._folder) as descriptor:
            self._descriptor = os.dup(descriptor)
            self._store_time(os.fstat(descriptor).st_mtime_ns)

    def _store_time(self, changed_at: int) -> None:
        """Stores the time of the last change, unless another change could have the same time."""
        self._changed_at = changed_at if abs(time.time_ns() - changed_at) > CLOCK_TICK_NS else 0
