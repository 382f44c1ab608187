"""Flask and a thread that takes items from a queue.Queue: what is there at once is a batch."""

from __future__ import annotations

import queue
import sys
import threading
from typing import Any

import torch
from flask import Flask, Response, jsonify

from tests.servers.apps.scorer import scorer

app = Flask(__name__)
work: queue.Queue[dict[str, Any]] = queue.Queue()
MAX_BATCH, WINDOW_S = 8, 0.05


def serve_work() -> None:
    while True:
        batch = [work.get()]
        while len(batch) < MAX_BATCH:
            try:
                batch.append(work.get(timeout=WINDOW_S))
            except queue.Empty:
                break
        with torch.inference_mode():
            scores = scorer(torch.stack([item["row"] for item in batch])).tolist()
        for item, score in zip(batch, scores):
            item["score"] = score
            item["done"].set()


@app.post("/classify/<name>")
def classify(name: str) -> Response:
    item: dict[str, Any] = {"row": torch.ones(16), "done": threading.Event()}
    work.put(item)
    item["done"].wait()
    return jsonify(item["score"])


@app.get("/health")
def report_health() -> str:
    return "ok"


if __name__ == "__main__":
    threading.Thread(target=serve_work, daemon=True).start()
    app.run(port=int(sys.argv[1]), threaded=True)
