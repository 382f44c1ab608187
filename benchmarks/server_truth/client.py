"""Sends requests to a server over HTTP or gRPC."""

from __future__ import annotations

import asyncio

from benchmarks.closed_loop import make_traceparent, post_json, send_closed_loop
from benchmarks.server_truth.servers import TruthServer


def send_requests(server: TruthServer, port: int, requests: int, concurrency: int) -> dict[str, float]:
    """Returns the latency of each request by its trace id, ms."""
    send = _send_grpc if server.is_grpc else _send_http
    return asyncio.run(send(server, port, requests, concurrency))


async def _send_http(server: TruthServer, port: int, requests: int, concurrency: int) -> dict[str, float]:
    async def exchange(trace: str) -> None:
        await post_json(port, server.path, server.body, trace)

    return await send_closed_loop(exchange, requests, concurrency)


async def _send_grpc(server: TruthServer, port: int, requests: int, concurrency: int) -> dict[str, float]:
    import grpc

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/classes.Classes/Classify")

        async def exchange(trace: str) -> None:
            await call(server.body, metadata=(("traceparent", make_traceparent(trace)),))

        return await send_closed_loop(exchange, requests, concurrency)
