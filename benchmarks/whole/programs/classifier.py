"""FastAPI and `forward` of a small classifier."""

from __future__ import annotations

import sys
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI

from benchmarks.whole.programs.bert import classifier, tokenizer

app = FastAPI()


@app.post("/classify")
async def classify_text(body: dict[str, Any]) -> dict[str, int]:
    """Returns the class of a text."""
    inputs = tokenizer(body["text"], return_tensors="pt", return_token_type_ids=False)
    with torch.inference_mode():
        return {"label": int(classifier(**inputs).logits.argmax())}


@app.get("/health")
async def report_health() -> str:
    """Answers that the server is ready."""
    return "ok"


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
