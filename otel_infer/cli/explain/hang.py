"""Describes a server that hangs: since when, and which code the threads of its processes are in."""

from __future__ import annotations

from itertools import groupby

from otel_infer.assembly.assembler import Assembler
from otel_infer.ringbuffer.events import CodeLocated

MAX_THREADS, MAX_FRAMES = 12, 8
_IDLE = ("/queue.py", "/concurrent/futures/thread.py", "/selectors.py", "/tqdm/_monitor.py")
"""Files of functions that wait for work: a thread that is in one of them within its first frames is idle."""
_IDLE_FRAMES = 3


def describe_hang(assembler: Assembler) -> list[str]:
    """Returns lines; none where the server does not hang."""
    hang = assembler.processes.hang
    if hang is None:
        return []
    are = "1 request is" if hang.requests == 1 else f"{hang.requests} requests are"
    lines = [
        f"the server hangs: {are} in flight, and no step has ended for {(hang.at - hang.since) / 1e9:.0f} s"
    ]
    latest = [located for located in assembler.pauses.stacks.values() if located.at >= hang.since]
    for number, located in enumerate(latest, 1):
        lines += [
            f"  process {number} of {len(latest)}, its threads, innermost function first",
            *_list_threads(located),
        ]
    if latest:
        lines.append("  change first: see which of these functions wait for each other, or for a device")
    return lines


def _list_threads(located: CodeLocated) -> list[str]:
    """Returns the innermost frames of the threads that are not idle."""
    frames = (line.strip() for line in located.stacks.splitlines())
    threads = [
        list(stack)
        for is_head, stack in groupby(frames, lambda line: line.startswith("thread "))
        if not is_head
    ]
    busy = [stack for stack in threads if not any(_is_idle(frame) for frame in stack[:_IDLE_FRAMES])]
    return [
        f"    {'· ' if number == 0 else '  '}{frame}"
        for stack in busy[:MAX_THREADS]
        for number, frame in enumerate(stack[:MAX_FRAMES])
    ]


def _is_idle(frame: str) -> bool:
    return frame.rpartition(":")[0].endswith(_IDLE)
