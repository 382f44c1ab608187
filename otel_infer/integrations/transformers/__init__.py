"""Hugging Face transformers: `generate`, continuous batching, `transformers serve`, tokenizers.

    tokenizer ─▶ generate ─▶ prefill ─▶ step* ─▶ decode                              (`generate`, in the caller's thread)
    tokenizer ─▶ add_request ─▶ waiting ─▶ schedule_batch / update_batch* ─▶ streamer   (`batching`, in its own thread)

Read against releases 5.5 to 5.23. Each file is one way through the library.
"""

from __future__ import annotations

from otel_infer.integrations.transformers import batching, generate, serve, text
from otel_infer.integrations.transformers._integration import integration

__all__ = ["batching", "generate", "integration", "serve", "text"]
