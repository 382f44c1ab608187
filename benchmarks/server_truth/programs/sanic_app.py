"""Sanic's own server, with the model in a thread."""

from __future__ import annotations

import asyncio
import sys

from sanic import HTTPResponse, Request, Sanic, json, text

from benchmarks.server_truth.programs.work import classify, finish

app = Sanic("classes")


@app.post("/classify")
async def classify_text(request: Request) -> HTTPResponse:
    classes = await asyncio.to_thread(classify)
    return json(await asyncio.to_thread(finish, classes))


@app.get("/health")
async def report_health(request: Request) -> HTTPResponse:
    return text("ok")


if __name__ == "__main__":
    app.run(host="127.0.0.1", port=int(sys.argv[1]), single_process=True, access_log=False, motd=False)
