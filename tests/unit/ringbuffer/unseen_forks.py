"""Forks that Python does not see, for `test_forks`: `python -m tests.unit.ringbuffer.unseen_forks NAME`.

They run in a process of their own. In a child of a process with threads, a lock that another thread held is never released.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable

from otel_infer.ringbuffer import forks
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import start
from tests.support.rings import Recording


def fork_unseen(child: Callable[[], bytes]) -> bytes:
    """Returns what the child returns. libc's `fork` calls nothing of Python's."""
    reads, writes = os.pipe()
    pid = ctypes.PyDLL(None).fork()
    if pid == 0:
        try:
            os.write(writes, child() or b"nothing")
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as found:
        answer = found.read()
    os.waitpid(pid, 0)
    return answer


def drop_rings_of_parent() -> None:
    recording = Recording()
    request = start.open_request("parent", owner="test")
    assert request is not None and recorder.requests is not None

    def child() -> bytes:
        before = recorder.requests is not None
        forks.notice_fork()
        dropped = recorder.requests is None
        forks.notice_fork()  # once is enough
        return repr((before, dropped)).encode()

    assert fork_unseen(child) == b"(True, True)"
    forks.notice_fork()
    assert recorder.requests is not None
    request.close()
    assert [record.name for record in recording.records()] == ["parent"]
    recording.stop()


def create_different_ids() -> None:
    recording = Recording()

    def child() -> bytes:
        forks.notice_fork()
        request = start.open_request("child", owner="test")
        return b"" if request is None else request.ids[0]

    ids = {fork_unseen(child) for _ in range(3)}
    recording.stop()
    assert len(ids) == 3 and all(len(each) == 16 for each in ids)


PROGRAMS = {program.__name__: program for program in (drop_rings_of_parent, create_different_ids)}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
