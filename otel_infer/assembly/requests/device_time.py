"""Whose the time of a batch was: an estimate by tokens, which sums to the batch with its named remainders. Pure.

The device was at the whole batch for `span`, which is measured, and each request was there for all of it. What a single request
took of it cannot be measured; here everybody has a part by the tokens that the step computed for them. Tokens of a prompt and of
decoding weigh the same, which favours neither; where prompts are long, they are charged more of the memory traffic than they
cause (arXiv 2401.00588 weighs by kind; nobody knows the weights of another's hardware).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from otel_infer import semconv
from otel_infer.assembly.engine.device_steps import BY_EVENT, DeviceSteps, DeviceTime
from otel_infer.assembly.engine.step_log import EngineStepLog
from otel_infer.assembly.engine.step_rows import RequestSteps
from otel_infer.assembly.records.request import RequestRecord, Stage
from otel_infer.assembly.requests.open_request import OpenRequest
from otel_infer.ringbuffer import events

SHARE_METHOD = "tokens"
K = TypeVar("K", bound=Hashable)


class DeviceTimeShares(NamedTuple):
    """ns. `of`: each one's part. `wasted`: of tokens that nobody got (rejected drafts, padding, discarded results).
    `rounding`: less than one ns for each. All of it is the span."""

    by_request: dict[Any, int]
    wasted: int
    rounding: int


def share_span(span: int, tokens: Mapping[K, int], computed: int) -> DeviceTimeShares:
    """Divides the span of a step that computed so many tokens; `tokens`: of each one who got some."""
    got = sum(tokens.values())
    computed = max(computed, got)
    if not computed:
        return DeviceTimeShares(dict.fromkeys(tokens, 0), span, 0)
    of = {who: span * number // computed for who, number in tokens.items()}
    wasted = span * (computed - got) // computed
    return DeviceTimeShares(of, wasted, span - sum(of.values()) - wasted)


def sum_request_share(spans: Any, tokens: Any, computed: Any) -> int:
    """The part of one who got these tokens in these steps, ns; columns of the same length. As `shared` has it, step by step."""
    spans, tokens = np.asarray(spans, np.int64), np.asarray(tokens, np.int64)
    return int((spans * tokens // np.maximum(np.maximum(computed, tokens), 1)).sum())


_COPY_STAGES = (semconv.SPAN_H2D, semconv.SPAN_D2H)
"""What holds these back is neither launching nor the host."""


def apply_device_time(record: RequestRecord, request: OpenRequest) -> None:
    """Onto its stages, and its decode steps."""
    logs = [run.log for run in request.runs if run.log.device is not None]
    if logs and logs[-1].device is not None and not record.is_multi_engine:
        _apply_step_times(record, logs[-1], logs[-1].device)
    for fact in request.timed_stages:
        _set_stage_attributes(_find_stage(record, fact), record, _stage_device_time(fact))


def _apply_step_times(record: RequestRecord, log: EngineStepLog, device: DeviceSteps) -> None:
    chunks, rows = record.prefill_steps, record.steps
    prompt = np.array([(one.step, one.tokens) for one in chunks], np.int64).reshape(-1, 2)
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
        if name == semconv.SPAN_PREFILL and len(steps) == 1:  # what was before it is no part of the stage
            time = time._replace(gaps=max(time.gaps, 0))
        share = sum_request_share(lengths, tokens, log.table.computed_tokens(steps))
        _set_stage_attributes(record.find_stage(name), record, time, len(steps), share)
        if time.method == BY_EVENT:
            of_all = _estimate_share(steps, tokens, lengths, log)
            record.device_share += of_all * log.ranks  # other ranks as the first
        if rows is not None and name == semconv.SPAN_DECODE and time.method == BY_EVENT:
            rows.device = np.append(0, lengths)  # the first row is the prefill's
            record.device_idle = np.append(0, _compute_idle(rows, device))


def _estimate_share(steps: Any, tokens: Any, lengths: Any, log: EngineStepLog) -> int:
    """The part of one who got these tokens: steps that were not timed as those that were, with prompts in them or without."""
    has_prompt = np.array([log.table.prefill_tokens(step) > 0 for step in steps.tolist()])
    computed, is_timed, share = log.table.computed_tokens(steps), lengths > 0, 0
    for kind in (has_prompt, ~has_prompt):
        # Of a kind of which none was timed nothing is known: as all others.
        timed = kind & is_timed if (kind & is_timed).any() else is_timed
        if kind.any() and timed.any():
            part = sum_request_share(lengths[timed], tokens[timed], computed[timed])
            share += part * int(kind.sum()) // int(timed.sum())
    return share


def _compute_idle(rows: RequestSteps, device: DeviceSteps) -> Any:
    """Of the time from one token to the next, step by step."""
    since, until = rows.ended_at[:-1], rows.ended_at[1:]
    is_followed = np.append(rows.started_at[2:] < until[:-1], False)
    if len(rows) > 2:  # what came after its last step was not its own: as before
        is_followed[-1] = is_followed[-2]
    return device.idle_times(rows.step[1:], since, until, is_followed)


def _find_stage(record: RequestRecord, fact: events.StageTimed) -> Stage | None:
    """The one that it was launched in: of several of a name the last that had begun."""
    launched_at = fact.started_at - fact.queued_ns
    begun = [one for one in record.stages if one.name == fact.stage and one.started_at <= launched_at]
    return begun[-1] if begun else record.find_stage(fact.stage)


def _stage_device_time(fact: events.StageTimed) -> DeviceTime:
    span = fact.at - fact.started_at
    return DeviceTime(BY_EVENT, 1, span, events.decode_ns(fact.launched_ns), fact.queued_ns, 0, fact.bound_ns)


def _set_stage_attributes(
    stage: Stage | None, record: RequestRecord, time: DeviceTime, steps: int = 1, share: int | None = None
) -> None:
    if stage is None:
        return
    said: dict[str, events.Value] = {
        semconv.DEVICE_METHOD: time.method,
        semconv.DEVICE_STEPS: time.steps,
        semconv.DEVICE_STEPS_ALL: steps,
        semconv.DEVICE_DURATION: time.span / 1e9,
    }
    if share is not None:
        said |= {semconv.DEVICE_SHARE: share / 1e9, semconv.DEVICE_SHARE_METHOD: SHARE_METHOD}
    if time.method == BY_EVENT:
        said |= {semconv.DEVICE_QUEUE: time.queued / 1e9, semconv.DEVICE_CLOCK_ERROR: time.bound / 1e9}
        known = {semconv.DEVICE_LAUNCH: time.launched, semconv.DEVICE_GAP: time.gaps}
        said |= {key: length / 1e9 for key, length in known.items() if length >= 0}
        if stage.name not in _COPY_STAGES and time.limit:
            said[semconv.DEVICE_BOTTLENECK] = time.limit
        # As long as all steps took if the others were as those: long answers are seldom timed whole, and belong to the mean.
        record.device_ns.append((stage.name, time.span * steps // time.steps))
    stage.attributes.update(said)
