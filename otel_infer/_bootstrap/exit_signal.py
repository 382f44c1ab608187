"""Sends the last telemetry of the in-process mode before SIGTERM ends the process.

uvicorn raises SIGTERM again after its own shutdown. The process then ends without the functions of `atexit`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

CLOSE_TIMEOUT_S = 6.0


class ExitSignalHandler:
    """Handler of SIGTERM where the process has none; afterwards the signal ends the process as before."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close, self._pid = close, 0

    def install(self) -> None:
        """Installs the handler, if this is the main thread and SIGTERM has its default action."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._pid = os.getpid()
            signal.signal(signal.SIGTERM, self._handle)

    def remove(self) -> None:
        """Restores the default action, unless somebody else has replaced the handler since."""
        is_main = threading.current_thread() is threading.main_thread()
        if self._pid and is_main and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._pid = 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        try:
            if self._pid == os.getpid():  # a forked child has no reader
                # In a thread, because the interrupted code may hold the lock that closing takes.
                closing = threading.Thread(target=self._close, daemon=True)
                closing.start()
                closing.join(CLOSE_TIMEOUT_S)
        finally:
            os.kill(os.getpid(), number)
