"""What the spans of a request say: in words, which recur, in numbers, and in lengths (s)."""

from __future__ import annotations

from functools import lru_cache

from otel_infer import semconv
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.export.otlp import SharedAttributes
from otel_infer.export.sampling import tail_sampler
from otel_infer.ringbuffer.events import Value

MAX_PAUSES = 32
"""Events for pauses on one request; the longest are told."""
_SERVER_PREFIXES = ("http.", "url.", "server.", "client.", "network.", "user_agent.")
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


def has_sampling_reason(decision: tail_sampler.Decision) -> bool:
    """Whether there was a reason to keep this request's steps."""
    return decision.reason not in (semconv.KEEP_REASON_NONE, semconv.KEEP_REASON_UNSAMPLED)


def split_attributes(record: RequestRecord) -> tuple[dict[str, Value], dict[str, Value]]:
    """What was said of the request, and of what its server span is about."""
    own: dict[str, Value] = {}
    http: dict[str, Value] = {}
    for key, value in record.attributes.items():
        (http if key.startswith(_SERVER_PREFIXES) else own)[key] = value
    if record.status_code:
        http.setdefault(semconv.HTTP_RESPONSE_STATUS_CODE, record.status_code)
    return own, http


@lru_cache(maxsize=128)
def _intern_attributes(*values: Value) -> SharedAttributes:
    """Values of `_WORDS`, without those that say nothing."""
    return SharedAttributes({key: value for key, value in zip(_STRING_KEYS, values) if value})


def string_attributes(record: RequestRecord, decision: tail_sampler.Decision) -> SharedAttributes:
    """What is said of the request in words."""
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
    """What is said of the request in numbers; usage stands here only."""
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
    said: dict[str, Value] = {key: count for key, count in zip(_COUNT_KEYS, counted) if count}
    if len(record.pauses) + len(record.loop_pauses) > MAX_PAUSES and has_sampling_reason(decision):
        said[semconv.PAUSES_DROPPED] = len(record.all_pauses) - MAX_PAUSES
    return said


def duration_attributes(record: RequestRecord) -> dict[str, float]:
    """What is said of the request in s."""
    lengths = {semconv.TTFT: record.ttft_ns / 1e9} if record.ttft_ns else {}
    if record.breakdown is not None and record.operation:
        names = semconv.LATENCY_BY_CAUSE
        lengths.update([(names[cause], length / 1e9) for cause, length in record.breakdown.causes.items()])
    return lengths


def step_count_attributes(record: RequestRecord, granted: int) -> dict[str, Value]:
    """Counts of all steps, whichever of them are written as spans."""
    seen = record.summary
    attributes: dict[str, Value] = {}
    if seen.steps:
        attributes[semconv.STEPS_COUNT] = seen.steps
        attributes[semconv.STEPS_SLOWEST_ID] = seen.slowest_step
        attributes[semconv.BATCH_SIZE_MAX] = seen.batch_size_max
        left_out = seen.steps - granted + record.steps_evicted
        if left_out > 0:
            attributes[semconv.STEPS_DROPPED] = left_out
    if record.discarded:
        attributes[semconv.STEPS_DISCARDED] = record.discarded
    return attributes


def step_duration_attributes(record: RequestRecord) -> dict[str, float]:
    """Of all steps, s."""
    seen = record.summary
    if not seen.steps:
        return {}
    lengths = {
        semconv.STEPS_SUM: seen.total / 1e9,
        semconv.STEPS_P50: seen.p50 / 1e9,
        semconv.STEPS_P95: seen.p95 / 1e9,
        semconv.STEPS_MAX: seen.longest / 1e9,
    }
    if seen.gaps:
        lengths[semconv.ITL_MAX] = seen.gap_max / 1e9
    return lengths


def vllm_attributes(record: RequestRecord) -> dict[str, float]:
    """The attributes of vLLM's request span (0.33 `OutputProcessor.do_tracing`), with its meaning; s."""
    pairs = (
        (semconv.LATENCY_QUEUE, semconv.SPAN_QUEUE),
        (semconv.LATENCY_PREFILL, semconv.SPAN_PREFILL),
        (semconv.LATENCY_DECODE, semconv.SPAN_DECODE),
    )
    lengths = {semconv.LATENCY_E2E: record.duration_ns / 1e9}
    if record.ttft_ns:
        lengths[semconv.LATENCY_TTFT] = record.ttft_ns / 1e9
    for key, name in pairs:
        stage = record.find_stage(name)
        if stage is not None:
            lengths[key] = (stage.ended_at - stage.started_at) / 1e9
    return lengths
