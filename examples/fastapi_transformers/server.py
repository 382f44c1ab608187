"""An ordinary FastAPI server with transformers: streamed text, and embeddings. One line of it is about telemetry.

MODEL, ENCODER    what `from_pretrained` takes; without them tiny random models are made here, nothing is downloaded
PORT              8000
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import otel_infer

otel_infer.instrument()  # the one line; before the models are loaded

import torch  # noqa: E402
import uvicorn  # noqa: E402
from fastapi import FastAPI  # noqa: E402
from fastapi.responses import StreamingResponse  # noqa: E402
from pydantic import BaseModel  # noqa: E402
from transformers import (  # noqa: E402
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertModel,
    TextIteratorStreamer,
)


class Prompt(BaseModel):
    prompt: str
    max_tokens: int = 64


class Texts(BaseModel):
    input: list[str]


class Models:
    """The served models: a language model and an encoder, each with its tokenizer."""

    def __init__(self, text: str, encoder: str) -> None:
        self.text, self.encoder = (
            AutoModelForCausalLM.from_pretrained(text),
            AutoModel.from_pretrained(encoder),
        )
        self.text_tokens, self.encoder_tokens = (
            AutoTokenizer.from_pretrained(name) for name in (text, encoder)
        )


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        text = os.environ.get("MODEL") or tiny_text(Path(folder))
        encoder = os.environ.get("ENCODER") or tiny_encoder(Path(folder))
        app.state.models = Models(text, encoder)
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/health")
def health() -> str:
    return "ok"


@app.post("/v1/generate")
def generate(body: Prompt) -> StreamingResponse:
    models: Models = app.state.models
    inputs = models.text_tokens(body.prompt, return_tensors="pt").to(models.text.device)
    streamer = TextIteratorStreamer(models.text_tokens, skip_prompt=True, skip_special_tokens=True)
    left = Event()

    def run() -> None:
        try:
            models.text.generate(
                **inputs,
                max_new_tokens=body.max_tokens,
                streamer=streamer,
                stopping_criteria=[lambda ids, scores: torch.full((len(ids),), left.is_set())],
            )
        finally:
            streamer.end()  # a reader must not wait for a model that failed

    Thread(target=run).start()
    return StreamingResponse(events(streamer, left), media_type="text/event-stream")


def events(streamer: TextIteratorStreamer, left: Event) -> Iterator[str]:
    try:
        for text in streamer:
            yield f"data: {json.dumps({'text': text})}\n\n"
        yield "data: [DONE]\n\n"
    finally:
        left.set()  # also when the client has gone: the model stops too


@app.post("/v1/embeddings")
def embeddings(body: Texts) -> dict[str, Any]:
    models: Models = app.state.models
    inputs = models.encoder_tokens(body.input, padding=True, truncation=True, return_tensors="pt")
    inputs = inputs.to(models.encoder.device)
    with torch.inference_mode():
        hidden = models.encoder(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1)
    vectors = (hidden * mask).sum(1) / mask.sum(1)
    return {"data": [{"index": i, "embedding": vector.tolist()} for i, vector in enumerate(vectors)]}


def tiny_text(folder: Path) -> str:
    """A random Llama, so that there is something to serve: it speaks nonsense."""
    from otel_infer.cli.demo.model import make_demo_model

    return str(make_demo_model(folder / "tiny-llama"))


def tiny_encoder(folder: Path) -> str:
    """A random BERT."""
    from otel_infer.cli.demo.model import make_tokenizer, save_model

    tokenizer = make_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=4, num_attention_heads=4, pad_token_id=0
    )
    save_model(folder / "tiny-bert", BertModel(config), tokenizer)
    return str(folder / "tiny-bert")


if __name__ == "__main__":
    uvicorn.run(app, port=int(os.environ.get("PORT", "8000")), log_level="warning")
