"""The page on the attributes of spans, and which of them can contain personal data."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer.config import tenancy
from otel_infer.export.spans import attributes

NUMBER, NAME, ID, CALLER = (
    "number or fixed word",
    "name from your server",
    "id of the request",
    "from the caller",
)
"""Kinds of values, by what they can reveal."""
REQUEST_ATTRIBUTES = {
    semconv.OPERATION_NAME: (NAME, "`chat`, `text_completion`, `embeddings`, `inference`, or as given to `otel_infer.request`"),
    semconv.PROVIDER_NAME: (NUMBER, "the engine; `custom` for a hand-written server"),
    semconv.REQUEST_MODEL: (NAME, "the served model: a hub id, or the last component of a path"),
    semconv.RESPONSE_ID: (ID, "the id in the response (`chatcmpl-…`). The caller can choose it with `X-Request-Id`: see [privacy](../operate/privacy.md)"),
    semconv.REQUEST_ID: (ID, "the id in the engine. The caller can choose it as above"),
    semconv.RESPONSE_FINISH_REASONS: (NUMBER, "why each sequence ended, in the engine's words"),
    semconv.REQUEST_MAX_TOKENS: (NUMBER, "limit of output tokens"),
    semconv.USAGE_INPUT_TOKENS: (NUMBER, "prompt tokens"),
    semconv.USAGE_OUTPUT_TOKENS: (NUMBER, "output tokens"),
    semconv.USAGE_CACHE_READ: (NUMBER, "prompt tokens that the prefix cache had"),
    semconv.SEQUENCES: (NUMBER, "sequences, if more than one"),
    semconv.BATCH_REQUESTS: (NUMBER, "requests in the batch that a worker put together"),
    semconv.PREEMPTIONS: (NUMBER, "preemptions"),
    semconv.TOKENS_DRAFTED: (NUMBER, "draft tokens (speculative decoding)"),
    semconv.TOKENS_ACCEPTED: (NUMBER, "accepted draft tokens"),
    semconv.TTFT: (NUMBER, "s from arrival to the first token"),
    semconv.ERROR_TYPE: (NAME, "HTTP status, the type of an exception, `client_disconnect`, `timeout`, `cancelled` or `process_died`; never a message"),
    semconv.FAILED_STAGE: (NAME, "the stage in which the request ended"),
    semconv.ENGINE: (NUMBER, "the engine that computed it"),
    semconv.KEEP_REASON: (NUMBER, "why its steps were exported; [the values](#keep-reasons)"),
    semconv.SLO_MISSED: (NUMBER, "the objectives of `OTEL_INFER_SLO` that it missed"),
    semconv.LATENCY_TOP_CAUSE: (NUMBER, "the cause with the largest share"),
    semconv.UNSAMPLED: (NUMBER, "true: exported although the context is not sampled"),
    semconv.TELEMETRY_LOST: (NUMBER, "true: events of this request are missing"),
    semconv.FIRST_REQUEST: (NUMBER, "true: the first request after a start"),
    semconv.THROTTLE_REASON: (NUMBER, "why GPU clocks were throttled during the request"),
    semconv.PAUSES_DROPPED: (NUMBER, f"pauses beyond the {attributes.MAX_PAUSES} longest"),
    semconv.MEMORY_FREE_START: (NUMBER, "free bytes of the device at arrival"),
    semconv.MEMORY_FREE_FIRST_TOKEN: (NUMBER, "the same at the first token"),
    semconv.MEMORY_FREE_END: (NUMBER, "the same at the end"),
    semconv.TENANT: (CALLER, "the tenant; only with `OTEL_INFER_TENANT`, and a hash with `OTEL_INFER_TENANT_HASH_KEY`"),
    semconv.TRAFFIC_CLASS: (CALLER, "`interactive` or `batch`; only with `OTEL_INFER_TRAFFIC_CLASS`"),
    **{name: (NUMBER, f"s: {semconv.describe_cause(cause)}") for cause, name in semconv.LATENCY_BY_CAUSE.items()},
    **dict.fromkeys((semconv.LATENCY_QUEUE, semconv.LATENCY_TTFT, semconv.LATENCY_E2E, semconv.LATENCY_PREFILL, semconv.LATENCY_DECODE), (NUMBER, "s, with vLLM's meaning; only with `OTEL_INFER_LATENCY_ATTRIBUTES`")),
}  # fmt: skip
"""Of the request span: what a value reveals, and its meaning."""
SERVER_ATTRIBUTES = {
    semconv.HTTP_REQUEST_METHOD: (NUMBER, "the method, or `_OTHER`"),
    semconv.URL_SCHEME: (NUMBER, "`http` or `https`"),
    semconv.HTTP_ROUTE: (NAME, "the template of the route"),
    semconv.URL_PATH: (NAME, "only where it is the route: a route with parameters has the client's text in its path"),
    semconv.SERVER_ADDRESS: (NAME, "the address on which the server received the request; the name that a WSGI server states"),
    semconv.SERVER_PORT: (NUMBER, "its port"),
    semconv.HTTP_RESPONSE_STATUS_CODE: (NUMBER, "the status"),
    semconv.ERROR_TYPE: (NAME, "as on the request span"),
}  # fmt: skip
STAGE_ATTRIBUTES = {
    semconv.QUEUE_HIDDEN: ("`queue`", "s until the scheduler received the request"),
    semconv.QUEUE_SCHEDULER: ("`queue`", "s in the scheduler's queue"),
    semconv.KV_UTILIZATION_START: ("`prefill`, `decode`", "KV cache in use, 0 to 1, at the first step; of `decode` at the step after the first token"),
    semconv.KV_UTILIZATION_END: ("`decode`", "the same at the last step"),
    semconv.KV_SIZE: ("`prefill`, `decode`", "bytes of a KV cache that only this request uses"),
    semconv.STEPS_COUNT: ("`decode`", "decode steps of the request"),
    semconv.STEPS_SUM: ("`decode`", "s, sum of all steps"),
    semconv.STEPS_P50: ("`decode`", "s, median of the steps"),
    semconv.STEPS_P95: ("`decode`", "s, 95th percentile of the steps"),
    semconv.STEPS_MAX: ("`decode`", "s, longest step"),
    semconv.STEPS_SLOWEST_ID: ("`decode`", "id of the longest step"),
    semconv.STEPS_DISCARDED: ("`decode`", "steps whose result the engine discarded"),
    semconv.STEPS_DROPPED: ("`decode`", "steps without a span"),
    semconv.ITL_MAX: ("`decode`", "s, longest gap between tokens"),
    semconv.BATCH_SIZE_MAX: ("`decode`", "largest batch"),
    semconv.STEP_ID: ("a step", "number of the step in its engine; the same on all requests of the batch"),
    semconv.BATCH_SIZE: ("a step", "sequences in the batch"),
    semconv.STEP_TOKENS: ("a step", "tokens of this request; absent if 1"),
    semconv.INTERFERENCE_PREFILL_TOKENS: ("`decode step`", "prompt tokens of other requests in the step"),
    semconv.DEVICE_SPAN: ("`decode step`", "ns on the device"),
    semconv.SEND_WAIT: ("`postprocess`", "s that the server waited for the client's socket"),
    semconv.DETOKENIZE_DURATION: ("`postprocess`", "s of detokenization of the whole request; of a stream estimated from its first tokens"),
    semconv.RESPONSE_CHUNKS: ("`postprocess`", "chunks of the response body; not of a stream on uvicorn or hypercorn, whose chunks pass uncounted"),
    semconv.ITEMS: ("`tokenize`, `forward`", "of `tokenize`: tokens; of `forward`: inputs in the batch"),
    semconv.CLOCK: ("`h2d`, `forward`, `d2h`", "`host`: the clock of the span's times"),
    semconv.TRANSFER_SIZE: ("`h2d`, `d2h`", "bytes"),
    semconv.TRANSFER_PINNED: ("`h2d`, `d2h`", "whether the host memory was page-locked"),
    semconv.DEVICE_METHOD: ("a stage", "`event` or `host`"),
    semconv.DEVICE_STEPS: ("a stage", "steps that were timed"),
    semconv.DEVICE_STEPS_ALL: ("a stage", "all its steps"),
    semconv.DEVICE_DURATION: ("a stage", "s on the device"),
    semconv.DEVICE_LAUNCH: ("a stage", "s of launching"),
    semconv.DEVICE_QUEUE: ("a stage", "s between launch and execution"),
    semconv.DEVICE_GAP: ("a stage", "s in which the device was idle before a step"),
    semconv.DEVICE_BOTTLENECK: ("a stage", "what limited the device"),
    semconv.DEVICE_CLOCK_ERROR: ("a stage", "s, bound of the error of any of its instants"),
    semconv.DEVICE_SHARE: ("a stage", "s of the duration that are attributed to this request"),
    semconv.DEVICE_SHARE_METHOD: ("a stage", "`tokens`"),
    semconv.PAUSE_CAUSE: (f"`{semconv.EVENT_PAUSE}`", "the cause"),
    semconv.PAUSE_DURATION: (f"`{semconv.EVENT_PAUSE}`", "s during the request"),
    semconv.MARK_NAME: (f"`{semconv.EVENT_MARK}`", "what happened"),
    semconv.MARK_COUNT: (f"`{semconv.EVENT_MARK}`", "how often"),
    semconv.MARK_WINDOW: (f"`{semconv.EVENT_MARK}`", "s before the event in which it happened"),
    semconv.MEMORY_WANTED: (f"`{semconv.EVENT_OUT_OF_MEMORY}`", "bytes that were requested"),
    semconv.MEMORY_LIMIT: (f"`{semconv.EVENT_OUT_OF_MEMORY}`", "bytes of the device, or the limit that torch has"),
    semconv.MEMORY_FREE: (f"`{semconv.EVENT_OUT_OF_MEMORY}`", "bytes that were free"),
    semconv.INTERFERENCE_DELAY: ("a link", "s of delay by the linked request, which delayed this one most"),
    semconv.INTERFERENCE_CLASS: ("a link", f"traffic class of the linked request; without one, its prompt size: `{tenancy.SHORT}`, `{tenancy.MEDIUM}` (from {tenancy.MEDIUM_MIN_TOKENS} tokens) or `{tenancy.LONG}` (from {tenancy.LONG_MIN_TOKENS})"),
}  # fmt: skip
"""Of spans below the request, events and links: where, and its meaning. All are numbers or fixed words."""
KEEP_REASONS = {
    semconv.KEEP_REASON_ERROR: "the request failed",
    semconv.KEEP_REASON_ABORTED: "its client disconnected or cancelled it, or it timed out",
    semconv.KEEP_REASON_PREEMPTED: "it was preempted",
    semconv.KEEP_REASON_SLO: "it missed an objective of `OTEL_INFER_SLO`",
    semconv.KEEP_REASON_SLOW: "it is among the slowest of its size (`OTEL_INFER_SLOW_PERCENT`)",
    semconv.KEEP_REASON_INTERFERER: "it delayed one of the above most",
    semconv.KEEP_REASON_BASELINE: "an ordinary request, exported for comparison while the budget is short",
    semconv.KEEP_REASON_SAMPLED: "an ordinary request within the budget; the sampler is a ratio",
    semconv.KEEP_REASON_ALL: "an ordinary request with `OTEL_INFER_STEPS=all`",
    semconv.KEEP_REASON_BUDGET: "an ordinary request within the budget",
    semconv.KEEP_REASON_NONE: "exported without its steps",
    semconv.KEEP_REASON_UNSAMPLED: "not exported; a value of the metric only",
}  # fmt: skip


def build_attributes_page() -> str:
    """docs/reference/attributes.md."""
    _check_attributes_complete()
    return "\n".join([
        "# Attributes\n",
        "These are all attributes that otel_infer sets on spans. The column *reveals* helps with a privacy review.",
        "Attributes of metrics are in [spans and metrics](telemetry.md#metrics).\n",
        "| reveals | values |",
        "|---|---|",
        f"| {NUMBER} | a measurement, a flag, or a word from a list in the code |",
        f"| {NAME} | chosen by the operator or the code: a model, a route template, an exception type |",
        f"| {ID} | identifies one request |",
        f"| {CALLER} | text of the caller, only if you configure it |\n",
        "Attributes and events that *your* code sets on the request span are exported as you set them.",
        "`OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT` and `OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT` apply to them.\n",
        "## Request span\n",
        "| attribute | reveals | meaning |", "|---|---|---|",
        *(f"| `{name}` | {reveals} | {meaning} |" for name, (reveals, meaning) in REQUEST_ATTRIBUTES.items()),
        "\n## Keep reasons\n",
        f"`{semconv.KEEP_REASON}` on the request span and on metrics has one of these values.",
        "[Which steps are exported](../read-a-trace.md#which-steps-are-exported) explains them.\n",
        "| value | meaning |", "|---|---|",
        *(f"| `{reason}` | {KEEP_REASONS[reason]} |" for reason in semconv.KEEP_REASONS),
        "\n## Server span\n",
        "Another HTTP instrumentation may make this span. Its attributes are then the attributes of that instrumentation.\n",
        "| attribute | reveals | meaning |", "|---|---|---|",
        *(f"| `{name}` | {reveals} | {meaning} |" for name, (reveals, meaning) in SERVER_ATTRIBUTES.items()),
        "\n## Stages, steps, events and links\n",
        f"All of these are a {NUMBER}. Durations are in seconds unless the table says otherwise.\n",
        "| attribute | on | meaning |", "|---|---|---|",
        *(f"| `{name}` | {place} | {meaning} |" for name, (place, meaning) in STAGE_ATTRIBUTES.items()),
        "",
    ])  # fmt: skip


def _check_attributes_complete() -> None:
    """Raises ValueError if the exporter sets an attribute on the request span that the page does not list."""
    exported = {
        *attributes._STRING_KEYS,
        *attributes._COUNT_KEYS,
        *semconv.LATENCY_BY_CAUSE.values(),
        semconv.TTFT,
    }
    missing = sorted(exported - REQUEST_ATTRIBUTES.keys())
    if missing:
        raise ValueError(f"attributes of the request span without a description: {', '.join(missing)}")
