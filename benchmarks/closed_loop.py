"""A client with a trace of its own for each request, a number of requests at a time."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable

LAST_CHUNK = b"0\r\n\r\n"
Exchange = Callable[[str], Awaitable[None]]
"""Sends a request with this trace id, and returns with the whole answer."""


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


async def post_json(port: int, path: str, body: bytes, trace: str) -> None:
    """Sends a POST over a connection of its own, and reads the whole answer. Raises RuntimeError if that is not 200."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        f"traceparent: {make_traceparent(trace)}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    answer = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in answer.partition(b"\r\n")[0]:
        raise RuntimeError(f"the server answered {answer[:80]!r}")
    length = answer.lower().partition(b"content-length:")[2].split(None, 1)
    if length:  # not until the server closes the connection, which is later
        await reader.readexactly(int(length[0]))
    else:
        await reader.readuntil(LAST_CHUNK)
    writer.close()


def make_traceparent(trace: str) -> str:
    """Returns the header of a new span of the trace."""
    return f"00-{trace}-{secrets.token_hex(8)}-01"
