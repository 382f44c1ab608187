"""Sends requests to a server over HTTP or gRPC."""

from __future__ import annotations

import asyncio

from benchmarks.closed_loop import make_traceparent, post_closed_loop, send_closed_loop
from benchmarks.server_truth.servers import TruthServer


def send_requests(server: TruthServer, port: int, requests: int, concurrency: int) -> dict[str, float]:
    """Returns the latency of each request by its trace id, ms."""
    if server.is_grpc:
        return asyncio.run(_send_grpc(server, port, requests, concurrency))
    return post_closed_loop(port, server.path, server.body, requests, concurrency)


async def _send_grpc(server: TruthServer, port: int, requests: int, concurrency: int) -> dict[str, float]:
    import grpc

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/classes.Classes/Classify")

        async def exchange(trace: str) -> None:
            await call(server.body, metadata=(("traceparent", make_traceparent(trace)),))

        return await send_closed_loop(exchange, requests, concurrency)
