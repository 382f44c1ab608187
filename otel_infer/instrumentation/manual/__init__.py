"""For hand-written servers: a request, its stages, and the steps of a loop of one's own.

    with otel_infer.request("chat", model="tiny") as request:      # or under a web framework: already there
        with otel_infer.stage("rerank"):
            ...
    with otel_infer.step(batch):                                   # a list of requests
        logits = model(...)

Everything is a no-op while nothing is recorded, and no mistake in here, or in what it is given, reaches the caller.
"""

from __future__ import annotations

from otel_infer.instrumentation.manual.requests import request, stage
from otel_infer.instrumentation.manual.steps import step

__all__ = ["request", "stage", "step"]
