"""Flask and a thread that collects items from a queue.Queue."""

from __future__ import annotations

import queue
import sys
import threading
import time
from typing import Any

import torch
from flask import Flask

from benchmarks.server_truth.programs.work import MAX_BATCH, WIDTH, add_delay, classify_batch, finish, window

app = Flask(__name__)
items: queue.Queue[dict[str, Any]] = queue.Queue()


def run_batches() -> None:
    while True:
        while items.empty():
            time.sleep(0.0005)
        add_delay("queue wait")  # as a worker that is busy with something else
        batch = [items.get()]
        until = time.monotonic() + window()
        while len(batch) < MAX_BATCH and (left := until - time.monotonic()) > 0:
            try:
                batch.append(items.get(timeout=left))
            except queue.Empty:
                break
        for item, found in zip(batch, classify_batch([item["row"] for item in batch])):
            item["class"] = found
            item["done"].set()


@app.post("/classify")
def classify_text() -> dict[str, Any]:
    item: dict[str, Any] = {"row": torch.ones(WIDTH), "done": threading.Event()}
    items.put(item)
    item["done"].wait()
    return finish([item["class"]])


@app.get("/health")
def report_health() -> str:
    return "ok"


if __name__ == "__main__":
    threading.Thread(target=run_batches, daemon=True).start()
    app.run(port=int(sys.argv[1]), threaded=True)
