"""BentoML: a service that depends on another one. `bentoml serve tests.servers.apps.bentoml_app:Scores`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import bentoml
import torch

from tests.servers.apps.scorer import CHUNKS, Scorer


@bentoml.service(workers=1)
class Runner:
    """The model in a process of its own."""

    def __init__(self) -> None:
        self.model = Scorer().eval()

    @bentoml.api
    def score(self, rows: int) -> list[list[float]]:
        with torch.inference_mode():
            return self.model(torch.ones(rows, 16)).tolist()

    @bentoml.api(batchable=True, max_batch_size=4, max_latency_ms=5000)
    def score_each(self, values: list[float]) -> list[float]:
        with torch.inference_mode():
            return self.model(torch.tensor(values).reshape(-1, 1).repeat(1, 16)).sum(dim=1).tolist()


@bentoml.service(workers=1, threads=4, traffic={"timeout": 30})
class Scores:
    runner = bentoml.depends(Runner)

    def __init__(self) -> None:
        self.model = Scorer().eval()

    @bentoml.api
    def classify(self, rows: int) -> list[list[float]]:
        if rows < 0:
            raise ValueError("no rows")
        with torch.inference_mode():
            return self.model(torch.ones(rows, 16)).tolist()

    @bentoml.api(batchable=True, max_batch_size=4, max_latency_ms=5000)
    def batched(self, values: list[float]) -> list[float]:
        time.sleep(0.1)  # until it returns, the next batch waits
        with torch.inference_mode():
            return self.model(torch.tensor(values).reshape(-1, 1).repeat(1, 16)).sum(dim=1).tolist()

    @bentoml.api
    def stream(self, pause_s: float) -> Iterator[str]:
        for number in range(CHUNKS):
            with torch.inference_mode():
                self.model(torch.ones(1, 16))
            time.sleep(pause_s)
            yield f"{number}\n"

    @bentoml.api
    def depend(self, rows: int) -> Any:
        return self.runner.score(rows=rows)

    @bentoml.api
    async def depend_batched(self, value: float) -> Any:
        return await self.runner.to_async.score_each(values=[value])
