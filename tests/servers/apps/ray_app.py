"""Ray Serve: deployments in processes of their own. In a network namespace, because Ray opens ports on every address:

python -m tests.servers.apps.ray_app PORT [instrument]
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import otel_infer

if "instrument" in sys.argv and __name__ == "__main__":
    otel_infer.instrument()

import ray
import torch
from fastapi import FastAPI
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
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
    """Called by another deployment."""

    def classify(self, rows: int) -> Any:
        return self.score(rows)

    async def stream(self, pause_s: float) -> AsyncIterator[str]:
        for number in range(CHUNKS):
            self.score(1)
            await asyncio.sleep(pause_s)
            yield f"{number}\n"


@serve.deployment(**OPTIONS)
class Batcher(Model):
    """Called by the proxy."""

    @serve.batch(max_batch_size=4, batch_wait_timeout_s=0.05)
    async def score_all(self, values: list[float]) -> list[list[float]]:
        await asyncio.sleep(0.2)  # the next batch waits meanwhile
        return self.score(len(values))

    async def __call__(self, request: Request) -> Any:
        return await self.score_all((await request.json())["value"])


@serve.deployment(**OPTIONS)
@serve.ingress(api)
class Ingress:
    """FastAPI in a replica."""

    def __init__(self, classifier: Any) -> None:
        self.classifier = classifier

    @api.post("/compose/{name}")
    async def compose(self, name: str, rows: int = 2) -> Any:
        return await self.classifier.classify.remote(rows)

    @api.get("/score/{name}")
    async def show_score(self, name: str) -> Any:
        return await self.classifier.classify.remote(1)

    @api.post("/stream")
    async def stream(self, pause_s: float = 0.0) -> StreamingResponse:
        return StreamingResponse(self.classifier.options(stream=True).stream.remote(pause_s))


def export_spans() -> list[SpanProcessor]:
    """Ray's own tracing, if RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH names this function."""
    return [SimpleSpanProcessor(OTLPSpanExporter())]


if __name__ == "__main__":
    ray.init(
        address="local",  # never a cluster that runs here already
        num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1",
        object_store_memory=100 << 20, log_to_driver=False,
    )  # fmt: skip
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    app = serve.RunTarget(Ingress.bind(Classifier.bind()), name="app", route_prefix="/app")
    serve.run_many([app, serve.RunTarget(Batcher.bind(), name="batched", route_prefix="/batched")])
    print("ready", flush=True)
    while True:
        time.sleep(60)
