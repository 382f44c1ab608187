"""MLServer, with adaptive batches: `python -m benchmarks.server_truth.programs.mlserver_app PORT`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from mlserver import MLModel
from mlserver.cli.main import main
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse

from benchmarks.server_truth.programs import work


class Classes(MLModel):
    async def load(self) -> bool:
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        rows = NumpyCodec.decode_input(payload.inputs[0])
        classes = work.finish(work.classify_batch([torch.ones(work.WIDTH) for _ in rows]))["classes"]
        output = NumpyCodec.encode_output("classes", np.array(classes).reshape(-1, 1))
        return InferenceResponse(model_name=self.name, outputs=[output])


SETTINGS = {
    "name": "classes",
    "implementation": "benchmarks.server_truth.programs.mlserver_app.Classes",
    "max_batch_size": work.MAX_BATCH,
    "max_batch_time": work.window(),
}

if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp())
    (folder / "model-settings.json").write_text(json.dumps(SETTINGS))
    os.environ |= {
        "MLSERVER_HOST": "127.0.0.1", "MLSERVER_HTTP_PORT": sys.argv[1], "MLSERVER_DEBUG": "false",
        "MLSERVER_GRPC_PORT": str(int(sys.argv[1]) + 1), "MLSERVER_METRICS_PORT": str(int(sys.argv[1]) + 2),
        "MLSERVER_PARALLEL_WORKERS": "0", "MLSERVER_METRICS_DIR": str(folder / "metrics"),
        "MLSERVER_ENVIRONMENTS_DIR": str(folder / "environments"),
    }  # fmt: skip
    sys.argv = ["mlserver", "start", str(folder)]
    main()
