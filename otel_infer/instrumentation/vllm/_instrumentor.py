"""The one `Integration` that the files of this folder fill, and what they share."""

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
"""Looks at a model's class in a process of its own, which loads plugins, too."""
PROCESSES = {"EngineCore": "engine", "VllmWorker": "worker"}

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
REPORT_INTERVAL_NS = 1_000_000_000
"""What changes all the time is said so often."""

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
"""The parts, and the process of each."""

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
    """The first name that a model is served under; of a folder its own name, never a path."""
    served = getattr(config, "served_model_name", None) or config.model
    name = str(served[0] if isinstance(served, (list, tuple)) else served)
    is_path = name == config.model or os.path.isabs(name) or name.startswith((".", "~"))
    return strip_model_path(name) if is_path else name  # clients ask for it by that


def response_id(request_id: str) -> str:
    """What the client knows a prompt by: a completion's prompts and beams are numbered, and a response's turns."""
    found = _NUMBERED_ID.match(request_id)
    return found[found.lastindex or 0] if found else request_id
