"""FastAPI, `generate` called in an `async def` endpoint: it blocks the event loop while it runs."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.battery.programs import mistakes as made

MODEL = sys.argv[2]
mistakes = made.read_mistakes()
semaphore = asyncio.Semaphore(mistakes.semaphore or 1000)
lock = asyncio.Lock()
app = FastAPI()
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL).eval()


def generate_text(prompt: str, tokens: int) -> str:
    """Returns the answer to a prompt."""
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))


async def answer_prompt(prompt: str, tokens: int) -> str:
    """Returns the answer; with a limit of concurrency in a thread, as servers with a limit do."""
    if not mistakes.semaphore and not mistakes.lock:
        return generate_text(prompt, tokens)
    async with lock if mistakes.lock else semaphore:
        return await asyncio.to_thread(generate_text, prompt, tokens)


@app.post("/v1/chat/completions")
async def complete_chat(body: dict[str, Any]) -> dict[str, Any]:
    """Returns the whole answer to the first message."""
    await made.limit_request(mistakes)
    made.log_request(mistakes, "chat")
    await asyncio.to_thread(made.look_up_customer, mistakes)
    made.build_history(mistakes)
    text = await answer_prompt(body["messages"][0]["content"], body["max_tokens"])
    await asyncio.to_thread(made.save_transcript, mistakes)
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


@app.get("/health")
async def report_health() -> str:
    """Answers that the server is ready."""
    return "ok"


if __name__ == "__main__":
    logging.basicConfig()
    torch.set_num_threads(1)
    made.finish_start(mistakes)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
