"""The `Instrumentor` to which the modules of this folder add their hooks, and the names they share."""

from __future__ import annotations

from otel_infer.instrumentation.hooks.instrumentor import Instrumentor

ENGINE = "sglang"
STATS = "sglang.srt.observability.req_time_stats"
REQUESTS, STEPS = "requests", "steps"
IDS = "otel_infer_ids"
"""Attribute of SGLang's `time_stats`: the ids of the request, which are sent to the scheduler with it."""
STATE = "otel_infer_state"
"""Attribute of `time_stats`: what this process knows of the sequence. It is not sent."""

instrumentor = Instrumentor(
    "sglang",
    "sglang",
    ("sglang",),
    is_engine=True,
    where={REQUESTS: "API server", STEPS: "scheduler"},
    plugins="SGLANG_PLUGINS",
)
