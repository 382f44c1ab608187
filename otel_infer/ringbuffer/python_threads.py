"""Lists the threads that Python has started, in the header page of the request ring.

Native libraries start threads as well (OpenMP, ggml, ONNX Runtime), which compute for the threads that call them. From outside the
two kinds look alike, so the process tells the sidecar its own: all when the ring is made, then each one that starts.
"""

from __future__ import annotations

import threading
from typing import Any

from otel_infer.ringbuffer import layout


class PythonThreads:
    """The table of a process. `memory`: of its request ring. Threads that have ended stay until the table is full."""

    def __init__(self, memory: Any) -> None:
        self._table = memoryview(memory)[layout.PYTHON_THREADS_AT : layout.THREADS_AT].cast("I")
        self._used = self._omitted = 0
        self._list_all()

    def add(self, thread: int) -> None:
        """Adds a thread that has started, by the kernel's id."""
        position = self._used  # another thread may add one now: one of the two may be missing then
        if position < layout.PYTHON_THREADS:
            self._table[position] = thread
            self._used = position + 1
            return
        self._omitted += 1
        if self._omitted >= layout.PYTHON_THREADS:  # not at each start, where so many live
            self._list_all()

    def _list_all(self) -> None:
        alive = [thread.native_id or 0 for thread in threading.enumerate()][: layout.PYTHON_THREADS]
        self._used, self._omitted = len(alive), 0
        self._table[:] = memoryview(bytes(4 * layout.PYTHON_THREADS)).cast("I")
        for position, thread in enumerate(alive):
            self._table[position] = thread


def read_python_threads(memory: Any) -> set[int]:
    """Returns the listed threads of a process, by the ids that it sees itself."""
    return set(memoryview(memory)[layout.PYTHON_THREADS_AT : layout.THREADS_AT].cast("I").tolist()) - {0}
