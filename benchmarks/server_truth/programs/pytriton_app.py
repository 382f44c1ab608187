"""PyTriton, without dynamic batching."""

from __future__ import annotations

import signal
import sys
from typing import Any, NoReturn

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

from benchmarks.server_truth.programs.work import classify, finish
from otel_infer.cli.demo.free_port import find_free_port

ROW = Tensor(name="rows", dtype=np.float32, shape=(1,))


@batch
def infer(rows: Any) -> dict[str, Any]:
    found = finish(classify())["classes"][: len(rows)]
    return {"classes": np.array(found, dtype=np.float32).reshape(-1, 1)}


def leave(number: int, frame: Any) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    sys.exit()


if __name__ == "__main__":
    config = TritonConfig(
        http_address="127.0.0.1", http_port=int(sys.argv[1]), grpc_address="127.0.0.1", grpc_port=find_free_port(),
        metrics_address="127.0.0.1", metrics_port=find_free_port(),
    )  # fmt: skip
    with Triton(config=config) as triton:
        output = Tensor(name="classes", dtype=np.float32, shape=(1,))
        triton.bind("classes", infer, inputs=[ROW], outputs=[output], config=ModelConfig(max_batch_size=4))
        signal.signal(signal.SIGTERM, leave)
        triton.serve()
