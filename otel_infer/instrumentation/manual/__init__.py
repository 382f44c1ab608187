"""The API for hand-written servers: `request`, its `stage`s, the `step`s of a custom decode loop, and a `batch`.

    with otel_infer.request("chat", model="tiny") as request:      # or the web framework's request
        with otel_infer.stage("rerank"):
            ...
    with otel_infer.step(batch):                                   # a list of requests
        logits = model(...)
    with otel_infer.batch(items):                                  # what `otel_infer.item()` returned in each handler
        scores = model(...)

Everything is a no-op while nothing is recorded. Errors in this package, or in its arguments, never reach the
caller.
"""

from __future__ import annotations

from otel_infer.instrumentation.manual.batches import batch, item
from otel_infer.instrumentation.manual.requests import request, stage
from otel_infer.instrumentation.manual.steps import step

__all__ = ["batch", "item", "request", "stage", "step"]
