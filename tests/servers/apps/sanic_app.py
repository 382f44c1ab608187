"""Sanic: `python -m tests.servers.apps.sanic_app PORT` is its own server in one process; uvicorn loads `app`."""

from __future__ import annotations

import asyncio
import sys

from sanic import HTTPResponse, Request, Sanic, json, text

from tests.servers.apps.scorer import CHUNKS, PAUSE_S, WAIT_S, score

app = Sanic("scores")
app.config.RESPONSE_TIMEOUT = 3


@app.post("/classify/<name:str>")
async def classify(request: Request, name: str) -> HTTPResponse:
    return json(await asyncio.to_thread(score))


@app.get("/score/<name:str>")
async def show_score(request: Request, name: str) -> HTTPResponse:
    return json(await asyncio.to_thread(score))


async def stream_scores(request: Request, pause_s: float) -> None:
    response = await request.respond(content_type="text/plain")
    for number in range(CHUNKS):
        score(1)
        await asyncio.sleep(pause_s)
        await response.send(f"{number}\n")
    await response.eof()


@app.post("/stream")
async def stream(request: Request) -> None:
    await stream_scores(request, 0)


@app.post("/slow")
async def stream_slowly(request: Request) -> None:
    await stream_scores(request, PAUSE_S)


@app.post("/wait")
async def answer_late(request: Request) -> HTTPResponse:
    score(1)
    await asyncio.sleep(WAIT_S)
    return text("late")


@app.post("/never")
async def answer_never(request: Request) -> None:
    score(1)
    await asyncio.Event().wait()


@app.post("/fail")
async def fail(request: Request) -> HTTPResponse:
    raise RuntimeError("canary")


@app.get("/health")
async def report_health(request: Request) -> HTTPResponse:
    return text("ok")


if __name__ == "__main__":
    app.run(host="127.0.0.1", port=int(sys.argv[1]), single_process=True, access_log=False, motd=False)
