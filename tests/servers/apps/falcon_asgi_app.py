"""Falcon on an ASGI server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import falcon.asgi

from tests.servers.apps.scorer import CHUNKS, PAUSE_S, WAIT_S, score


class Classify:
    async def on_post(self, request: Any, response: Any, name: str) -> None:
        response.media = await asyncio.to_thread(score)

    on_get = on_post


class Stream:
    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    async def on_post(self, request: Any, response: Any) -> None:
        response.stream = self.stream_scores()

    async def stream_scores(self) -> AsyncIterator[bytes]:
        for number in range(CHUNKS):
            score(1)
            await asyncio.sleep(self.pause_s)
            yield f"{number}\n".encode()


class Wait:
    async def on_post(self, request: Any, response: Any) -> None:
        score(1)
        await asyncio.sleep(WAIT_S)
        response.text = "late"


class Fail:
    async def on_post(self, request: Any, response: Any) -> None:
        raise RuntimeError("canary")


class Health:
    async def on_get(self, request: Any, response: Any) -> None:
        response.text = "ok"


app = falcon.asgi.App()
for path, resource in (
    ("/classify/{name}", Classify()),
    ("/score/{name}", Classify()),
    ("/stream", Stream(0)),
    ("/slow", Stream(PAUSE_S)),
    ("/wait", Wait()),
    ("/fail", Fail()),
    ("/health", Health()),
):
    app.add_route(path, resource)
