"""Where the time went of a request that ended in the middle of a step, or while it was put back. Pure; `blame` says what the
causes mean."""

from __future__ import annotations

from otel_infer import facts, semconv
from otel_infer.records import RequestRecord


def was_put_back(record: RequestRecord, since: int) -> bool:
    """Whether it was preempted at this instant or later, and died before it was its turn again."""
    return record.outcome != facts.OK and record.preempted_at[-1:] >= (since,)


def rest_of_decode(record: RequestRecord) -> str:
    """What no step explains; a generation that was told as one, prompt and all, has no steps to explain it."""
    if record.steps is not None and was_put_back(record, record.last_token_at):
        return semconv.CAUSE_PREEMPTION
    is_one = record.steps is None and record.stage(semconv.SPAN_PREFILL) is None
    return semconv.CAUSE_DECODE if is_one and not record.telemetry_lost else semconv.CAUSE_UNEXPLAINED


def begun(record: RequestRecord, left: int) -> int:
    """Of what is left of its decoding: the step that it did not see the end of, no longer than its others or than such steps."""
    if record.outcome == facts.OK or left <= 0:
        return 0
    if record.steps is None:
        return left
    if was_put_back(record, record.last_token_at):
        return 0
    costs, summary = record.costs, record.summary
    usual = int(costs.base + costs.per_sequence * summary.batch_size_max) if costs is not None else 0
    return min(left, usual if _is_beside_prompts(record) else max(summary.longest, usual))


def cut_short(record: RequestRecord, left: int) -> int:
    """Of what is then left: the rest of that step, if others' prompts were in it and it is known what it costs without."""
    cut = record.cut_step
    if cut is None or not _is_beside_prompts(record) or was_put_back(record, record.last_token_at):
        return 0
    return max(min(left, cut.ended_at - max(cut.started_at, record.last_token_at)), 0)


def _is_beside_prompts(record: RequestRecord) -> bool:
    cut = record.cut_step
    return bool(cut and cut.others_prefill_tokens and record.costs and record.steps is not None)
