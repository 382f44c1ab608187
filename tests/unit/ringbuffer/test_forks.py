"""A child whose fork Python did not see, as of uWSGI, records into rings of its own."""

from __future__ import annotations

import ctypes
import os
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


def test_a_child_of_an_unseen_fork_drops_the_rings_of_its_parent() -> None:
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


def test_children_of_unseen_forks_create_different_ids() -> None:
    recording = Recording()

    def child() -> bytes:
        forks.notice_fork()
        request = start.open_request("child", owner="test")
        return b"" if request is None else request.ids[0]

    ids = {fork_unseen(child) for _ in range(3)}
    recording.stop()
    assert len(ids) == 3 and all(len(each) == 16 for each in ids)


def test_a_fork_that_python_sees_calls_the_functions_once() -> None:
    calls: list[int] = []
    forks.call_in_child(lambda: calls.append(os.getpid()))
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        forks.notice_fork()
        os.write(writes, str(len(calls)).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reads, 9) == b"1" and calls == []
