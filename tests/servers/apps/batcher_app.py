"""FastAPI and a batcher by hand: an asyncio.Queue of items and futures, a window, one call of the model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import torch
from fastapi import FastAPI

from tests.servers.apps.scorer import scorer

WINDOW_S, MAX_BATCH = 0.05, 8
queue: asyncio.Queue[tuple[torch.Tensor, asyncio.Future[Any]]] = asyncio.Queue()


def score_batch(rows: list[torch.Tensor]) -> list[list[float]]:
    with torch.inference_mode():
        return scorer(torch.stack(rows)).tolist()  # type: ignore[no-any-return]


async def run_batches() -> None:
    loop = asyncio.get_running_loop()
    while True:
        batch = [await queue.get()]
        until = loop.time() + WINDOW_S
        while len(batch) < MAX_BATCH and (left := until - loop.time()) > 0:
            try:
                batch.append(await asyncio.wait_for(queue.get(), left))
            except TimeoutError:
                break
        scores = await asyncio.to_thread(score_batch, [row for row, _ in batch])
        for (_, future), score in zip(batch, scores):
            future.set_result(score)


@contextlib.asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    task = asyncio.create_task(run_batches())
    yield
    task.cancel()


app = FastAPI(lifespan=lifespan)


@app.post("/classify/{name}")
async def classify(name: str) -> list[float]:
    future: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
    await queue.put((torch.ones(16), future))
    return await future


@app.get("/health")
async def report_health() -> str:
    return "ok"
