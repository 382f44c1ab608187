"""FastAPI and a batcher by hand: a queue, a worker that collects texts for some ms, one call of the encoder for all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request

from benchmarks.battery.programs import mistakes as made
from benchmarks.battery.programs.encoder import Encoder

MAX_BATCH, WINDOW_S = 16, 0.01
mistakes = made.read_mistakes()
encoder = Encoder(sys.argv[2])
items: asyncio.Queue[tuple[str, asyncio.Future[Any]]] = asyncio.Queue()


def encode_batch(texts: list[str]) -> list[list[float]]:
    made.build_history(mistakes)
    return encoder.encode(texts)


async def run_batches() -> None:
    loop = asyncio.get_running_loop()
    while True:
        batch = [await items.get()]
        until = loop.time() + (mistakes.window_ms / 1000 or WINDOW_S)
        while len(batch) < MAX_BATCH and (left := until - loop.time()) > 0:
            with contextlib.suppress(TimeoutError):
                batch.append(await asyncio.wait_for(items.get(), left))
        try:
            vectors = await asyncio.to_thread(encode_batch, [text for text, _ in batch])
        except Exception as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            continue
        for (_, future), vector in zip(batch, vectors):
            if not future.done():
                future.set_result(vector)


@contextlib.asynccontextmanager
async def run_worker(app: FastAPI) -> AsyncIterator[None]:
    worker = asyncio.create_task(run_batches())
    yield
    worker.cancel()


app = FastAPI(lifespan=run_worker)


@app.middleware("http")
async def limit_rate(request: Request, call_next: Any) -> Any:
    """Checks the rate limit before each request."""
    if request.method == "POST":
        await made.limit_request(mistakes)
        made.log_request(mistakes, request.url.path)
    return await call_next(request)


@app.post("/v1/embeddings")
async def embed_text(body: dict[str, Any]) -> dict[str, Any]:
    """Returns the embedding of each text."""
    await asyncio.to_thread(made.look_up_customer, mistakes)
    texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
    futures = []
    for text in texts:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        await items.put((text, future))
        futures.append(future)
    vectors = await asyncio.gather(*futures)
    await asyncio.to_thread(made.save_transcript, mistakes)
    return {"data": [{"embedding": vector} for vector in vectors]}


@app.get("/health")
async def report_health() -> str:
    """Answers that the server is ready."""
    return "ok"


if __name__ == "__main__":
    logging.basicConfig()
    made.finish_start(mistakes)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
