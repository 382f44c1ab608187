"""A client with a trace of its own for each request, a number of requests at a time.

HTTP requests are sent by plain sockets: where a batch of answers arrives at once, each is noted within some tens of µs, while a
client of asyncio would need some hundred for each.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import selectors
import socket
import time
from collections.abc import Awaitable, Callable

LAST_CHUNK = b"0\r\n\r\n"
Exchange = Callable[[str], Awaitable[None]]
"""Sends a request with this trace id, and returns with the whole answer."""
TIMEOUT_S = 60.0


async def send_closed_loop(exchange: Exchange, requests: int, concurrency: int) -> dict[str, float]:
    """Returns the latency of each request by its trace id, ms."""
    latencies: dict[str, float] = {}
    waiting = iter(range(requests))

    async def work() -> None:
        for _ in waiting:
            trace = secrets.token_hex(16)
            began = time.perf_counter()
            await exchange(trace)
            latencies[trace] = (time.perf_counter() - began) * 1000

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return latencies


def post_closed_loop(port: int, path: str, body: bytes, requests: int, concurrency: int) -> dict[str, float]:
    """Sends POSTs, each over a connection of its own. Returns the latency of each by its trace id, ms.

    Raises RuntimeError if an answer is not 200, or takes longer than `TIMEOUT_S`; OSError if a connection is refused.
    """
    latencies: dict[str, float] = {}
    waiting = iter(range(requests))
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as opened:

        def begin_next() -> None:
            if next(waiting, None) is not None:
                posted = Post(port, path, body)
                opened.callback(posted.connection.close)
                selector.register(posted.connection, selectors.EVENT_WRITE, posted)

        for _ in range(concurrency):
            begin_next()
        while selector.get_map():
            ready = selector.select(TIMEOUT_S)
            if not ready:
                raise RuntimeError(f"no answer within {TIMEOUT_S:.0f} s")
            for key, events in ready:
                if events & selectors.EVENT_WRITE:
                    key.data.send()
                    selector.modify(key.fileobj, selectors.EVENT_READ, key.data)
                elif key.data.receive():
                    latencies[key.data.trace] = key.data.latency_ms
                    selector.unregister(key.fileobj)
                    key.data.connection.close()
                    begin_next()
    return latencies


class Post:
    """A POST over a connection of its own, which is not blocking. `latency_ms`: until the last bytes of its answer were there."""

    def __init__(self, port: int, path: str, body: bytes) -> None:
        self.trace, self.latency_ms = secrets.token_hex(16), 0.0
        self._answer = b""
        self._request = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"traceparent: {make_traceparent(self.trace)}\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode() + body
        self.connection = socket.socket()
        self.connection.setblocking(False)
        self._began = time.perf_counter()
        self.connection.connect_ex(("127.0.0.1", port))

    def send(self) -> None:
        """Sends the whole request, which is smaller than the socket's buffer. Raises OSError if the connection was refused."""
        error = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, "the connection was refused")
        self.connection.sendall(self._request)

    def receive(self) -> bool:
        """Reads what has arrived. Returns whether that is the end of the answer."""
        part = self.connection.recv(1 << 16)
        now = time.perf_counter()
        self._answer += part
        if not self._is_complete():
            if not part:
                raise EOFError(f"the answer ended after {self._answer[:80]!r}")
            return False
        self.latency_ms = (now - self._began) * 1000
        return True

    def _is_complete(self) -> bool:
        head, end_of_head, content = self._answer.partition(b"\r\n\r\n")
        if not end_of_head:
            return False
        if b" 200 " not in head.partition(b"\r\n")[0]:
            raise RuntimeError(f"the server answered {head[:80]!r}")
        # A server may close the connection later than the answer ends.
        length = head.lower().partition(b"content-length:")[2].split(None, 1)
        return len(content) >= int(length[0]) if length else content.endswith(LAST_CHUNK)


def make_traceparent(trace: str) -> str:
    """Returns the header of a new span of the trace."""
    return f"00-{trace}-{secrets.token_hex(8)}-01"
