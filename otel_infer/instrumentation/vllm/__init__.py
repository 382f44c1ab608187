"""vLLM's V1 engine, a file for each kind of process.

    API server    render ─▶ add_request_async ═╗                                   ╔═▶ detokenize ─▶ stream
      `media` `frontend`    submitted          ║                                   ║   `delivery`
    engine core             (socket, queue) ◀══╝─▶ add_request ─▶ (schedule ─▶ update_from_output)* ─▶ free      `core`
                                                   received `waits` `steps`

The request that arrived in the API server goes on in the engine core as a part of it (`elsewhere`): its ids travel in
vLLM's own `trace_headers`. In one process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`) all of it happens there.
"""

from __future__ import annotations

from otel_infer.instrumentation.vllm import (
    api_server,
    engine_core,
    multimodal,
    output_processor,
    scheduler,
    scheduler_waits,
    startup,
    worker,
)
from otel_infer.instrumentation.vllm._instrumentor import instrumentor

__all__ = [
    "api_server",
    "engine_core",
    "instrumentor",
    "multimodal",
    "output_processor",
    "scheduler",
    "scheduler_waits",
    "startup",
    "worker",
]
