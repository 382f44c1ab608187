"""Kills processes that a server leaves behind: a signal to LitServe's main process does not stop its workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

MARKER = "SERVER_UNDER_TEST"
"""Variable in the environment of a server and of all processes that it starts."""
SIDECAR = b"boot = json"


def kill_leftovers(marker: str) -> None:
    """Kills the processes whose environment has this marker, but no sidecar, which ends by itself."""
    wanted = f"{MARKER}={marker}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            has_marker = wanted in (entry / "environ").read_bytes().split(b"\0")
            if has_marker and SIDECAR not in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:  # it has ended, or is another user's
            continue
