"""aiohttp: the model in a thread, so that the event loop stays free."""

from __future__ import annotations

import asyncio
import sys

from aiohttp import web

from benchmarks.server_truth.programs.work import classify, finish


async def classify_text(request: web.Request) -> web.Response:
    await request.read()
    classes = await asyncio.to_thread(classify)
    return web.json_response(await asyncio.to_thread(finish, classes))


async def report_health(request: web.Request) -> web.Response:
    return web.Response(text="ok")


app = web.Application()
app.add_routes([web.post("/classify", classify_text), web.get("/health", report_health)])
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
