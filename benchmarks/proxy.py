"""A TCP proxy that delays data in both directions, as a network does."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time


class DelayingProxy:
    """Listens on its own port and forwards to `target`, a port of this host, after `delay` s."""

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
            for source, sink in ((client, server), (server, client)):
                self._forward(source, sink)

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        chunks: queue.Queue[tuple[float, bytes]] = queue.Queue()
        threading.Thread(target=self._read_chunks, args=(source, chunks), daemon=True).start()
        threading.Thread(target=self._write_chunks, args=(sink, chunks), daemon=True).start()

    def _read_chunks(self, source: socket.socket, chunks: queue.Queue[tuple[float, bytes]]) -> None:
        data = b"?"
        while data:
            try:
                data = source.recv(65536)
            except OSError:
                data = b""
            chunks.put((time.monotonic() + self._delay, data))

    def _write_chunks(self, sink: socket.socket, chunks: queue.Queue[tuple[float, bytes]]) -> None:
        while True:
            due, data = chunks.get()
            time.sleep(max(due - time.monotonic(), 0))
            with contextlib.suppress(OSError):
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(data)
