"""The hooks on transformers' own scheduler of continuous batching, without a model, beside those of an older release.

    make bench ARGS="--only transformers_scheduler"

It measures as `vllm_scheduler` does, with the same gates.
"""

from __future__ import annotations

from benchmarks.verdict import Line
from benchmarks.vllm_scheduler import measure_scheduler


def measure(quick: bool) -> list[Line]:
    """Measures transformers' scheduler."""
    return measure_scheduler("transformers' scheduler", "transformers_scheduler_turns.py", quick)
