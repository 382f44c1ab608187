"""The prompt of a request by cause, from its first chunk to its first token. Pure; `blame` says what the causes mean."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from otel_infer import semconv
from otel_infer.analysis.attribution.decode import EMPTY_BREAKDOWN, MAX_INTERFERED_STEPS, StepBreakdown
from otel_infer.analysis.attribution.step_columns import inactive_intervals
from otel_infer.assembly.records.intervals import uncovered_length
from otel_infer.assembly.records.request import PrefillStep, RequestRecord

Causes = dict[str, int]
_THREAD_DELAY_CAUSES = (semconv.CAUSE_STARVED, semconv.CAUSE_PAGE_FAULTS)


def divide_prefill(record: RequestRecord) -> StepBreakdown:
    """The chunks of its prompt: shared with others' prompts by tokens; between them, others ran or the host was busy."""
    chunks = _prefill_chunks(record)
    if not chunks:
        return EMPTY_BREAKDOWN
    parts: Causes = defaultdict(int)
    interfered: list[tuple[int, int]] = []
    per_sequence = record.cost_model.per_sequence if record.cost_model is not None else 0.0
    again, before = 0, None
    pauses = inactive_intervals(record)
    extra = _recomputed_tokens(record, chunks) if record.preempted_at else 0
    for chunk in chunks:
        began = chunk.started_at
        if before is not None or chunk.previous_ended_at:
            if before is not None and not again and _was_preempted_between(record, before, chunk):
                again, extra = extra, 0
            began = _attribute_wait(record, chunk, before, pauses, parts, interfered)
        length = _attribute_delays(
            record, chunk, uncovered_length(pauses, began, chunk.ended_at), began, parts
        )
        mates = min(int(per_sequence * (chunk.batch_size - 1)), length)
        others, repeated = chunk.others_prefill_tokens, min(again, chunk.tokens)
        theirs = (length - mates) * others // max(chunk.tokens + others, 1)
        lost = (length - mates - theirs) * repeated // max(chunk.tokens, 1)
        again -= repeated
        parts[semconv.CAUSE_BATCHING] += mates
        parts[semconv.CAUSE_INTERFERENCE] += theirs
        parts[semconv.CAUSE_PREEMPTION] += lost
        parts[semconv.CAUSE_PREFILL] += length - mates - theirs - lost
        interfered.append((chunk.step, theirs))
        before = chunk
    return StepBreakdown(parts, interfered)


def _prefill_chunks(record: RequestRecord) -> list[PrefillStep]:
    """With the one that it did not see the end of."""
    cut = record.interrupted_step
    if cut is None or record.first_token_at or not cut.tokens:
        return record.prefill_steps
    return [*record.prefill_steps, cut]


def _recomputed_tokens(record: RequestRecord, chunks: Sequence[PrefillStep]) -> int:
    """Tokens of its prompt that were computed more than once, since it was put back."""
    tokens = sum([chunk.tokens for chunk in chunks])
    return (
        max(tokens - max(record.input_tokens - record.cached_input_tokens, 0), 0)
        if record.input_tokens
        else 0
    )


def _was_preempted_between(record: RequestRecord, before: PrefillStep, chunk: PrefillStep) -> bool:
    return any(before.started_at <= at <= chunk.started_at for at in record.preempted_at)


def _attribute_wait(
    record: RequestRecord,
    chunk: PrefillStep,
    before: PrefillStep | None,
    pauses: Sequence[tuple[Any, ...]],
    parts: Causes,
    interfered: list[tuple[int, int]],
) -> int:
    """Gives away the time before a chunk; when its own began, which is when the step before it was done."""
    since = chunk.started_at if before is None else before.ended_at
    began = max(chunk.started_at, chunk.previous_ended_at, since)
    length = uncovered_length(pauses, since, began)
    if not length:
        return began
    if before is not None and _was_preempted_between(record, before, chunk):
        cause = semconv.CAUSE_PREEMPTION
    elif before is not None and any(
        before.started_at < at <= chunk.started_at for _, at, _ in record.generation_gaps
    ):
        cause = semconv.CAUSE_SCHEDULER_QUEUE
    elif before is not None and chunk.step - before.step == 1:
        cause = semconv.CAUSE_HOST_BUBBLE
    else:
        cause = semconv.CAUSE_INTERFERENCE
        if before is None:
            parts[semconv.CAUSE_BATCHING] += (usual := _cost_without_prompts(record, chunk, length))
            length -= usual
        steps = range(chunk.step - 1 if before is None else before.step + 1, chunk.step)[
            :MAX_INTERFERED_STEPS
        ]
        interfered += [(step, length // len(steps)) for step in steps]
    parts[cause] += length
    return began


def _cost_without_prompts(record: RequestRecord, chunk: PrefillStep, length: int) -> int:
    """Of a wait for the step before: what that would have taken had there been no prompts in it."""
    if record.cost_model is None or not chunk.previous_prompt_tokens:
        return length
    return min(length, int(record.cost_model.base + record.cost_model.per_sequence * chunk.batch_size))


def _attribute_delays(
    record: RequestRecord, chunk: PrefillStep, length: int, began: int, parts: Causes
) -> int:
    """Gives away what of the `length` of a chunk has a reason of its own; the rest, ns."""
    if record.warmup_steps is not None:
        tokens = chunk.tokens + chunk.others_prefill_tokens
        first = record.warmup_steps.excess_time(chunk.step, length, chunk.batch_size, tokens)
        parts[semconv.CAUSE_WARMUP] += first
        length -= first
    if record.thread_delays is not None:
        for cause, held in zip(
            _THREAD_DELAY_CAUSES, record.thread_delays.delay_in_interval(began, chunk.ended_at)
        ):
            held = min(held, length)
            parts[cause] += held
            length -= held
    return length
