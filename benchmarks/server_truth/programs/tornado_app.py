"""Tornado, with the model on the event loop, as many have it."""

from __future__ import annotations

import asyncio
import sys

from tornado import web

from benchmarks.server_truth.programs.work import classify, finish


class Classify(web.RequestHandler):
    def post(self) -> None:
        self.finish(finish(classify()))


class Health(web.RequestHandler):
    def get(self) -> None:
        self.finish("ok")


async def serve(port: int) -> None:
    web.Application([("/classify", Classify), ("/health", Health)]).listen(port, "127.0.0.1")
    await asyncio.Event().wait()


asyncio.run(serve(int(sys.argv[1])))
