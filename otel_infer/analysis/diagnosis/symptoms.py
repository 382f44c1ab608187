"""The seven complaints about latency in the words of those who have them, and what to change first, by cause. Pure."""

from __future__ import annotations

from typing import NamedTuple

from otel_infer import semconv


class Symptom(NamedTuple):
    """A row of the table: how people say it, what happens, what to change first."""

    said: str
    happens: str
    change: str


SYMPTOMS = {
    "before_the_engine": Symptom(
        "slow even for tiny prompts",
        "time goes before inference starts",
        "look at what runs before the engine: body reads, tokenizing, look-ups; make them fewer, nearer, or concurrent",
    ),
    "queueing": Symptom(
        "fine locally, bad in production",
        "requests wait for their turn at any time of the load",
        "limit concurrency where requests come in, give the engine a larger batch or another replica, separate traffic",
    ),
    "prefill": Symptom(
        "nothing for a while, then fast",
        "prompts are expensive",
        "shorten or cap prompts, switch the prefix cache on, prefill in smaller batches",
    ),
    "stutter": Symptom(
        "starts, then freezes or stutters",
        "decode is interrupted",
        "find out what stops the process: other work on its cores, a lock, a slow disk",
    ),
    "peak": Symptom(
        "explodes at peak hours",
        "for a time more is accepted than served",
        "shed or spread load at the peak, scale up earlier, shorten the queue's limit",
    ),
    "big_and_small": Symptom(
        "big customers slow down small ones",
        "light requests wait behind heavy ones",
        "serve heavy requests apart, or limit how many of them run at once; priorities for short ones",
    ),
    "batching": Symptom(
        "cheap batch mode is fine, live is slow",
        "batches are made large, or waited for, at the cost of each request",
        "batch only where nobody waits: no batching delay and a smaller batch for live traffic",
    ),
}


_CHANGE_BY_CAUSE = {
    semconv.CAUSE_MEDIA: "have media fetched by the client or from nearby, smaller, and processed by more API servers",
    semconv.CAUSE_GRAMMAR: "simpler schemas, and the same ones again: compiled grammars are kept; one of each before serving",
    semconv.CAUSE_KV_TRANSFER: "a faster way for KV blocks, or compute short prompts where they arrive",
    semconv.CAUSE_INTERFERENCE: "chunked prefill with fewer prompt tokens a step; long prompts apart",
    semconv.CAUSE_PREEMPTION: "more KV cache, or fewer and shorter sequences at once",
    semconv.CAUSE_GC: "gc.freeze() once the server is warm, a higher threshold, fewer objects that live long",
    semconv.CAUSE_COMPILE: "warm up all shapes before the first request",
    semconv.CAUSE_CAPTURE: "capture the graphs of all batch sizes before the first request",
    semconv.CAUSE_WARMUP: "run a batch and a prompt of each size once, before the server says that it is ready",
    semconv.CAUSE_THROTTLED: "raise the CPU quota of the container",
    semconv.CAUSE_GPU_THROTTLED: "cool the GPU, and look at its power supply (nvidia-smi -q -d PERFORMANCE)",
    semconv.CAUSE_STARVED: "more cores, or fewer threads and processes on them (OMP_NUM_THREADS, workers, neighbours)",
    semconv.CAUSE_PAGE_FAULTS: "keep freed memory: MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ at 1 GiB, or jemalloc",
    semconv.CAUSE_BLOCKED: (
        "find what it waits for (py-spy dump): a lock, other threads' work that holds the GIL, a slow disk, or the device"
    ),
    semconv.CAUSE_HOST_BUBBLE: "see what the engine's thread does between its steps (py-spy): callbacks, detokenizing, sending",
    semconv.CAUSE_EVENT_LOOP: "take what blocks the event loop off it: `def` instead of `async def`, or asyncio.to_thread",
}
"""What to change first where streams are interrupted, or the first token is late, by what does it."""
_CHANGE_BY_SYMPTOM_AND_CAUSE = {
    (
        "prefill",
        semconv.CAUSE_INTERFERENCE,
    ): "long prompts apart, or fewer of them at once; the prefix cache, shorter prompts",
    ("queueing", semconv.CAUSE_HIDDEN_QUEUE): (
        "shorter steps: fewer prompt tokens in one (chunked prefill); or the engine has to look for new requests more often"
    ),
}
"""The same, where it is another thing in this row of the table."""


class Finding(NamedTuple):
    """One complaint that fits. `weight`: share of its slow requests' whole time."""

    complaint: str
    cause: str
    weight: float
    evidence: list[str]

    @property
    def change(self) -> str:
        """What to change first."""
        usual = _CHANGE_BY_CAUSE.get(self.cause, SYMPTOMS[self.complaint].change)
        return _CHANGE_BY_SYMPTOM_AND_CAUSE.get((self.complaint, self.cause), usual)
