"""Hooks for vLLM's V1 engine, in one module or more per kind of process.

    API server   render ─▶ add_request_async ═╗                              ╔═▶ detokenize ─▶ stream
    `api_server` `multimodal`                 ║                              ║   `output_processor`
    engine core  (socket, queue)           ◀══╝─▶ add_request ─▶ (schedule ─▶ update_from_output)* ─▶ free
    `engine_core`                                                `scheduler` `scheduler_steps` `scheduler_waits`

A request arrives in the API server. The engine core records its events as a fragment of that request
(`tracing.propagation`). The ids travel in vLLM's own `trace_headers`. With `VLLM_ENABLE_V1_MULTIPROCESSING=0`
both run in one process. `worker` and `startup` patch the workers.
"""

from __future__ import annotations

from otel_infer.instrumentation.vllm import (
    api_server,
    detokenization,
    engine_core,
    multimodal,
    output_processor,
    scheduler,
    scheduler_steps,
    scheduler_waits,
    startup,
    worker,
)
from otel_infer.instrumentation.vllm._instrumentor import instrumentor

__all__ = [
    "api_server",
    "detokenization",
    "engine_core",
    "instrumentor",
    "multimodal",
    "output_processor",
    "scheduler",
    "scheduler_steps",
    "scheduler_waits",
    "startup",
    "worker",
]
