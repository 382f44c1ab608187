"""FastAPI and a batcher as many write it: a queue, a worker that collects items for some ms, one `forward` for all."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from benchmarks.whole.programs.bert import classify_texts

MAX_ITEMS, WAIT_S = 16, 0.010
items: asyncio.Queue[tuple[str, asyncio.Future[int]]] = asyncio.Queue()


async def run_batches() -> None:
    """Collects items and resolves their futures."""
    loop = asyncio.get_running_loop()
    while True:
        batch = [await items.get()]
        until = loop.time() + WAIT_S
        while len(batch) < MAX_ITEMS and (left := until - loop.time()) > 0:
            with contextlib.suppress(TimeoutError):
                batch.append(await asyncio.wait_for(items.get(), left))
        labels = await loop.run_in_executor(None, classify_texts, [text for text, _ in batch])
        for (_, future), label in zip(batch, labels):
            if not future.done():
                future.set_result(label)


@contextlib.asynccontextmanager
async def run_worker(app: FastAPI) -> AsyncIterator[None]:
    """Runs the worker while the application runs."""
    worker = asyncio.create_task(run_batches())
    yield
    worker.cancel()


app = FastAPI(lifespan=run_worker)


@app.post("/classify")
async def classify_text(body: dict[str, Any]) -> dict[str, int]:
    """Returns the class of a text."""
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    await items.put((body["text"], future))
    return {"label": await future}


@app.get("/health")
async def report_health() -> str:
    """Answers that the server is ready."""
    return "ok"


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
