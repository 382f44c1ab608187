"""Hooks for Hugging Face transformers: `generate`, continuous batching, `transformers serve`, tokenizers.

    tokenizer ─▶ generate ─▶ prefill ─▶ step* ─▶ decode       (`generate`, in the caller's thread)
    tokenizer ─▶ add_request ─▶ waiting ─▶ (schedule_batch ─▶ prepare_batch_update)* ─▶ streamer
                 `sequences`               `continuous_batching`, `batch_timing`, in the manager's thread

Releases 5.5 to 5.24; docs/engines/transformers.md lists the hooks of each release.
"""

from __future__ import annotations

from otel_infer.instrumentation.transformers import (
    batch_timing,
    cancellation,
    continuous_batching,
    generate,
    sequences,
    serve,
    startup,
    tokenization,
    transfers,
)
from otel_infer.instrumentation.transformers._instrumentor import instrumentor

__all__ = [
    "batch_timing",
    "cancellation",
    "continuous_batching",
    "generate",
    "instrumentor",
    "sequences",
    "serve",
    "startup",
    "tokenization",
    "transfers",
]
