"""aiohttp.web: `python -m tests.servers.apps.aiohttp_app PORT`."""

from __future__ import annotations

import asyncio
import sys

from aiohttp import web

from tests.servers.apps.scorer import CHUNKS, PAUSE_S, WAIT_S, score

routes = web.RouteTableDef()


@routes.post("/classify/{name}")
@routes.get("/score/{name}")
async def classify(request: web.Request) -> web.Response:
    await request.read()
    return web.json_response(await asyncio.to_thread(score))


async def stream_scores(request: web.Request, pause_s: float) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for number in range(CHUNKS):
        score(1)
        await asyncio.sleep(pause_s)
        await response.write(f"{number}\n".encode())
    await response.write_eof()
    return response


@routes.post("/stream")
async def stream(request: web.Request) -> web.StreamResponse:
    return await stream_scores(request, 0)


@routes.post("/slow")
async def stream_slowly(request: web.Request) -> web.StreamResponse:
    return await stream_scores(request, PAUSE_S)


@routes.post("/wait")
async def answer_late(request: web.Request) -> web.Response:
    score(1)
    await asyncio.sleep(WAIT_S)
    return web.Response(text="late")


@routes.post("/never")
async def answer_never(request: web.Request) -> None:
    score(1)
    await asyncio.Event().wait()


@routes.post("/fail")
async def fail(request: web.Request) -> web.Response:
    raise RuntimeError("canary")


@routes.get("/health")
async def report_health(request: web.Request) -> web.Response:
    return web.Response(text="ok")


if __name__ == "__main__":
    app = web.Application()
    app.add_routes(routes)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, shutdown_timeout=0.2)
