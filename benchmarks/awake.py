"""Keeps a core awake with a loop at SCHED_IDLE, which runs only while nothing else wants the core.

python -m benchmarks.awake CORE ends with its standard input

A core that just slept takes up to 40 % more CPU time for the same work on a virtual machine, whose clock cannot be
fixed from inside. Servers that run models do not sleep.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def keep_awake(cores: set[int] | None = None) -> Iterator[None]:
    """Keeps these cores awake, or all cores of this process. Does nothing without SCHED_IDLE (Linux).

    SCHED_IDLE is a weight (3 of 1024). Beside a thread that never sleeps the loop gets 0.3 % of the core, one tick
    (4 ms) at a time. So exclude the core of such a thread: its p99 would include the tick.
    """
    wanted = (cores or os.sched_getaffinity(0)) if hasattr(os, "SCHED_IDLE") else set()
    command = [sys.executable, "-m", "benchmarks.awake"]
    keepers = [subprocess.Popen([*command, str(core)], stdin=subprocess.PIPE) for core in sorted(wanted)]
    try:
        yield
    finally:
        for keeper in keepers:
            assert keeper.stdin is not None
            keeper.stdin.close()
            keeper.wait(10)


def main(core: int) -> None:
    """Runs until standard input is closed."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.sched_setaffinity(0, {core})
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    while True:
        pass


if __name__ == "__main__":
    main(int(sys.argv[1]))
