"""gRPC with four threads; with a second argument its asyncio server."""

from __future__ import annotations

import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from benchmarks.server_truth.programs.work import classify, finish


def classify_text(request: bytes, context: Any) -> bytes:
    return json.dumps(finish(classify())).encode()


async def classify_later(request: bytes, context: Any) -> bytes:
    classes = await asyncio.to_thread(classify)
    return json.dumps(await asyncio.to_thread(finish, classes)).encode()


def make_handlers(method: Any) -> grpc.GenericRpcHandler:
    return grpc.method_handlers_generic_handler(
        "classes.Classes", {"Classify": grpc.unary_unary_rpc_method_handler(method)}
    )


def serve(port: int) -> None:
    server = grpc.server(ThreadPoolExecutor(4), handlers=(make_handlers(classify_text),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


async def serve_async(port: int) -> None:
    server = grpc.aio.server(handlers=(make_handlers(classify_later),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        asyncio.run(serve_async(int(sys.argv[1])))
    else:
        serve(int(sys.argv[1]))
