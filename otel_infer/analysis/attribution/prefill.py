"""Divides the prefill of a request by cause, from its first chunk to its first token. Pure."""

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
    """Returns the breakdown of the chunks of the prompt and of the time between them.

    A chunk is shared with other requests' prompts by tokens. Between chunks, other requests ran or the host
    was busy.
    """
    chunks = _prefill_chunks(record)
    if not chunks:
        return EMPTY_BREAKDOWN
    parts: Causes = defaultdict(int)
    interfered_steps: list[tuple[int, int]] = []
    recompute_tokens = 0
    before: PrefillStep | None = None
    pauses = inactive_intervals(record)
    unplaced_tokens = _recomputed_tokens(record, chunks) if record.preempted_at else 0
    for chunk in chunks:
        began = chunk.started_at
        if before is not None or chunk.previous_ended_at:
            if before is not None and not recompute_tokens and _was_preempted_between(record, before, chunk):
                recompute_tokens, unplaced_tokens = unplaced_tokens, 0
            began = _attribute_wait(record, chunk, before, pauses, parts, interfered_steps)
        length = _attribute_delays(
            record, chunk, uncovered_length(pauses, began, chunk.ended_at), began, parts
        )
        repeated = min(recompute_tokens, chunk.tokens)
        recompute_tokens -= repeated
        interfered_steps.append((chunk.step, _attribute_chunk(record, chunk, length, repeated, parts)))
        before = chunk
    return StepBreakdown(parts, interfered_steps)


def _attribute_chunk(
    record: RequestRecord, chunk: PrefillStep, length: int, repeated: int, parts: Causes
) -> int:
    """Attributes the `length` ns of a chunk. Returns its interference, ns.

    `repeated`: how many of its tokens are computed again.
    """
    per_sequence = record.cost_model.per_sequence if record.cost_model is not None else 0.0
    batching_ns = min(int(per_sequence * (chunk.batch_size - 1)), length)
    others = chunk.others_prefill_tokens
    interference_ns = (length - batching_ns) * others // max(chunk.tokens + others, 1)
    recompute_ns = (length - batching_ns - interference_ns) * repeated // max(chunk.tokens, 1)
    parts[semconv.CAUSE_BATCHING] += batching_ns
    parts[semconv.CAUSE_INTERFERENCE] += interference_ns
    parts[semconv.CAUSE_PREEMPTION] += recompute_ns
    parts[semconv.CAUSE_PREFILL] += length - batching_ns - interference_ns - recompute_ns
    return interference_ns


def _prefill_chunks(record: RequestRecord) -> list[PrefillStep]:
    """Returns the chunks of the prompt, with the unfinished one if the request ended before its first token."""
    unfinished = record.interrupted_step
    if unfinished is None or record.first_token_at or not unfinished.tokens:
        return record.prefill_steps
    return [*record.prefill_steps, unfinished]


def _recomputed_tokens(record: RequestRecord, chunks: Sequence[PrefillStep]) -> int:
    """Returns the prompt tokens that were computed again after a preemption."""
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
    interfered_steps: list[tuple[int, int]],
) -> int:
    """Attributes the time before a chunk.

    Returns when the chunk's own time began, which is when the previous step was done.
    """
    since = chunk.started_at if before is None else before.ended_at
    began = max(chunk.started_at, chunk.previous_ended_at, since)
    length = uncovered_length(pauses, since, began)
    if not length:
        return began
    cause = _find_wait_cause(record, chunk, before)
    if cause == semconv.CAUSE_INTERFERENCE:
        if before is None:
            parts[semconv.CAUSE_BATCHING] += (batching_ns := _cost_without_prompts(record, chunk, length))
            length -= batching_ns
        steps = range(chunk.step - 1 if before is None else before.step + 1, chunk.step)[
            :MAX_INTERFERED_STEPS
        ]
        interfered_steps += [(step, length // len(steps)) for step in steps]
    parts[cause] += length
    return began


def _find_wait_cause(record: RequestRecord, chunk: PrefillStep, before: PrefillStep | None) -> str:
    """Returns why a chunk began later than the chunk before it, or later than it was scheduled."""
    if before is None:
        return semconv.CAUSE_INTERFERENCE
    if _was_preempted_between(record, before, chunk):
        return semconv.CAUSE_PREEMPTION
    if any(before.started_at < at <= chunk.started_at for _, at, _ in record.generation_gaps):
        return semconv.CAUSE_SCHEDULER_QUEUE
    is_next_step = chunk.step - before.step == 1
    return semconv.CAUSE_HOST_BUBBLE if is_next_step else semconv.CAUSE_INTERFERENCE


def _cost_without_prompts(record: RequestRecord, chunk: PrefillStep, length: int) -> int:
    """Returns how much of a wait for the previous step that step would have taken without prompts, ns."""
    if record.cost_model is None or not chunk.previous_prompt_tokens:
        return length
    return min(length, int(record.cost_model.base + record.cost_model.per_sequence * chunk.batch_size))


def _attribute_delays(
    record: RequestRecord, chunk: PrefillStep, length: int, began: int, parts: Causes
) -> int:
    """Attributes warmup and thread delays of a chunk of `length` ns. Returns the rest, ns."""
    if record.warmup_steps is not None:
        tokens = chunk.tokens + chunk.others_prefill_tokens
        warmup_ns = record.warmup_steps.excess_time(chunk.step, length, chunk.batch_size, tokens)
        parts[semconv.CAUSE_WARMUP] += warmup_ns
        length -= warmup_ns
    if record.thread_delays is not None:
        for cause, delay_ns in zip(
            _THREAD_DELAY_CAUSES, record.thread_delays.delay_in_interval(began, chunk.ended_at)
        ):
            delay_ns = min(delay_ns, length)
            parts[cause] += delay_ns
            length -= delay_ns
    return length
