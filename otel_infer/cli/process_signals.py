"""Signals that `otel-infer run` passes on to its server, and its part as the parent of the server's processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator

FORWARDED_SIGNALS = (
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
AWAITED_SIGNALS = FORWARDED_SIGNALS if hasattr(signal, "sigtimedwait") else ()
"""Signals that `sigtimedwait` takes while the server runs, because a handler does not receive the sender."""
SI_KERNEL = 0x80
"""`si_code` of a signal that the terminal sent to its foreground group.

Forwarding it would deliver it twice.
"""
PR_SET_CHILD_SUBREAPER = 36
_SET_BYTES, _INFO_INTS, _CODE = 128, 32, 2
"""Sizes of `sigset_t` and `siginfo_t`, and the place of `si_code` in the latter (sigaction(2))."""


@contextlib.contextmanager
def mask_awaited_signals(how: signal.Sigmasks) -> Iterator[None]:
    """Blocks or unblocks the awaited signals within the `with` block."""
    before = signal.pthread_sigmask(how, AWAITED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def await_signal(seconds: float) -> tuple[int, int]:
    """Waits for one of the awaited signals, and returns its number and `si_code`; (0, 0) if none comes in time.

    By the C library, because `signal.sigtimedwait` returns what was in memory as a signal if the process is stopped and
    continued meanwhile, as with Ctrl-Z and `fg` (CPython 3.11 to 3.14).
    """
    library = ctypes.CDLL(None)
    awaited, received = ctypes.create_string_buffer(_SET_BYTES), (ctypes.c_int * _INFO_INTS)()
    library.sigemptyset(awaited)
    for number in AWAITED_SIGNALS:
        library.sigaddset(awaited, int(number))
    timeout = (ctypes.c_long * 2)(int(seconds), int(seconds % 1 * 1e9))
    number = library.sigtimedwait(awaited, received, timeout)
    return (number, received[_CODE]) if number > 0 else (0, 0)


def is_in_foreground() -> bool:
    """Returns whether the terminal sends its signals to our process group."""
    try:
        with open("/dev/tty", "rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def become_reaper() -> None:
    """Makes orphans of the server our children (Linux), so that none stays a zombie."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (OSError, AttributeError):
        pass
