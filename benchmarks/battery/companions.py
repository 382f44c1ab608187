"""Processes beside a server: others that compute, a slow database, a slow reader of its log."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO

HOG = "import hashlib\nblock = bytes(1 << 16)\nwhile True: hashlib.sha256(block)"


@contextlib.contextmanager
def run_hogs(number: int, niceness: int = 0) -> Iterator[None]:
    """Runs processes that compute all the time. `niceness`: 0 competes with the server, 19 yields to it."""
    hogs = [
        subprocess.Popen(["nice", "-n", str(niceness), sys.executable, "-I", "-c", HOG])
        for _ in range(number)
    ]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


class SlowDatabase:
    """Answers each query after `seconds`, queries at the same time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> SlowDatabase:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(1024)
            time.sleep(self._seconds)
            connection.sendall(b"10\n")


def read_slowly(stream: IO[bytes], kb_s: float) -> None:
    """Reads a server's log in a thread, so slowly that its pipe is full."""

    def read() -> None:
        with contextlib.suppress(ValueError, OSError):
            while data := stream.read(4096):
                time.sleep(len(data) / 1024 / kb_s)

    threading.Thread(target=read, daemon=True).start()
