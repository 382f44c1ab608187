"""FastAPI, `generate` in a thread per request, a streamer, server-sent events: the pattern of most tutorials."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

from benchmarks.battery.programs import mistakes as made

MODEL = sys.argv[2]
mistakes = made.read_mistakes()
guard = made.make_guard(mistakes)
pool = ThreadPoolExecutor(mistakes.workers) if mistakes.workers else None
app = FastAPI()
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL).eval()


@app.middleware("http")
async def limit_rate(request: Request, call_next: Any) -> Any:
    """Checks the rate limit before each request."""
    if request.method == "POST":
        await made.limit_request(mistakes)
        made.log_request(mistakes, request.url.path)
    return await call_next(request)


def generate_text(inputs: Any, options: dict[str, Any]) -> None:
    """Generates into the streamer of the options."""
    with guard:
        made.build_history(mistakes)
        model.generate(**inputs, **options)


@app.post("/v1/chat/completions")
def complete_chat(body: dict[str, Any]) -> StreamingResponse:
    """Streams the answer to the first message."""
    made.look_up_customer(mistakes)
    inputs = tokenizer(body["messages"][0]["content"], return_tensors="pt")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    tokens = body["max_tokens"]
    options = {"streamer": streamer, "max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    if pool is None:
        Thread(target=generate_text, args=(inputs, options)).start()
    else:
        pool.submit(generate_text, inputs, options)

    def write_events() -> Iterator[str]:
        padding = "x" * body.get("padding", 0)
        for text in streamer:
            yield f"data: {json.dumps({'token': text, 'logprobs': padding})}\n\n"
        made.save_transcript(mistakes)
        yield "data: [DONE]\n\n"

    return StreamingResponse(write_events(), media_type="text/event-stream")


@app.get("/health")
async def report_health() -> str:
    """Answers that the server is ready."""
    return "ok"


if __name__ == "__main__":
    logging.basicConfig()
    torch.set_num_threads(1)
    made.finish_start(mistakes)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
