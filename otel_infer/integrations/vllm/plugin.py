"""How vLLM loads us: the entry point `vllm.general_plugins`, called in each of its processes before its engine is made."""

from __future__ import annotations


def load() -> None:
    """As `otel_infer.instrument()`, which does nothing unless something is to be exported; twice is once."""
    import otel_infer

    otel_infer.instrument()
