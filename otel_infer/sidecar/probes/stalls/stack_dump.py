"""Has a process write the stacks of its threads: one signal, sent only while the process shows its handler. Linux.

Before each signal: the process is the one that holds the lock of its ring; its signal is caught and not blocked; and the
descriptor that its handler writes to is still our file. A pidfd cannot reach another process with the same pid.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from otel_infer.config import private_files
from otel_infer.ringbuffer import layout
from otel_infer.ringbuffer.process_rings import ProcessRings

MAX_DUMP_BYTES = 1 << 18
"""What is read of one dump: about 100 threads with 100 frames each."""
MAX_FILE_BYTES = 1 << 20
"""A longer file is emptied once its last dump was read."""
_FUTEX = "futex"


class StackDump:
    """The stacks of one process. `proc`: where the kernel's files of processes are."""

    def __init__(self, process: ProcessRings, proc: Path = Path("/proc")) -> None:
        self._process, self._proc = process, proc
        self._pidfd = self._file = -1
        self._pid = 0
        self._read_from = 0

    def request(self) -> bool:
        """Sends the signal; returns whether it was sent. `read` returns the stacks some ms later."""
        words = self._process.reader.header.words
        number = words[layout.W_STACK_SIGNAL]
        if not number or not hasattr(os, "pidfd_open"):
            return False
        try:
            self._open_process()
            if self._pidfd < 0 or not self._is_handled(number, words[layout.W_STACK_FILE]):
                return False
            self._read_from = os.fstat(self._file).st_size
            signal.pidfd_send_signal(self._pidfd, number)
        except OSError:  # the process has ended, or the kernel forbids it
            return False
        return True

    def read(self) -> str:
        """Returns what was written since the last signal; "" if nothing was."""
        try:
            text = os.pread(self._file, MAX_DUMP_BYTES, self._read_from).decode("utf-8", "replace")
            if os.fstat(self._file).st_size > MAX_FILE_BYTES:
                os.ftruncate(self._file, 0)
        except OSError:
            return ""
        return text

    def waits_for_futex(self, thread: int) -> bool:
        """Returns whether a thread waits for a lock, as the kernel sees it; False where the kernel does not tell."""
        try:
            where = (self._proc / str(self._pid) / "task" / str(thread) / "wchan").read_text(encoding="ascii")
        except (OSError, ValueError):
            return False
        return _FUTEX in where

    def close(self) -> None:
        """Closes its files."""
        for descriptor in (self._pidfd, self._file):
            if descriptor >= 0:
                os.close(descriptor)
        self._pidfd = self._file = -1

    def _open_process(self) -> None:
        if self._pidfd >= 0:
            return
        path, self._pid = self._process.stacks_path, self._process.find_pid()
        if path is None or not self._pid:
            return
        self._file = private_files.open_beside_rings(path, os.O_RDWR)
        pidfd = os.pidfd_open(self._pid)
        if self._process.find_pid() == self._pid:  # it lived when its pidfd was opened
            self._pidfd = pidfd
        else:
            os.close(pidfd)

    def _is_handled(self, number: int, descriptor: int) -> bool:
        """Returns whether the process catches the signal, does not block it, and its handler writes to our file."""
        masks = {}
        folder = self._proc / str(self._pid)
        for line in (folder / "status").read_text(encoding="ascii", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name in ("SigCgt", "SigBlk"):
                masks[name] = int(value, 16) >> (number - 1) & 1
        with contextlib.suppress(OSError):
            written = os.stat(folder / "fd" / str(descriptor))
            return masks == {"SigBlk": 0, "SigCgt": 1} and os.path.samestat(written, os.fstat(self._file))
        return False
