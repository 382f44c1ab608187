"""FastAPI and a batcher by hand around transformers' `generate`: `python -m … PORT MODEL`."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI
from transformers import AutoModelForCausalLM, AutoTokenizer

queue: asyncio.Queue[tuple[str, asyncio.Future[Any]]] = asyncio.Queue()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
tokenizer.padding_side = "left"
model = AutoModelForCausalLM.from_pretrained(sys.argv[2]).eval()


def generate(prompts: list[str]) -> list[str]:
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    outputs = model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    return tokenizer.batch_decode(outputs)  # type: ignore[no-any-return]


async def run_batches() -> None:
    while True:
        batch = [await queue.get()]
        await asyncio.sleep(0.05)
        while not queue.empty():
            batch.append(queue.get_nowait())
        texts = await asyncio.to_thread(generate, [prompt for prompt, _ in batch])
        for (_, future), text in zip(batch, texts):
            future.set_result(text)


@contextlib.asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    task = asyncio.create_task(run_batches())
    yield
    task.cancel()


app = FastAPI(lifespan=lifespan)


@app.post("/generate")
async def complete() -> str:
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    await queue.put(("tell me of the weather", future))
    return await future


@app.get("/health")
async def report_health() -> str:
    return "ok"


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
