"""A streaming server as users write them: Starlette, a stage, tokens with pauses. POST /generate?tokens=N."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

import otel_infer


async def generate(request: Request) -> Response:
    prompt = await request.body()
    tokens, pause = int(request.query_params["tokens"]), float(request.query_params["pause"])
    with otel_infer.stage("embed"):
        state = hashlib.sha256(prompt).digest()

    async def stream(state: bytes) -> AsyncIterator[bytes]:
        for _ in range(tokens):
            state = hashlib.sha256(state).digest()
            yield state.hex().encode() + b"\n"
            await asyncio.sleep(pause)

    return StreamingResponse(stream(state))


async def health(request: Request) -> Response:
    return PlainTextResponse("ok")


app = Starlette(routes=[Route("/generate", generate, methods=["POST"]), Route("/health", health)])

if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", backlog=4096)
