"""KServe's SDK: a classifier with all hooks, and one with `predict` alone. `python -m tests.servers.apps.kserve_app PORT`."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import kserve.model_server
import kserve.protocol.grpc.server
import torch
from kserve import InferOutput, InferRequest, InferResponse, Model
from kserve.protocol.rest.server import RESTServer

from tests.servers.apps.scorer import CHUNKS, Scorer
from tests.servers.apps.scorer import PAUSE_S as CHUNK_S

PAUSE_S = 0.02
"""Of `preprocess` and `postprocess`."""


class ScorerModel(Model):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.scorer = Scorer().eval()
        self.ready = True

    def predict(self, payload: Any, headers: Any = None, response_headers: Any = None) -> Any:
        is_v2 = isinstance(payload, InferRequest)
        rows = torch.tensor(payload.inputs[0].as_numpy() if is_v2 else payload["instances"])
        if (rows < 0).any():
            raise ValueError("a negative row")
        with torch.inference_mode():
            scores = self.scorer(rows.float()).sum(dim=1).tolist()
        if not is_v2:
            return {"predictions": scores}
        output = InferOutput("scores", [len(scores)], "FP32", scores)
        return InferResponse(payload.id or "1", self.name, [output])


class HookedModel(ScorerModel):
    async def preprocess(self, payload: Any, headers: Any = None) -> Any:
        time.sleep(PAUSE_S)
        return payload

    def postprocess(self, result: Any, headers: Any = None, response_headers: Any = None) -> Any:
        time.sleep(PAUSE_S)
        return result


class StreamModel(ScorerModel):
    async def predict(self, payload: Any, headers: Any = None, response_headers: Any = None) -> Any:
        return self.stream(payload)

    async def stream(self, payload: Any) -> AsyncIterator[str]:
        for _ in range(CHUNKS):
            yield f"{ScorerModel.predict(self, payload)}\n"
            await asyncio.sleep(CHUNK_S)


class LocalRESTServer(RESTServer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.config.host = "127.0.0.1"


class LocalGRPC:
    """Stands for `grpc.aio`. Neither of KServe's servers has a setting for its address, which is any."""

    @staticmethod
    def server(*args: Any, **kwargs: Any) -> Any:
        server = grpc.aio.server(*args, **kwargs)
        add_port = server.add_insecure_port
        server.add_insecure_port = lambda address: add_port(address.replace("[::]", "127.0.0.1"))
        return server


if __name__ == "__main__":
    kserve.model_server.RESTServer = LocalRESTServer
    kserve.protocol.grpc.server.aio = LocalGRPC
    kserve.model_server.ModelServer(
        http_port=int(sys.argv[1]),
        grpc_port=int(os.environ["GRPC_PORT"]),
        workers=int(os.environ.get("WORKERS", "1")),
    ).start([ScorerModel("plain"), HookedModel("hooked"), StreamModel("stream")])
