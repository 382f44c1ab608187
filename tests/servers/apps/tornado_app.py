"""Tornado: `python -m tests.servers.apps.tornado_app PORT`."""

from __future__ import annotations

import asyncio
import json
import sys

from tornado.web import Application, FallbackHandler, RequestHandler

from tests.servers.apps.scorer import CHUNKS, PAUSE_S, WAIT_S, score


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


class Wait(RequestHandler):
    async def post(self) -> None:
        score(1)
        await asyncio.sleep(WAIT_S)
        self.write("late")


class After(RequestHandler):
    async def post(self) -> None:
        self.finish("ok")
        await asyncio.sleep(PAUSE_S)
        score(1)


class Late(RequestHandler):
    """Returns before its response is finished."""

    async def post(self) -> None:
        self._auto_finish = False
        asyncio.get_running_loop().call_later(PAUSE_S, self.finish_late)

    def finish_late(self) -> None:
        score(1)
        self.finish("late")


class Fail(RequestHandler):
    async def post(self) -> None:
        raise RuntimeError("canary")


class Health(RequestHandler):
    def get(self) -> None:
        self.write("ok")

    post = get


async def serve(port: int) -> None:
    app = Application(
        [
            (r"/classify/([a-z]+)", Classify),
            (r"/score/([a-z]+)", Classify),
            (r"/stream", Stream, {"pause_s": 0}),
            (r"/slow", Stream, {"pause_s": PAUSE_S}),
            (r"/wait", Wait),
            (r"/after", After),
            (r"/late", Late),
            (r"/inner/.*", FallbackHandler, {"fallback": Application([(r"/inner/health", Health)])}),
            (r"/fail", Fail),
            (r"/health", Health),
        ]
    )
    app.listen(port, "127.0.0.1")
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
