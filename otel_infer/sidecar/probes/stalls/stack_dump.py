"""Has a thread of another process write its stack, by a signal that is sent only while the process shows our handler.

Before each signal it is checked that the process holds the lock of its ring and its pidfd is alive. The process must
catch the signal, the thread must not block it, and the handler's descriptor must still be our file. Linux.
"""

from __future__ import annotations

import os
import select
import time
from pathlib import Path

from otel_infer.config import private_files
from otel_infer.ringbuffer import layout
from otel_infer.ringbuffer.native import native
from otel_infer.ringbuffer.process_rings import ProcessRings
from otel_infer.sidecar.probes.stalls.stack_text import Frame, parse_stack
from otel_infer.sidecar.probes.thread_stats import resolve_thread_id

MAX_STACK_BYTES = 1 << 16
"""Bytes that are read of one stack; faulthandler writes 100 frames at most."""
MAX_FILE_BYTES = 1 << 18
"""A longer file is emptied after a read."""
WAIT_S, POLL_S = 0.03, 0.0005
"""How long a stack is awaited. A thread that sleeps writes it at once; one that runs, when it is interrupted."""
MAX_THREADS = 64
MAX_STATUS_BYTES = 1 << 13
SILENT_S = 30.0
SAME_S = 0.05
"""For so long a process counts as unchanged, so that the stacks of many threads need one check."""
_FUTEX, _RUNNING = b"futex", b"R"
_CAUGHT, _BLOCKED = b"SigCgt:", b"SigBlk:"


class StackDump:
    """The stacks of the threads of one process. `proc`: where the kernel's files of processes are."""

    def __init__(self, process: ProcessRings, proc: Path = Path("/proc")) -> None:
        self._process, self._proc = process, proc
        self._pidfd = self._file = -1
        self._pid = 0
        self._silent_until = dict[int, float]()
        self._alive_at = self._handled_at = -SAME_S
        self.signals = self.bytes_read = 0
        """Signals that were sent so far, and bytes of the stacks, from which follows what they cost the server."""

    def read_stack(self, thread: int) -> tuple[Frame, ...]:
        """Returns the stack of a thread, innermost frame first; () where it cannot be had.

        `thread`: the kernel's id, as seen from here. A thread that wrote none most likely runs no Python code, so it is
        not signalled again for a while.
        """
        try:
            is_silent = time.monotonic() < self._silent_until.get(thread, 0.0)
            if is_silent or not self._open_process() or not self._is_handled(thread):
                return ()
            since = os.fstat(self._file).st_size
            native.signal_thread(self._pid, thread, self._process.reader.header.words[layout.W_STACK_SIGNAL])
            self.signals += 1
            text = self._await_text(since)
        except OSError:  # the process or the thread has ended, or the kernel forbids it
            return ()
        if not text:
            self._silent_until[thread] = time.monotonic() + SILENT_S
        return parse_stack(text)

    def _await_text(self, since: int) -> str:
        """Returns what was written since then, once it is longer no more; "" if nothing comes in time."""
        until, size = time.monotonic() + WAIT_S, since
        while time.monotonic() < until:
            time.sleep(POLL_S)
            last, size = size, os.fstat(self._file).st_size
            if size > since and size == last:
                break
        text = os.pread(self._file, min(size - since, MAX_STACK_BYTES), since).decode("utf-8", "replace")
        self.bytes_read += len(text)
        if size > MAX_FILE_BYTES:
            os.ftruncate(self._file, 0)
        return text

    def list_threads(self, running_only: bool = False) -> list[int]:
        """Returns the kernel's ids of the threads, at most 64. `running_only`: threads that run, or want a core."""
        tasks = self._proc / str(self._pid) / "task"
        try:
            threads = sorted(map(int, os.listdir(tasks)))
        except (OSError, ValueError):
            return []
        if running_only:
            threads = [thread for thread in threads if self._read_state(tasks, thread) == _RUNNING]
        return threads[:MAX_THREADS]

    @staticmethod
    def _read_state(tasks: Path, thread: int) -> bytes:
        try:
            return (tasks / str(thread) / "stat").read_bytes().rpartition(b")")[2].split(None, 1)[0]
        except (OSError, IndexError):  # it has ended
            return b""

    def find_thread(self, own_id: int) -> int:
        """Returns the kernel's id, as seen from here, of a thread that its process sees under this one; 0 = none."""
        if not own_id or not self._open_process():
            return 0
        if self._pid == self._process.reader.header.pid:
            return own_id
        return resolve_thread_id(self._proc / str(self._pid) / "task", own_id)

    def waits_for_futex(self, thread: int) -> bool:
        """Returns whether a thread waits for a lock, as the kernel sees it; False where the kernel does not tell."""
        try:
            return _FUTEX in _read_file(f"{self._proc}/{self._pid}/task/{thread}/wchan")
        except OSError:
            return False

    def close(self) -> None:
        """Closes its files."""
        for descriptor in (self._pidfd, self._file):
            if descriptor >= 0:
                os.close(descriptor)
        self._pidfd = self._file = -1

    def _open_process(self) -> bool:
        """Returns whether the process can be signalled: its pidfd is open, and it lives."""
        if time.monotonic() - self._alive_at < SAME_S:
            return True
        if not self._process.reader.header.words[layout.W_STACK_SIGNAL] or not hasattr(os, "pidfd_open"):
            return False
        if self._pidfd < 0:
            path, self._pid = self._process.stacks_path, self._process.find_pid()
            if path is None or not self._pid:
                return False
            self._file = private_files.open_beside_rings(path, os.O_RDWR)
            self._pidfd = os.pidfd_open(self._pid)
        has_ended = bool(select.select([self._pidfd], [], [], 0)[0])
        if has_ended or self._process.find_pid() != self._pid:
            return False
        self._alive_at = time.monotonic()
        return True

    def _is_handled(self, thread: int) -> bool:
        """Returns whether the process catches the signal, the thread does not block it, and the handler's file is ours."""
        words = self._process.reader.header.words
        number, folder = words[layout.W_STACK_SIGNAL], f"{self._proc}/{self._pid}"
        masks = _read_masks(f"{folder}/task/{thread}/status")
        if not masks.get(_CAUGHT, 0) >> (number - 1) & 1 or masks.get(_BLOCKED, 1) >> (number - 1) & 1:
            return False
        if time.monotonic() - self._handled_at >= SAME_S:
            written = os.stat(f"{folder}/fd/{words[layout.W_STACK_FILE]}")
            if not os.path.samestat(written, os.fstat(self._file)):
                return False
            self._handled_at = time.monotonic()
        return True


def _read_file(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, MAX_STATUS_BYTES)
    finally:
        os.close(descriptor)


def _read_masks(status: str) -> dict[bytes, int]:
    """Returns the masks of signals that are caught and blocked."""
    content = _read_file(status)
    return {
        name: int(content[at + len(name) :].split(None, 1)[0], 16)
        for name in (_CAUGHT, _BLOCKED)
        if (at := content.find(name)) >= 0
    }
