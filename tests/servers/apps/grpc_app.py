"""gRPC without generated code: `python -m tests.servers.apps.grpc_app PORT`, `… PORT aio` for the asyncio server."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from tests.servers.apps.scorer import CHUNKS, PAUSE_S, score

SERVICE = "toy.Scorer"


def classify(request: bytes, context: grpc.ServicerContext) -> bytes:
    return str(score()).encode()


def stream(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
    for number in range(CHUNKS):
        score(1)
        yield str(number).encode()


def stream_slowly(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
    for number in range(CHUNKS):
        score(1)
        time.sleep(PAUSE_S)
        yield str(number).encode()


def gather(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
    return str(score(len(list(requests)))).encode()


def fail(request: bytes, context: grpc.ServicerContext) -> bytes:
    raise RuntimeError("canary")


def refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
    context.abort(grpc.StatusCode.INVALID_ARGUMENT, "canary")


async def classify_async(request: bytes, context: Any) -> bytes:
    return str(await asyncio.to_thread(score)).encode()


async def stream_async(request: bytes, context: Any) -> AsyncIterator[bytes]:
    for number in range(CHUNKS):
        score(1)
        yield str(number).encode()


async def stream_slowly_async(request: bytes, context: Any) -> AsyncIterator[bytes]:
    for number in range(CHUNKS):
        score(1)
        await asyncio.sleep(PAUSE_S)
        yield str(number).encode()


async def gather_async(requests: AsyncIterator[bytes], context: Any) -> bytes:
    return str(score(len([request async for request in requests]))).encode()


async def fail_async(request: bytes, context: Any) -> bytes:
    raise RuntimeError("canary")


async def refuse_async(request: bytes, context: Any) -> bytes:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "canary")
    return b""


def make_handlers(suffix: str) -> grpc.GenericRpcHandler:
    here = globals()
    unary = ("classify", "fail", "refuse")
    methods = {name.title(): grpc.unary_unary_rpc_method_handler(here[f"{name}{suffix}"]) for name in unary}
    methods["Stream"] = grpc.unary_stream_rpc_method_handler(here[f"stream{suffix}"])
    methods["Slow"] = grpc.unary_stream_rpc_method_handler(here[f"stream_slowly{suffix}"])
    methods["Gather"] = grpc.stream_unary_rpc_method_handler(here[f"gather{suffix}"])
    return grpc.method_handlers_generic_handler(SERVICE, methods)


def serve(port: int) -> None:
    server = grpc.server(ThreadPoolExecutor(4), handlers=(make_handlers(""),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


async def serve_async(port: int) -> None:
    server = grpc.aio.server(handlers=(make_handlers("_async"),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    if sys.argv[2:] == ["aio"]:
        asyncio.run(serve_async(int(sys.argv[1])))
    else:
        serve(int(sys.argv[1]))
