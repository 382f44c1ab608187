"""FastAPI and sentence-transformers: embeddings of a text, in a `def` endpoint."""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request
from sentence_transformers import SentenceTransformer, models  # type: ignore[attr-defined]

from benchmarks.battery.programs import mistakes as made

mistakes = made.read_mistakes()
guard = made.make_guard(mistakes)
app = FastAPI()
words = models.Transformer(sys.argv[2])
encoder = SentenceTransformer(modules=[words, models.Pooling(words.get_word_embedding_dimension())])


@app.middleware("http")
async def limit_rate(request: Request, call_next: Any) -> Any:
    """Checks the rate limit before each request."""
    if request.method == "POST":
        await made.limit_request(mistakes)
        made.log_request(mistakes, request.url.path)
    return await call_next(request)


@app.post("/v1/embeddings")
def embed_text(body: dict[str, Any]) -> dict[str, Any]:
    """Returns the embedding of each text."""
    made.look_up_customer(mistakes)
    with guard:
        made.build_history(mistakes)
        vectors = encoder.encode(body["input"], show_progress_bar=False)
    made.save_transcript(mistakes)
    return {"data": [{"embedding": vector.tolist()} for vector in vectors]}


@app.get("/health")
async def report_health() -> str:
    """Answers that the server is ready."""
    return "ok"


if __name__ == "__main__":
    import anyio.to_thread

    if mistakes.workers:
        app.router.on_startup.append(
            lambda: setattr(
                anyio.to_thread.current_default_thread_limiter(), "total_tokens", mistakes.workers
            )
        )
    logging.basicConfig()
    torch.set_num_threads(1)
    made.finish_start(mistakes)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
