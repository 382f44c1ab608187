"""The seven complaints about latency in the words of those who have them, and what to change first, by cause. Pure."""

from __future__ import annotations

from typing import NamedTuple

from otel_infer import semconv


class Symptom(NamedTuple):
    """A row of the table: how people say it, what happens, what to change first."""

    complaint: str
    meaning: str
    change: str


SYMPTOMS = {
    "pre_engine": Symptom(
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
    "head_of_line_blocking": Symptom(
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

    symptom: str
    cause: str
    weight: float
    evidence: list[str]

    @property
    def change(self) -> str:
        """What to change first."""
        usual = semconv.CAUSES[self.cause].change or SYMPTOMS[self.symptom].change
        return _CHANGE_BY_SYMPTOM_AND_CAUSE.get((self.symptom, self.cause), usual)
