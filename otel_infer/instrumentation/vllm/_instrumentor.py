"""The `Instrumentor` to which the modules of this folder add their hooks, and the names they share."""

from __future__ import annotations

import os
import re
from typing import Any

from otel_infer.instrumentation.hooks.engines import strip_model_path
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor

ENGINE = "vllm"
_NUMBERED_ID = re.compile(
    r"(?:(cmpl-.+?)(?:-[0-9a-f]{16,32}-beam)?-\d+|((?:embd|classify|score|pooling)-.+)-\d+|(resp_.+)_\d+)$"
)

HELPERS = ("vllm.model_executor.models.registry",)
"""Modules that vLLM runs as programs.

This one inspects a model's class in a subprocess, which loads plugins too.
"""
PROCESSES = {"EngineCore": "engine", "VllmWorker": "worker"}
"""Process roles by the beginning of the name of vLLM's `multiprocessing` process."""

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
REPORT_INTERVAL_NS = 1_000_000_000
"""Minimum interval between two events about a value that changes at every step."""

REQUESTS, TOKENIZING, MEDIA = "requests", "tokenizing", "media"
SERVED_NAME, OFFLINE_NAME = "served model's name", "offline model's name"
STEPS, PREEMPTIONS, EVICTIONS, DUMMY_BATCHES = "steps", "preemptions", "evictions", "dummy batches"
GRAMMARS, TRANSFERS = "grammars", "KV from elsewhere"
LOADING, EXECUTION, READY = "loading", "execution", "engine's start"
PART_PROCESSES = {
    **dict.fromkeys((REQUESTS, TOKENIZING, MEDIA, SERVED_NAME), "API server"),
    OFFLINE_NAME: "LLM",
    **dict.fromkeys(
        (STEPS, GRAMMARS, TRANSFERS, PREEMPTIONS, EVICTIONS, DUMMY_BATCHES, READY), "engine core"
    ),
    **dict.fromkeys((LOADING, f"{LOADING} on a CPU", EXECUTION), "worker"),
}
"""The process of each part (a group of hooks that is installed wholly or not at all)."""

instrumentor = Instrumentor(
    "vllm",
    "vllm",
    ("vllm",),
    is_engine=True,
    processes=PROCESSES,
    where=PART_PROCESSES,
    helpers=HELPERS,
    plugins="VLLM_PLUGINS",
)


def model_name(config: Any) -> str:
    """Returns the first served name of a model; for a folder its last component, never a path."""
    served = getattr(config, "served_model_name", None) or config.model
    name = str(served[0] if isinstance(served, (list, tuple)) else served)
    is_path = name == config.model or os.path.isabs(name) or name.startswith((".", "~"))
    return strip_model_path(name) if is_path else name  # a served name stays whole: clients send it


def response_id(request_id: str) -> str:
    """Returns the id that the client receives: `request_id` without the number of a prompt, beam or turn."""
    numbered = _NUMBERED_ID.match(request_id)
    return numbered[numbered.lastindex or 0] if numbered else request_id


def has_own_tracing(config: Any) -> bool:
    """Returns whether vLLM's own tracing is on. `config`: has an `ObservabilityConfig`; True if it cannot be read."""
    observability = getattr(config, "observability_config", None)
    return bool(getattr(observability, "otlp_traces_endpoint", True))
