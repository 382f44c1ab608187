"""Sets the fields of a record that need no steps: attributes, pauses, baseline, and counts of tokens. Pure."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.assembly.requests.open_request import OpenRequest


def copy_fields(record: RequestRecord, request: OpenRequest) -> None:
    """Sets the fields of the record that describe the request as a whole.

    Attributes of the conventions that have a field go into it.
    """
    if request.attributes:
        attributes = dict(request.attributes)
        record.operation = str(attributes.pop(semconv.OPERATION_NAME, record.operation))
        record.provider = str(attributes.pop(semconv.PROVIDER_NAME, record.provider))
        record.model = str(attributes.pop(semconv.REQUEST_MODEL, record.model))
        record.attributes = attributes
    record.events, record.links, record.start_ids = request.events, request.links, request.start_ids
    record.span_name, record.tracestate = request.span_name, request.tracestate
    record.telemetry_lost = request.telemetry_lost
    record.received_at = request.received_at
    if request.pauses:
        apply_pauses(record, request)
    record.marks, record.code_samples = request.marks, request.code_samples
    record.is_multi_engine = len(request.runs) > 1 and len({run.log for run in request.runs}) > 1
    if not request.runs:
        record.call_cost = request.cost_model
    # Steps are identified by number, and each engine counts its own.
    if request.runs and not record.is_multi_engine:
        _apply_baseline(record, request)
    _apply_counts(record, request)


def apply_pauses(record: RequestRecord, request: OpenRequest) -> None:
    """Divides the pauses into those of the whole process and those of its event loop."""
    of_loop = semconv.EVENT_LOOP_CAUSES
    record.pauses = tuple(pause for pause in request.pauses if pause.cause not in of_loop)
    record.loop_pauses = tuple(pause for pause in request.pauses if pause.cause in of_loop)


def _apply_baseline(record: RequestRecord, request: OpenRequest) -> None:
    """Sets what the step log of its engine knows of the steps: prompts, thread delays, costs, warmup."""
    log = request.runs[-1].log
    record.prefills_by_step = log.prefill_history.freeze()
    record.thread_delays = log.baseline.thread_delays.freeze()
    record.cost_model, record.warmup_steps = request.cost_model, request.warmup_steps
    # Of an engine that had begun before, a window of the flight recorder lacks the first steps.
    record.engine_began_at = max(log.baseline.warmup.first_step_at, record.arrived_at)


def _apply_counts(record: RequestRecord, request: OpenRequest) -> None:
    """Sets the numbers of sequences, preemptions and tokens that the engine recorded."""
    record.sequences = request.sequences
    if request.finished:
        record.finish_reasons = tuple([event.reason for event in request.finished if event.reason])
    if request.preempted:
        record.preempted_at = tuple(event.at for event in request.preempted)
        record.preemptions = len(request.preempted)
    if request.prefixes:
        record.prefix_tokens = sum([event.tokens for event in request.prefixes])
        record.cached_tokens = sum([event.cached for event in request.prefixes])
        record.cached_input_tokens = _count_cached_input_tokens(request)
    if request.drafts:
        record.drafted_tokens = sum([event.drafted for event in request.drafts])
        record.accepted_tokens = sum([event.accepted for event in request.drafts])
    if request.submitted:
        record.input_tokens, record.max_tokens = request.submitted.input_tokens, request.submitted.max_tokens


def _count_cached_input_tokens(request: OpenRequest) -> int:
    """Returns the prompt tokens that were in the prefix cache when the prompt was first looked up.

    Other sequences of the same prompt find what the first has just cached. The prompt counts once, so only
    the first lookups count.
    """
    looked_up = cached = 0
    prompt_tokens = request.submitted.input_tokens if request.submitted else 0
    for event in request.prefixes:
        if prompt_tokens and looked_up >= prompt_tokens:
            break
        looked_up += event.tokens
        cached += event.cached
    return min(cached, prompt_tokens) if prompt_tokens else cached
