"""Lets the sidecar have the stack of a thread written, by a signal to code that needs no interpreter lock.

    the sidecar signals a thread ─▶ faulthandler's handler (C) ─▶ NAME.stacks: file, line and function of every frame

The handler also runs while a thread holds the interpreter lock in C code, or while all threads are blocked. It never
writes values. It writes the stack of the thread that it interrupts, which cannot change meanwhile. The stacks of other
threads can, and reading them without the interpreter lock has crashed servers. A thread that is interrupted amid a call may have
no valid stack: a fault of memory ends the stack then, and not the process (`_stack_signal.c`). Nothing is written without
a signal, and signals are sent only while something is late (`sidecar.probes.stalls`).

The signal is a real-time signal that this process neither handles, ignores nor blocks. If the program takes the signal
later, another one is chosen. A header word of the ring tells the sidecar which one is in use. Before faulthandler
handles the signal it is ignored, so that a signal that arrives as the handler is removed does nothing.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import signal
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

from otel_infer.config import private_files
from otel_infer.ringbuffer import layout
from otel_infer.ringbuffer.arena import Arena, FileArena
from otel_infer.ringbuffer.forks import call_in_child
from otel_infer.ringbuffer.native import native

log = logging.getLogger("otel_infer")

_MARGIN = 8
"""Signals at both ends of the range are left to programs, which count from there."""
_STATUS_MASKS = ("SigBlk:", "SigIgn:", "SigCgt:")


class StackSignal:
    """The signal of this process. `words`: the header of its request ring."""

    def __init__(self) -> None:
        self.is_enabled = True
        self._number = 0
        self._file = -1
        self._words: Any = None
        self._lock = threading.Lock()
        self._ignored: set[int] = set()

    def start(self, arena: Arena, name: str, words: Any) -> None:
        """Registers the handler of this process, whose rings have this name; it takes the place of the last one.

        Does nothing where signals cannot be used, and without the compiled module: the header word stays 0.
        """
        if not self.is_enabled or native is None or not isinstance(arena, FileArena):
            return
        try:
            with self._lock:
                self.stop()
                self._open_file(arena.directory / (name + layout.SUFFIX_STACKS))
                self._register(words, find_free_signal(known=self._ignored))
        except (OSError, RuntimeError, ValueError) as error:
            log.debug("no stacks of this process: %s", error)

    def stop(self) -> None:
        """Removes the handler."""
        number, file, self._number, self._file = self._number, self._file, 0, -1
        if self._words is not None:
            self._words[layout.W_STACK_SIGNAL] = 0
            self._words = None
        if number:
            faulthandler.unregister(number)
        if file >= 0:
            os.close(file)

    def reset_after_fork(self) -> None:
        """Forgets the rings of the parent process. Its handler stays, and no sidecar knows this process yet."""
        self._words, self._lock = None, threading.Lock()
        if native is not None:
            native.forget_writing_thread()

    def yield_signal(self, number: int) -> None:
        """Takes another signal if this one is ours, because the program is about to use it."""
        if not self._number or number != self._number or self._words is None:
            return
        words, self._number = self._words, 0
        words[layout.W_STACK_SIGNAL] = 0
        faulthandler.unregister(number)
        self._ignored.discard(number)
        other = find_free_signal(number, self._ignored)
        if other:
            self._register(words, other)

    def _open_file(self, path: Path) -> None:
        self._file = private_files.open_beside_rings(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def _register(self, words: Any, number: int) -> None:
        if not number:
            return
        native.ignore_signal(number)
        self._ignored.add(number)
        faulthandler.register(number, file=self._file, all_threads=False, chain=False)
        native.write_stacks_on(number, self._file)
        self._number, self._words = number, words
        words[layout.W_STACK_FILE] = self._file
        words[layout.W_STACK_SIGNAL] = number


def find_free_signal(excluded: int = 0, known: Collection[int] = ()) -> int:
    """Returns a real-time signal that this process does not use; 0 = there is none. Raises `OSError` without /proc.

    `known`: signals that were ignored here before; they are free unless something else handles or blocks them.
    """
    masks = {}
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(_STATUS_MASKS):
            name, mask = line.split()
            masks[name] = int(mask, 16)
    blocked, ignored, caught = (masks.get(name, 0) for name in _STATUS_MASKS)
    for number in range(signal.SIGRTMAX - _MARGIN, signal.SIGRTMIN + _MARGIN, -1):
        used = blocked | caught | (0 if number in known else ignored)
        if number != excluded and not used >> (number - 1) & 1:
            return number
    return 0


stack_signal = StackSignal()
"""The signal of this process."""
atexit.register(stack_signal.stop)
call_in_child(stack_signal.reset_after_fork)
