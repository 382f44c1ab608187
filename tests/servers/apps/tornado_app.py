"""Tornado: `python -m tests.servers.apps.tornado_app PORT`."""

from __future__ import annotations

import asyncio
import json
import sys

from tornado.web import Application, RequestHandler

from tests.servers.apps.scorer import CHUNKS, PAUSE_S, score


class Classify(RequestHandler):
    async def post(self, name: str) -> None:
        self.write(json.dumps(await asyncio.to_thread(score)))

    get = post


class Stream(RequestHandler):
    def initialize(self, pause_s: float) -> None:
        self.pause_s = pause_s

    async def post(self) -> None:
        for number in range(CHUNKS):
            score(1)
            await asyncio.sleep(self.pause_s)
            self.write(f"{number}\n")
            await self.flush()


class Fail(RequestHandler):
    async def post(self) -> None:
        raise RuntimeError("canary")


class Health(RequestHandler):
    def get(self) -> None:
        self.write("ok")


async def serve(port: int) -> None:
    app = Application(
        [
            (r"/classify/([a-z]+)", Classify),
            (r"/score/([a-z]+)", Classify),
            (r"/stream", Stream, {"pause_s": 0}),
            (r"/slow", Stream, {"pause_s": PAUSE_S}),
            (r"/fail", Fail),
            (r"/health", Health),
        ]
    )
    app.listen(port, "127.0.0.1")
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
