"""Keeps one core awake, at next to no cost to anybody else: a loop that hardly runs where anybody else wants to (SCHED_IDLE).

python -m benchmarks.awake CORE      ends with its standard input

A core that has just slept is slower than one that is busy, and who wakes up often is charged with more CPU time for the
same work: by 40 % on a virtual machine, whose clock nobody inside can fix. Servers that run models do not sleep.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def awake(cores: set[int] | None = None) -> Iterator[None]:
    """Keeps these cores awake, else all of this process; elsewhere than on Linux, does nothing.

    To Linux SCHED_IDLE is a weight (3 to 1024) and not a last place: beside a thread that never sleeps the loop gets 0.3 % of
    the core, in turns of a whole tick (4 ms). A loop that never sleeps needs it least, and its p99 shows it.
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
    """Until nobody holds the other end of standard input."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.sched_setaffinity(0, {core})
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    while True:
        pass


if __name__ == "__main__":
    main(int(sys.argv[1]))
