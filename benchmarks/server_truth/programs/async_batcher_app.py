"""FastAPI and a batcher: an asyncio.Queue, a worker that collects items, one call of the model for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI

from benchmarks.server_truth.programs.work import MAX_BATCH, WIDTH, add_delay, classify_batch, finish, window

items: asyncio.Queue[tuple[torch.Tensor, asyncio.Future[int]]] = asyncio.Queue()


async def run_batches() -> None:
    loop = asyncio.get_running_loop()
    while True:
        while items.empty():
            await asyncio.sleep(0.0005)
        await asyncio.to_thread(add_delay, "queue wait")  # as a worker that is busy with something else
        batch = [await items.get()]
        until = loop.time() + window()
        while len(batch) < MAX_BATCH and (left := until - loop.time()) > 0:
            with contextlib.suppress(TimeoutError):
                batch.append(await asyncio.wait_for(items.get(), left))
        classes = await asyncio.to_thread(classify_batch, [row for row, _ in batch])
        for (_, future), found in zip(batch, classes):
            if not future.done():
                future.set_result(found)


@contextlib.asynccontextmanager
async def run_worker(app: FastAPI) -> AsyncIterator[None]:
    worker = asyncio.create_task(run_batches())
    yield
    worker.cancel()


app = FastAPI(lifespan=run_worker)


@app.post("/classify")
async def classify_text(body: dict[str, Any]) -> dict[str, Any]:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    await items.put((torch.ones(WIDTH), future))
    return await asyncio.to_thread(finish, [await future])


@app.get("/health")
async def report_health() -> str:
    return "ok"


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
