"""Ray Serve: deployments in processes of their own. `python -m tests.servers.apps.ray_app PORT`, in a network namespace."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import ray
import torch
from fastapi import FastAPI
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

from tests.servers.apps.scorer import CHUNKS, Scorer

OPTIONS: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0.1}, "max_ongoing_requests": 16}
api = FastAPI()


class Model:
    def __init__(self) -> None:
        self.model = Scorer().eval()

    def score(self, rows: int) -> list[list[float]]:
        if rows < 0:
            raise ValueError("no rows")
        with torch.inference_mode():
            return self.model(torch.ones(rows, 16)).tolist()  # type: ignore[no-any-return]


@serve.deployment(**OPTIONS)
class Classifier(Model):
    """Called by the proxy, or by another deployment."""

    async def __call__(self, request: Request) -> Any:
        return self.score((await request.json())["rows"])

    def classify(self, rows: int) -> Any:
        return self.score(rows)

    async def stream(self, pause_s: float) -> AsyncIterator[str]:
        for number in range(CHUNKS):
            self.score(1)
            await asyncio.sleep(pause_s)
            yield f"{number}\n"


@serve.deployment(**OPTIONS)
class Batcher(Model):
    @serve.batch(max_batch_size=4, batch_wait_timeout_s=0.05)
    async def score_all(self, values: list[float]) -> list[list[float]]:
        time.sleep(0.1)  # until it returns, the next batch waits
        return self.score(len(values))

    async def __call__(self, request: Request) -> Any:
        return await self.score_all((await request.json())["rows"])


@serve.deployment(**OPTIONS)
@serve.ingress(api)
class Ingress:
    """FastAPI in a replica, which calls another deployment."""

    def __init__(self, classifier: Any) -> None:
        self.classifier = classifier

    @api.post("/compose/{name}")
    async def compose(self, name: str, rows: int = 2) -> Any:
        return await self.classifier.classify.remote(rows)

    @api.post("/stream")
    async def stream(self, pause_s: float = 0.0) -> StreamingResponse:
        return StreamingResponse(self.classifier.options(stream=True).stream.remote(pause_s))


if __name__ == "__main__":
    ray.init(
        num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1",
        object_store_memory=100 << 20, log_to_driver=False,
    )  # fmt: skip
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    serve.run(Classifier.bind(), name="single", route_prefix="/single")
    serve.run(Batcher.bind(), name="batched", route_prefix="/batched")
    serve.run(Ingress.bind(Classifier.bind()), name="app", route_prefix="/app")
    print("ready", flush=True)
    try:
        while True:
            time.sleep(60)
    except KeyboardInterrupt:
        serve.shutdown()
        ray.shutdown()
