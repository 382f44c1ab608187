"""PyTriton: a classifier without and with dynamic batching, and a stream. `python -m tests.servers.apps.pytriton_app PORT`.

Variables: `GRPC_PORT`; `MODELS`, those that are served; `CALLS`, a file that gets a line with each call of a function; `TRACE_URL`,
where Triton's own tracing sends its spans; `PYTRITON_TRITON_CONFIG_…`, further settings of Triton.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

from tests.servers.apps.scorer import CHUNKS, Scorer
from tests.servers.apps.scorer import PAUSE_S as CHUNK_S
from tests.support.served import free_port

BATCH_SIZE, QUEUE_DELAY_US = 4, 100_000
PAUSE_S = 0.02
"""Of the function without torch."""
INPUTS = [Tensor(name="rows", dtype=np.float32, shape=(16,))]
OUTPUTS = [Tensor(name="scores", dtype=np.float32, shape=(1,))]

scorer = Scorer().eval()
CALLS = Path(os.environ["CALLS"]) if "CALLS" in os.environ else None


def note_call(*values: Any) -> None:
    if CALLS is not None:
        with CALLS.open("a") as calls:
            print(*values, file=calls)


def score(rows: Any) -> Any:
    if (rows < 0).any():
        raise ValueError("a negative row")
    with torch.inference_mode():
        return scorer(torch.from_numpy(np.array(rows))).sum(dim=1, keepdim=True).numpy()


@batch
def infer(rows: Any) -> dict[str, Any]:
    note_call("infer")
    return {"scores": score(rows)}


def double(requests: list[Any]) -> list[dict[str, Any]]:
    """Uses no torch."""
    note_call("double", *[request.parameters for request in requests])
    time.sleep(PAUSE_S)
    return [{"scores": request["rows"][:, :1] * 2} for request in requests]


@batch
def misfit(rows: Any) -> dict[str, Any]:
    """Returns what PyTriton refuses."""
    return {"scores": rows[:0]}


@batch
def stream(rows: Any) -> Iterator[dict[str, Any]]:
    for _ in range(CHUNKS):
        yield {"scores": score(rows)}
        time.sleep(CHUNK_S)


def make_trace_config() -> list[str] | None:
    """Returns the settings of Triton's own tracing, and of PyTriton's; None = off."""
    url = os.environ.get("TRACE_URL")
    if url is None:
        return None
    settings = (
        "opentelemetry,url={url}",
        "opentelemetry,resource=service.name=triton",
        "opentelemetry,bsp_schedule_delay=200",
    )
    return ["rate=1", "level=TIMESTAMPS", "mode=opentelemetry", *[each.format(url=url) for each in settings]]


def leave(number: int, frame: Any) -> NoReturn:
    """Ends the server once, so that Triton removes its files."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit()


def main(port: int) -> None:
    config = TritonConfig(
        http_address="127.0.0.1", http_port=port, grpc_address="127.0.0.1", grpc_port=int(os.environ["GRPC_PORT"]),
        metrics_address="127.0.0.1", metrics_port=free_port(), trace_config=make_trace_config(),
    )  # fmt: skip
    batcher = DynamicBatcher(max_queue_delay_microseconds=QUEUE_DELAY_US)
    models: dict[str, tuple[Any, ModelConfig]] = {
        "single": (infer, ModelConfig(max_batch_size=BATCH_SIZE)),
        "batched": (infer, ModelConfig(max_batch_size=BATCH_SIZE, batcher=batcher)),
        "double": (double, ModelConfig(max_batch_size=BATCH_SIZE)),
        "misfit": (misfit, ModelConfig(max_batch_size=BATCH_SIZE)),
        "stream": (stream, ModelConfig(max_batch_size=BATCH_SIZE, decoupled=True)),
    }
    with Triton(config=config) as triton:
        for name in os.environ.get("MODELS", " ".join(models)).split():
            function, model_config = models[name]
            triton.bind(name, function, inputs=INPUTS, outputs=OUTPUTS, config=model_config)
        signal.signal(signal.SIGTERM, leave)
        triton.serve()


if __name__ == "__main__":
    main(int(sys.argv[1]))
