"""Estimates each request's share of a batch's device time, by tokens. Pure.

The shares and the named remainders sum to the batch. The device worked for `span` ns on the whole batch,
which is measured. The share of a single request cannot be measured, so it is estimated from the tokens that
the step computed for it. Prompt tokens and decode tokens weigh the same, which favours neither. Long prompts
are charged more memory traffic than they cause. arXiv 2401.00588 weighs tokens by kind, but the weights of
the user's hardware are unknown.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from otel_infer import semconv
from otel_infer.assembly.engine.device_steps import BY_EVENT, DeviceSteps, DeviceTime
from otel_infer.assembly.engine.step_log import EngineStepLog
from otel_infer.assembly.engine.step_rows import RequestSteps
from otel_infer.assembly.records.request import RequestRecord, Stage
from otel_infer.assembly.requests.open_request import OpenRequest
from otel_infer.ringbuffer import events

SHARE_METHOD = "tokens"


def sum_request_share(spans: Any, tokens: Any, computed: Any) -> int:
    """Returns the share of one request in several steps, ns, rounded down in each step.

    The arguments are columns of equal length: the device time of a step, the tokens that it delivered to the
    request, and the tokens that it computed.
    """
    spans, tokens = np.asarray(spans, np.int64), np.asarray(tokens, np.int64)
    return int((spans * tokens // np.maximum(np.maximum(computed, tokens), 1)).sum())


_COPY_STAGES = (semconv.SPAN_H2D, semconv.SPAN_D2H)
"""Stages without a bottleneck: neither launching nor the host limits a copy."""


def apply_device_time(record: RequestRecord, request: OpenRequest) -> None:
    """Adds device times to the stages and the decode steps of the record."""
    logs = [run.log for run in request.runs if run.log.device is not None]
    if logs and logs[-1].device is not None and not record.is_multi_engine:
        _apply_step_times(record, logs[-1], logs[-1].device)
    for event in request.timed_stages:
        _set_stage_attributes(_find_stage(record, event), record, _stage_device_time(event))


def _apply_step_times(record: RequestRecord, log: EngineStepLog, device: DeviceSteps) -> None:
    chunks, rows = record.prefill_steps, record.steps
    prompt = np.array([(chunk.step, chunk.tokens) for chunk in chunks], np.int64).reshape(-1, 2)
    kinds = [(semconv.SPAN_PREFILL, prompt[:, 0], prompt[:, 1])]
    if rows is not None and len(rows) > 1:
        later = (
            [record.later_prefill_tokens.get(step, 0) for step in rows.step[1:].tolist()]
            if record.later_prefill_tokens
            else 0
        )
        kinds.append((semconv.SPAN_DECODE, rows.step[1:], rows.tokens[1:] + np.array(later)))
    for name, steps, tokens in kinds:
        time, lengths = device.sum_step_times(steps)
        if time is None:
            continue
        if name == semconv.SPAN_PREFILL and len(steps) == 1:  # a gap before the step is no part of the stage
            time = time._replace(gaps=max(time.gaps, 0))
        share = sum_request_share(lengths, tokens, log.table.computed_tokens(steps))
        _set_stage_attributes(record.find_stage(name), record, time, len(steps), share)
        if time.method == BY_EVENT:
            estimated_share = _estimate_share(steps, tokens, lengths, log)
            # Only the first rank is timed; the others are assumed equal.
            record.device_share += estimated_share * log.ranks
        if rows is not None and name == semconv.SPAN_DECODE and time.method == BY_EVENT:
            rows.device = np.append(0, lengths)  # the first row is prefill
            record.device_idle = np.append(0, _compute_idle(rows, device))


def _estimate_share(steps: Any, tokens: Any, lengths: Any, log: EngineStepLog) -> int:
    """Returns the share of a request with these tokens, ns, including steps that were not timed.

    Untimed steps count like timed ones, with and without prompt tokens separately.
    """
    has_prompt = np.array([log.table.prefill_tokens(step) > 0 for step in steps.tolist()])
    computed, is_timed, share = log.table.computed_tokens(steps), lengths > 0, 0
    for kind in (has_prompt, ~has_prompt):
        # If no step of this kind was timed, all timed steps are the best estimate.
        timed = kind & is_timed if (kind & is_timed).any() else is_timed
        if kind.any() and timed.any():
            part = sum_request_share(lengths[timed], tokens[timed], computed[timed])
            share += part * int(kind.sum()) // int(timed.sum())
    return share


def _compute_idle(rows: RequestSteps, device: DeviceSteps) -> Any:
    """Returns the idle time of the device from each token to the next, ns."""
    since, until = rows.ended_at[:-1], rows.ended_at[1:]
    is_followed = np.append(rows.started_at[2:] < until[:-1], False)
    if len(rows) > 2:  # whether its last step was followed is unknown; assume the same as for the one before
        is_followed[-1] = is_followed[-2]
    return device.idle_times(rows.step[1:], since, until, is_followed)


def _find_stage(record: RequestRecord, event: events.StageTimed) -> Stage | None:
    """Returns the stage in which the work was launched: the last of this name that had begun by then."""
    launched_at = event.started_at - event.queued_ns
    begun = [
        stage for stage in record.stages if stage.name == event.stage and stage.started_at <= launched_at
    ]
    return begun[-1] if begun else record.find_stage(event.stage)


def _stage_device_time(event: events.StageTimed) -> DeviceTime:
    span = event.at - event.started_at
    return DeviceTime(
        BY_EVENT, 1, span, events.decode_ns(event.launched_ns), event.queued_ns, 0, event.bound_ns
    )


def _set_stage_attributes(
    stage: Stage | None, record: RequestRecord, time: DeviceTime, steps: int = 1, share: int | None = None
) -> None:
    if stage is None:
        return
    attributes: dict[str, events.Value] = {
        semconv.DEVICE_METHOD: time.method,
        semconv.DEVICE_STEPS: time.steps,
        semconv.DEVICE_STEPS_ALL: steps,
        semconv.DEVICE_DURATION: time.span / 1e9,
    }
    if share is not None:
        attributes |= {semconv.DEVICE_SHARE: share / 1e9, semconv.DEVICE_SHARE_METHOD: SHARE_METHOD}
    if time.method == BY_EVENT:
        attributes |= {semconv.DEVICE_QUEUE: time.queued / 1e9, semconv.DEVICE_CLOCK_ERROR: time.bound / 1e9}
        optional = {semconv.DEVICE_LAUNCH: time.launched, semconv.DEVICE_GAP: time.gaps}
        attributes |= {key: length / 1e9 for key, length in optional.items() if length >= 0}
        if stage.name not in _COPY_STAGES and time.limit:
            attributes[semconv.DEVICE_BOTTLENECK] = time.limit
        # Scaled from the timed steps to all: long answers are rarely timed whole, but count in the mean.
        record.device_ns.append((stage.name, time.span * steps // time.steps))
    stage.attributes.update(attributes)
