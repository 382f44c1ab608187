"""Flask, whose model runs in other processes: of pools, and of workers that take items from a queue.

python -m tests.servers.apps.pool_app PORT fork|spawn|forkserver [instrument]
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import otel_infer

if "instrument" in sys.argv and __name__ == "__main__":
    otel_infer.instrument()

import torch
from flask import Flask, Response, jsonify

from tests.servers.apps.scorer import scorer

app = Flask(__name__)
context: Any = multiprocessing.get_context(sys.argv[2])
pools: dict[str, Any] = {}
results: dict[int, Any] = {}
arrived = threading.Condition()


def score(rows: int) -> float:
    with torch.inference_mode():
        return float(scorer(torch.ones(rows, 16)).sum())


def fail() -> None:
    raise ValueError("no score")


def serve_items(items: Any, scores: Any) -> None:
    while True:
        number, rows = items.get()
        scores.put((number, score(rows)))


def collect_scores(scores: Any) -> None:
    while True:
        number, value = scores.get()
        with arrived:
            results[number] = value
            arrived.notify_all()


@app.post("/executor/<name>")
def use_executor(name: str) -> Response:
    return jsonify(
        pools["executor"].submit(fail if name == "fail" else score, *[1] * (name != "fail")).result()
    )


@app.post("/pool/<name>")
def use_pool(name: str) -> Response:
    return jsonify(pools["pool"].apply(score, (1,)))


@app.post("/map/<name>")
def use_map(name: str) -> Response:
    return jsonify(pools["pool"].map(score, [1, 2, 3]))


@app.post("/threads/<name>")
def use_threads(name: str) -> Response:
    return jsonify(pools["threads"].apply(score, (1,)))


@app.post("/queue/<name>")
def use_queue(name: str) -> Response:
    number = threading.get_ident()
    pools["items"].put((number, 1))
    with arrived:
        arrived.wait_for(lambda: number in results, 20)
        return jsonify(results.pop(number))


@app.get("/health")
def report_health() -> str:
    return "ok"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # else the processes of the pools outlive this one
    pools["executor"] = ProcessPoolExecutor(2, mp_context=context)
    pools["pool"], pools["threads"] = context.Pool(2), ThreadPool(2)
    pools["items"], scores = context.Queue(), context.Queue()
    context.Process(target=serve_items, args=(pools["items"], scores), daemon=True).start()
    threading.Thread(target=collect_scores, args=(scores,), daemon=True).start()
    app.run(port=int(sys.argv[1]), threaded=True)
