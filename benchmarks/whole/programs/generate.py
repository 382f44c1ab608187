"""FastAPI, `generate` in a thread, a streamer, server-sent events: an event per token."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from threading import Thread
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

MODEL = sys.argv[2]
app = FastAPI()
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = AutoModelForCausalLM.from_pretrained(MODEL).eval()


@app.post("/v1/chat/completions")
def complete_chat(body: dict[str, Any]) -> StreamingResponse:
    """Streams the answer to the first message."""
    inputs = tokenizer(body["messages"][0]["content"], return_tensors="pt")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    tokens = body["max_tokens"]
    options = {**inputs, "streamer": streamer, "max_new_tokens": tokens, "min_new_tokens": tokens}
    Thread(target=model.generate, kwargs={**options, "do_sample": False}).start()

    def write_events() -> Iterator[str]:
        for text in streamer:
            yield f"data: {json.dumps({'token': text})}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(write_events(), media_type="text/event-stream")


@app.get("/health")
async def report_health() -> str:
    """Answers that the server is ready."""
    return "ok"


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
