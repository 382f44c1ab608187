"""Estimates the time of the step in which a failed request ended: its own, and that of others' prompts. Pure."""

from __future__ import annotations

from otel_infer.assembly.records.request import RequestRecord
from otel_infer.ringbuffer import events


def estimate_interrupted_step_time(record: RequestRecord, remaining: int) -> int:
    """Returns how much of the remaining decode time the unfinished step of the request itself took, ns.

    At most its longest step or what the cost model predicts; all of it where there is neither. 0 without a failure.
    """
    if record.outcome == events.OK or remaining <= 0:
        return 0
    if record.steps is None:
        return remaining
    if record.ended_while_preempted(record.last_token_at):
        return 0
    costs, summary = record.cost_model, record.summary
    predicted = int(costs.base + costs.per_sequence * summary.batch_size_max) if costs is not None else 0
    if record.interrupted_step is not None and not (predicted or summary.longest):
        return remaining
    return min(remaining, predicted if _has_other_prefills(record) else max(summary.longest, predicted))


def estimate_interrupted_step_interference(record: RequestRecord, remaining: int) -> int:
    """Returns how much of the remaining decode time is interference in the unfinished step, ns.

    That is the rest of the step, if other requests' prompts were in it and the cost model is known; else 0.
    """
    step = record.interrupted_step
    if step is None or not _has_other_prefills(record) or record.ended_while_preempted(record.last_token_at):
        return 0
    return max(min(remaining, step.ended_at - max(step.started_at, record.last_token_at)), 0)


def _has_other_prefills(record: RequestRecord) -> bool:
    step = record.interrupted_step
    return bool(step and step.others_prefill_tokens and record.cost_model and record.steps is not None)
