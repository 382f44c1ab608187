"""MLServer: a classifier without and with adaptive batching. `python -m tests.servers.apps.mlserver_app PORT`.

It calls `mlserver start FOLDER`, with the folder `mlserver_models`. Variables `MLSERVER_…` set the rest.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import torch
from mlserver import MLModel
from mlserver.cli.main import main
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse

from tests.servers.apps.scorer import CHUNKS, PAUSE_S, Scorer


class ScorerRuntime(MLModel):
    async def load(self) -> bool:
        self.scorer = Scorer().eval()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        rows = torch.from_numpy(NumpyCodec.decode_input(payload.inputs[0]))
        if (rows < 0).any():
            raise ValueError("a negative row")
        with torch.inference_mode():
            scores = self.scorer(rows).sum(dim=1, keepdim=True)
        return InferenceResponse(
            model_name=self.name, outputs=[NumpyCodec.encode_output("scores", scores.numpy())]
        )

    async def predict_stream(
        self, payloads: AsyncIterator[InferenceRequest]
    ) -> AsyncIterator[InferenceResponse]:
        async for payload in payloads:
            for _ in range(CHUNKS):
                yield await self.predict(payload)
                await asyncio.sleep(PAUSE_S)


if __name__ == "__main__":
    os.environ |= {"MLSERVER_HOST": "127.0.0.1", "MLSERVER_HTTP_PORT": sys.argv[1], "MLSERVER_DEBUG": "false"}
    sys.argv = ["mlserver", "start", str(Path(__file__).parent / "mlserver_models")]
    main()
