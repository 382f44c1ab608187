"""FastAPI and a batcher as many write it: a queue, a worker that collects items for some ms, one `forward` for all."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

MAX_ITEMS, WAIT_S = 16, 0.010
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
config = BertConfig(
    vocab_size=len(tokenizer),
    hidden_size=64,
    num_hidden_layers=6,  # as in DistilBERT and MiniLM-L6; narrow, so that the host's work prevails
    num_attention_heads=2,
    intermediate_size=128,
)
classifier = BertForSequenceClassification(config).eval()
items: asyncio.Queue[tuple[str, asyncio.Future[int]]] = asyncio.Queue()


def classify_texts(texts: list[str]) -> list[int]:
    """Returns the classes of several texts."""
    inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    with torch.inference_mode():
        labels: list[int] = classifier(**inputs).logits.argmax(-1).tolist()
    return labels


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
