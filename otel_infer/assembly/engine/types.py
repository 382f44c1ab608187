"""TODO assembly.engine.types."""

from __future__ import annotations

from typing import NamedTuple

from otel_infer.config import tenancy


class PrefillInStep(NamedTuple):
    """A request that had so many tokens of its prompt in a step, and its class (`callers.class_of`) as known by then."""

    trace_id: bytes
    span_id: bytes
    tokens: int
    traffic_class: str = tenancy.UNKNOWN


class Execution(NamedTuple):
    """What the worker of this rank took for one step of an engine, whose process id this is, by its host or its device; the rest
    as in `facts.StepTimed`, -1 = not known. `steps`, `gaps`: for how many it stands."""

    engine: str
    pid: int
    rank: int
    length_ns: int
    on_device: bool = False
    queued_ns: int = -1
    gap_ns: int = -1
    steps: int = 1
    gaps: int = 1


class StepRecord(NamedTuple):
    """One engine step, for metrics. Tokens are those scheduled. `block_tokens`: what a block of its KV cache holds, 0 = not known."""

    engine: str
    pid: int
    step: int
    started_at: int
    ended_at: int
    size: int
    prefill_tokens: int
    decode_tokens: int
    kv_used: int
    kv_total: int
    running: int
    waiting: int
    block_tokens: int = 0

    @property
    def kind(self) -> str:
        """`prefill`, `decode` or `mixed`."""
        if self.prefill_tokens == 0:
            return "decode"
        return "mixed" if self.decode_tokens else "prefill"
