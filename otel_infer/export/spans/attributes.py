"""Returns the attributes of a request's spans: recurring strings, counts, and durations (s)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from otel_infer import semconv
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.export.otlp import SharedAttributes
from otel_infer.export.sampling import tail_sampler
from otel_infer.ringbuffer.events import Value

MAX_PAUSES = 32
"""Maximum pause events on a request. The longest pauses are exported."""
_SERVER_PREFIXES = ("http.", "messaging.", "rpc.", "url.", "server.", "client.", "network.", "user_agent.")
_STRING_KEYS = (
    semconv.OPERATION_NAME,
    semconv.PROVIDER_NAME,
    semconv.REQUEST_MODEL,
    semconv.RESPONSE_FINISH_REASONS,
    semconv.ENGINE,
    semconv.FAILED_STAGE,
    semconv.ERROR_TYPE,
    semconv.KEEP_REASON,
    semconv.SLO_MISSED,
    semconv.UNSAMPLED,
    semconv.TELEMETRY_LOST,
    semconv.FIRST_REQUEST,
    semconv.LATENCY_TOP_CAUSE,
    semconv.THROTTLE_REASON,
)

_COUNT_KEYS = (
    semconv.REQUEST_MAX_TOKENS,
    semconv.USAGE_INPUT_TOKENS,
    semconv.USAGE_OUTPUT_TOKENS,
    semconv.USAGE_CACHE_READ,
    semconv.TOKENS_DRAFTED,
    semconv.TOKENS_ACCEPTED,
    semconv.SEQUENCES,
    semconv.PREEMPTIONS,
    semconv.MEMORY_FREE_START,
    semconv.MEMORY_FREE_FIRST_TOKEN,
    semconv.MEMORY_FREE_END,
)


_VLLM_STAGE_KEYS = {
    semconv.SPAN_QUEUE: semconv.LATENCY_QUEUE,
    semconv.SPAN_PREFILL: semconv.LATENCY_PREFILL,
    semconv.SPAN_DECODE: semconv.LATENCY_DECODE,
}


def has_sampling_reason(decision: tail_sampler.Decision) -> bool:
    """Returns whether there was a reason to export this request's steps."""
    return decision.reason not in (semconv.KEEP_REASON_NONE, semconv.KEEP_REASON_UNSAMPLED)


def split_attributes(record: RequestRecord) -> tuple[Mapping[str, Value], SharedAttributes]:
    """Returns the recorded attributes of a request: of its request span, and of its server span."""
    keys, values = record.attributes.keys(), record.attributes.values()
    try:
        return _split_values(record.status_code, *keys, *values)
    except TypeError:  # user code set a list
        return _split_values.__wrapped__(record.status_code, *keys, *values)


@lru_cache(maxsize=256, typed=True)
def _split_values(status_code: int, *keys_and_values: Any) -> tuple[Mapping[str, Value], SharedAttributes]:
    """Splits attributes, given by all keys and then all values; the same objects for equal ones."""
    own: dict[str, Value] = {}
    http = SharedAttributes()
    half = len(keys_and_values) // 2
    for key, value in zip(keys_and_values[:half], keys_and_values[half:]):
        (http if key.startswith(_SERVER_PREFIXES) else own)[key] = value
    if status_code:
        http.setdefault(semconv.HTTP_RESPONSE_STATUS_CODE, status_code)
    return own, http


@lru_cache(maxsize=128)
def _intern_attributes(*values: Value) -> SharedAttributes:
    """Returns the non-empty values of `_STRING_KEYS`, as a shared object for equal values."""
    return SharedAttributes({key: value for key, value in zip(_STRING_KEYS, values) if value})


def string_attributes(record: RequestRecord, decision: tail_sampler.Decision) -> SharedAttributes:
    """Returns the attributes of a request that recur in other requests: strings and flags."""
    return _intern_attributes(
        record.operation,
        record.provider,
        record.model,
        record.finish_reasons,
        record.engine,
        record.failed_stage,
        record.error_type,
        decision.reason,
        decision.missed,
        decision.export and not record.sampled,
        record.telemetry_lost,
        record.start_ids is not None,
        record.breakdown.top_cause if record.breakdown is not None and record.operation else "",
        record.gpu_throttled,
    )


def count_attributes(record: RequestRecord, decision: tail_sampler.Decision) -> dict[str, Value]:
    """Returns the numeric attributes of a request. Token usage is on this span only."""
    counted = (
        record.max_tokens,
        record.input_tokens,
        record.output_tokens,
        record.cached_input_tokens,
        record.drafted_tokens,
        record.accepted_tokens,
        record.sequences if record.sequences > 1 else 0,
        record.preemptions,
        *record.memory_free,
    )
    attributes: dict[str, Value] = {}
    if any(counted):
        attributes = {key: count for key, count in zip(_COUNT_KEYS, counted) if count}
    if len(record.pauses) + len(record.loop_pauses) > MAX_PAUSES and has_sampling_reason(decision):
        attributes[semconv.PAUSES_DROPPED] = len(record.all_pauses) - MAX_PAUSES
    return attributes


def duration_attributes(record: RequestRecord) -> dict[str, float]:
    """Returns the durations of a request and the times of its causes, s."""
    durations = {semconv.TTFT: record.ttft_ns / 1e9} if record.ttft_ns else {}
    if record.breakdown is not None and record.operation:
        keys = semconv.LATENCY_BY_CAUSE
        for cause, length in record.breakdown.causes.items():
            durations[keys[cause]] = length / 1e9
    return durations


def step_count_attributes(record: RequestRecord, granted: int) -> dict[str, Value]:
    """Returns the counts of all decode steps, exported as spans or not."""
    summary = record.summary
    attributes: dict[str, Value] = {}
    if summary.steps:
        attributes[semconv.STEPS_COUNT] = summary.steps
        attributes[semconv.STEPS_SLOWEST_ID] = summary.slowest_step
        attributes[semconv.BATCH_SIZE_MAX] = summary.batch_size_max
        dropped = summary.steps - granted + record.steps_evicted
        if dropped > 0:
            attributes[semconv.STEPS_DROPPED] = dropped
    if record.discarded:
        attributes[semconv.STEPS_DISCARDED] = record.discarded
    return attributes


def step_duration_attributes(record: RequestRecord) -> dict[str, float]:
    """Returns the durations of all decode steps, s."""
    summary = record.summary
    if not summary.steps:
        return {}
    durations = {
        semconv.STEPS_SUM: summary.total / 1e9,
        semconv.STEPS_P50: summary.p50 / 1e9,
        semconv.STEPS_P95: summary.p95 / 1e9,
        semconv.STEPS_MAX: summary.longest / 1e9,
    }
    if summary.gaps:
        durations[semconv.ITL_MAX] = summary.gap_max / 1e9
    return durations


def vllm_attributes(record: RequestRecord) -> dict[str, float]:
    """Returns attributes of vLLM's request span (0.33 `OutputProcessor.do_tracing`), with its meaning; s."""
    durations = {semconv.LATENCY_E2E: record.duration_ns / 1e9}
    if record.ttft_ns:
        durations[semconv.LATENCY_TTFT] = record.ttft_ns / 1e9
    for name, started_at, ended_at, _ in record.stages:
        key = _VLLM_STAGE_KEYS.get(name)
        if key is not None and key not in durations:  # the first stage of this name
            durations[key] = (ended_at - started_at) / 1e9
    return durations
