"""Defines the table of symptoms: the users' own words, what happens, and what to change first. Pure."""

from __future__ import annotations

from typing import NamedTuple

from otel_infer import semconv


class Symptom(NamedTuple):
    """A row of the table: the users' own words, what happens, and what to change first."""

    complaint: str
    meaning: str
    change: str


SYMPTOMS = {
    semconv.SYMPTOM_PRE_ENGINE: Symptom(
        semconv.COMPLAINTS[semconv.SYMPTOM_PRE_ENGINE],
        "time is spent before inference starts",
        "look at what runs before the engine: body reads, tokenization, lookups; make them fewer, faster or concurrent",
    ),
    semconv.SYMPTOM_QUEUEING: Symptom(
        semconv.COMPLAINTS[semconv.SYMPTOM_QUEUEING],
        "requests wait in the queue at any load",
        "limit concurrency at ingress, allow larger batches or add a replica, separate traffic",
    ),
    semconv.SYMPTOM_PREFILL: Symptom(
        semconv.COMPLAINTS[semconv.SYMPTOM_PREFILL],
        "prompts are expensive",
        "shorten or cap prompts, enable the prefix cache, prefill in smaller batches",
    ),
    semconv.SYMPTOM_STUTTER: Symptom(
        semconv.COMPLAINTS[semconv.SYMPTOM_STUTTER],
        "the work of the model is interrupted",
        "find what stops the process: other work on its cores, a lock, a slow disk",
    ),
    semconv.SYMPTOM_PEAK: Symptom(
        semconv.COMPLAINTS[semconv.SYMPTOM_PEAK],
        "for a time, more requests are accepted than served",
        "shed or spread load at the peak, scale up earlier, lower the queue's limit",
    ),
    semconv.SYMPTOM_HEAD_OF_LINE_BLOCKING: Symptom(
        semconv.COMPLAINTS[semconv.SYMPTOM_HEAD_OF_LINE_BLOCKING],
        "small requests wait behind large ones",
        "serve large requests separately, or limit how many run at the same time; give small ones priority",
    ),
    semconv.SYMPTOM_BATCHING: Symptom(
        semconv.COMPLAINTS[semconv.SYMPTOM_BATCHING],
        "batches are large, or requests wait for a batch to fill",
        "batch only offline traffic: no batching delay and smaller batches for live traffic",
    ),
    semconv.SYMPTOM_LATE_END: Symptom(
        semconv.COMPLAINTS[semconv.SYMPTOM_LATE_END],
        "the server works after the model has finished",
        "move work after the model out of the request: a background task, a queue",
    ),
    semconv.SYMPTOM_SLOW_READER: Symptom(
        semconv.COMPLAINTS[semconv.SYMPTOM_SLOW_READER],
        "clients read more slowly than the server writes",
        "the client or its network is slow; the server is not: send less per token, or buffer in a proxy",
    ),
    semconv.SYMPTOM_NOT_ENOUGH_CPU: Symptom(
        semconv.COMPLAINTS[semconv.SYMPTOM_NOT_ENOUGH_CPU],
        "threads of the server are ready to run and have no CPU",
        "more cores, or fewer threads and processes on them (OMP_NUM_THREADS, workers, neighbours)",
    ),
    semconv.SYMPTOM_TOO_MANY_AT_ONCE: Symptom(
        semconv.COMPLAINTS[semconv.SYMPTOM_TOO_MANY_AT_ONCE],
        "generations run at the same time and share cores and the GIL",
        "limit how many generate at a time (a semaphore), or batch them in one engine (continuous batching)",
    ),
    semconv.SYMPTOM_ABANDONED_WORK: Symptom(
        semconv.COMPLAINTS[semconv.SYMPTOM_ABANDONED_WORK],
        "the server goes on generating for clients that have left, and the others wait for it",
        "stop generating when the client disconnects (a StoppingCriteria, an abort), and let clients back off before a retry",
    ),
    semconv.SYMPTOM_SLOW_MODEL: Symptom(
        semconv.COMPLAINTS[semconv.SYMPTOM_SLOW_MODEL],
        "the model itself takes longer than the objective allows",
        "a faster device, or smaller or quantized weights",
    ),
}
"""By name. `Finding.change` refines `change` by cause."""


_CHANGE_BY_SYMPTOM_AND_CAUSE = {
    (semconv.SYMPTOM_PREFILL, semconv.CAUSE_INTERFERENCE): (
        "long prompts apart from other traffic, or fewer at the same time; the prefix cache, shorter prompts"
    ),
}
"""The first change to make, where it differs from the cause's and the symptom's own."""


_CHANGE_WHATEVER_THE_CAUSE = (
    semconv.SYMPTOM_HEAD_OF_LINE_BLOCKING,
    semconv.SYMPTOM_LATE_END,
    semconv.SYMPTOM_SLOW_READER,
    semconv.SYMPTOM_NOT_ENOUGH_CPU,
    semconv.SYMPTOM_TOO_MANY_AT_ONCE,
    semconv.SYMPTOM_ABANDONED_WORK,
    semconv.SYMPTOM_SLOW_MODEL,
)
"""Symptoms whose cause is one of their effects: more workers, for example, are taken by large requests as well."""


class Finding(NamedTuple):
    """A symptom of the slow requests. `weight`: its share of their whole time. `advice`: a change that its figures suggest."""

    symptom: str
    cause: str
    weight: float
    evidence: list[str]
    advice: str = ""

    @property
    def change(self) -> str:
        """The first change to make."""
        if self.advice:
            return self.advice
        if self.symptom in _CHANGE_WHATEVER_THE_CAUSE:
            return SYMPTOMS[self.symptom].change
        default = semconv.CAUSES[self.cause].change or SYMPTOMS[self.symptom].change
        return _CHANGE_BY_SYMPTOM_AND_CAUSE.get((self.symptom, self.cause), default)
