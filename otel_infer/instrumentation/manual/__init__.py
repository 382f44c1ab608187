"""The API for hand-written servers: `request`, its `stage`s, and the `step`s of a custom decode loop.

    with otel_infer.request("chat", model="tiny") as request:      # or the web framework's request
        with otel_infer.stage("rerank"):
            ...
    with otel_infer.step(batch):                                   # a list of requests
        logits = model(...)

Everything is a no-op while nothing is recorded. Errors in this package, or in its arguments, never reach the
caller.
"""

from __future__ import annotations

from otel_infer.instrumentation.manual.requests import request, stage
from otel_infer.instrumentation.manual.steps import step

__all__ = ["request", "stage", "step"]
