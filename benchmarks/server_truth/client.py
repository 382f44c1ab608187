"""A client with a trace of its own for each request, over HTTP or gRPC, a number of requests at a time."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable

from benchmarks.server_truth.servers import TruthServer

BODY = b'{"text": "a text"}'

Exchange = Callable[[str], Awaitable[None]]
"""Sends a request with this trace id, and returns with the whole answer."""


def send_requests(server: TruthServer, port: int, requests: int, concurrency: int) -> dict[str, float]:
    """Returns the latency of each request by its trace id, ms."""
    send = _send_grpc if server.is_grpc else _send_http
    return asyncio.run(send(port, requests, concurrency))


async def _send_http(port: int, requests: int, concurrency: int) -> dict[str, float]:
    async def exchange(trace: str) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            f"POST /classify HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"traceparent: 00-{trace}-{secrets.token_hex(8)}-01\r\ncontent-length: {len(BODY)}\r\n\r\n"
        )
        writer.write(head.encode() + BODY)
        answer = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in answer.partition(b"\r\n")[0]:
            raise RuntimeError(f"the server answered {answer[:80]!r}")
        length = answer.lower().partition(b"content-length:")[2].split(None, 1)
        await reader.readexactly(int(length[0]))  # not until the connection is closed, which is later
        writer.close()

    return await _send_all(exchange, requests, concurrency)


async def _send_grpc(port: int, requests: int, concurrency: int) -> dict[str, float]:
    import grpc

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/classes.Classes/Classify")

        async def exchange(trace: str) -> None:
            await call(BODY, metadata=(("traceparent", f"00-{trace}-{secrets.token_hex(8)}-01"),))

        return await _send_all(exchange, requests, concurrency)


async def _send_all(exchange: Exchange, requests: int, concurrency: int) -> dict[str, float]:
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
