"""A TCP proxy that hands everything on a little later, in both directions: a network with a delay."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time


class DelayingProxy:
    """Listens on a port of its own, `with`; what it reads reaches `target` (a port on this host) `delay` s later."""

    def __init__(self, target: int, delay: float) -> None:
        self._target, self._delay = target, delay
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = int(self._listener.getsockname()[1])

    def __enter__(self) -> DelayingProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            for one, other in ((client, server), (server, client)):
                self._carry(one, other)

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        pieces: queue.Queue[tuple[float, bytes]] = queue.Queue()
        threading.Thread(target=self._read, args=(source, pieces), daemon=True).start()
        threading.Thread(target=self._write, args=(sink, pieces), daemon=True).start()

    def _read(self, source: socket.socket, pieces: queue.Queue[tuple[float, bytes]]) -> None:
        data = b"?"
        while data:
            try:
                data = source.recv(65536)
            except OSError:
                data = b""
            pieces.put((time.monotonic() + self._delay, data))

    def _write(self, sink: socket.socket, pieces: queue.Queue[tuple[float, bytes]]) -> None:
        while True:
            due, data = pieces.get()
            time.sleep(max(due - time.monotonic(), 0))
            with contextlib.suppress(OSError):
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(data)
