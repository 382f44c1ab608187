"""grpc.aio and a small classifier, which is called in a thread."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import grpc

from benchmarks.whole.programs.bert import classify_texts


async def classify_text(request: bytes, context: Any) -> bytes:
    """Returns the class of a text."""
    labels = await asyncio.to_thread(classify_texts, [json.loads(request)["text"]])
    return json.dumps({"label": labels[0]}).encode()


async def serve(port: int) -> None:
    """Serves until the process is ended."""
    method = grpc.unary_unary_rpc_method_handler(classify_text)
    server = grpc.aio.server(
        handlers=(grpc.method_handlers_generic_handler("classes.Classes", {"Classify": method}),)
    )
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
