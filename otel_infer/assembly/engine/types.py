"""Values that the engine step log passes to attribution and metrics. Pure."""

from __future__ import annotations

from typing import NamedTuple

from otel_infer.config import tenancy


class PrefillInStep(NamedTuple):
    """A request with `tokens` of its prompt in a step.

    `traffic_class`: its class (`tenancy.request_class`), as known when the step was scheduled.
    """

    trace_id: bytes
    span_id: bytes
    tokens: int
    traffic_class: str = tenancy.UNKNOWN


class Execution(NamedTuple):
    """The time that the worker of a rank spent on one step, by its host's clock or by its device.

    `pid`: process of the engine. `queued_ns`, `gap_ns`: as in `StepTimed`; -1 = unknown.
    `steps`, `gaps`: how many steps and gaps it represents, because a device times only some steps.
    """

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
    """One engine step, for metrics. Tokens are the scheduled ones.

    `block_tokens`: tokens in a block of the KV cache; 0 = unknown.
    """

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
        """Returns `prefill`, `decode` or `mixed`."""
        if self.prefill_tokens == 0:
            return "decode"
        return "mixed" if self.decode_tokens else "prefill"
