"""Kills processes that a server leaves behind: a signal to LitServe's main process does not stop its workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

MARKER = "SERVER_UNDER_TEST"
"""Variable in the environment of a server and of all processes that it starts."""
SIDECAR = b"boot = json"


def find_processes(marker: str) -> Iterator[tuple[int, bool]]:
    """Yields the id of each process whose environment has this marker, and whether it is a sidecar."""
    wanted = f"{MARKER}={marker}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name), SIDECAR in (entry / "cmdline").read_bytes()
        except OSError:  # it has ended, or is another user's
            continue


def kill_leftovers(marker: str) -> None:
    """Kills the processes with this marker, but no sidecar, which ends by itself."""
    for pid, is_sidecar in find_processes(marker):
        if not is_sidecar:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # it has ended
                continue


def wait_for_sidecars(marker: str, seconds: float = 15) -> None:
    """Waits until all processes with this marker have ended, so that recordings are complete."""
    until = time.monotonic() + seconds
    while any(find_processes(marker)) and time.monotonic() < until:
        time.sleep(0.05)
