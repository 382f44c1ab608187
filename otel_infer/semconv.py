"""Every span, attribute and metric name on the wire, once, with unit, buckets and meaning.

Names of the OpenTelemetry conventions are used as they are (semantic-conventions v1.44 for `http.*`, `error.*`, `hw.*`,
`server.*`; semantic-conventions-genai for `gen_ai.*`, all of it in development). What no convention has is ours, under
`infer.*`. Dashboards, alerts, docs and tests take names from here. Long, since it is one table.
"""

from __future__ import annotations

from typing import NamedTuple

SCOPE = "otel_infer"
SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"

# ── span names ───────────────────────────────────────────────────────────────────────────────────────────────────
SPAN_INGRESS = "ingress"
SPAN_TOKENIZE = "tokenize"
SPAN_QUEUE = "queue"
SPAN_FETCH_MEDIA = "fetch media"
SPAN_PREPARE_MEDIA = "prepare media"
SPAN_GRAMMAR = "grammar"
SPAN_KV_TRANSFER = "kv transfer"
SPAN_H2D = "h2d"
SPAN_PREFILL = "prefill"
SPAN_PREFILL_STEP = "prefill step"
SPAN_DECODE = "decode"
SPAN_DECODE_STEP = "decode step"
SPAN_D2H = "d2h"
SPAN_FORWARD = "forward"
SPAN_POSTPROCESS = "postprocess"
SPAN_DOCTOR = "otel_infer doctor"
EVENT_PAUSE = "infer.pause"
"""On the request span: something held up the whole process while the request was there."""
EVENT_MARK = "infer.mark"
"""On the request span: something happened to the process, maybe while the request was there; for how long is not known."""
EVENT_OUT_OF_MEMORY = "infer.out_of_memory"
"""On the request span: a device had no room for what the request asked for; bytes wanted, free, and in all."""
SPAN_START = "server start"
"""A trace of its own for each server, with those of its engine and workers in it, from its beginning until it was ready."""
SPAN_PART_START = {"engine": "engine start", "worker": "worker start"}
"""By role: processes that a server starts; their spans are below the server's."""
SPAN_IMPORTS = "imports"
SPAN_WEIGHTS = "weights"
SPAN_WARM_UP = "warm-up"
SPAN_COMPILE = "compile"
SPAN_CAPTURE = "capture"
SPAN_READY = "ready"
PHASES = {
    SPAN_IMPORTS: "process began → the last library that was waited for was imported",
    SPAN_WEIGHTS: "a model was loaded, from wherever its weights lay",
    SPAN_WARM_UP: "an engine tried its model: with compilation and captures, where it does that",
    SPAN_COMPILE: "torch compiled, for a warm-up",
    SPAN_CAPTURE: "CUDA graphs were captured, for a warm-up",
    SPAN_READY: "the application's own startup: its lifespan until it said that it takes requests, or the start of its engine",
}
"""The phases of a start, in the order in which they mostly happen; they may lie in one another."""
STARTUP_PAUSES = (SPAN_COMPILE, SPAN_CAPTURE)
"""Pauses that are phases of a start."""
STARTUP_TOTAL = "total"
"""In place of a phase: the whole start."""
EVENT_IMPORTED = "infer.imported"
"""On the imports: a library was there."""
SPAN_HTTP = "HTTP"
STAGE_DETOKENIZE = "detokenize"
"""No span: a part of postprocess, and a stage to the metrics."""
STAGES_INSIDE = (SPAN_FETCH_MEDIA, SPAN_PREPARE_MEDIA, SPAN_GRAMMAR, SPAN_KV_TRANSFER, STAGE_DETOKENIZE)
"""Those that lie in others: tokenize, queue, postprocess."""
STAGES = (
    SPAN_INGRESS,
    SPAN_TOKENIZE,
    SPAN_QUEUE,
    SPAN_H2D,
    SPAN_PREFILL,
    SPAN_DECODE,
    SPAN_FORWARD,
    SPAN_D2H,
    SPAN_POSTPROCESS,
)
"""The built-in stages of a request, in the order in which they happen."""
DEVICE_STAGES = (SPAN_H2D, SPAN_FORWARD, SPAN_D2H)
"""Those that mean the device, so that it must be said by whose clock they were timed."""

# ── causes: where the time of a request went ─────────────────────────────────────────────────────────────────────
CAUSE_INGRESS = "ingress"
CAUSE_TOKENIZE = "tokenize"
CAUSE_MEDIA = "media"
CAUSE_HIDDEN_QUEUE = "hidden_queue"
CAUSE_SCHEDULER_QUEUE = "scheduler_queue"
CAUSE_GRAMMAR = "grammar"
CAUSE_KV_TRANSFER = "kv_transfer"
CAUSE_PREFILL = "prefill"
CAUSE_DECODE = "decode"
CAUSE_BATCHING = "batching"
CAUSE_INTERFERENCE = "interference"
CAUSE_PREEMPTION = "preemption"
CAUSE_HOST = "host_bubble"
CAUSE_TRANSFER = "transfer"
CAUSE_APPLICATION = "application"
CAUSE_DETOKENIZE = "detokenize"
CAUSE_EGRESS = "egress"
CAUSE_GC = "gc"
CAUSE_COMPILE = "compile"
CAUSE_CAPTURE = "capture"
CAUSE_EVENT_LOOP = "event_loop"
CAUSE_FIRST_USE = "first_use"
CAUSE_THROTTLED = "throttled"
CAUSE_GPU_THROTTLED = "gpu_throttled"
CAUSE_STARVED = "starved"
CAUSE_FAULTS = "page_faults"
CAUSE_BLOCKED = "blocked"
CAUSE_PAUSE = "pause"
CAUSE_UNEXPLAINED = "unexplained"
PAUSE_CAUSES = (CAUSE_GC, CAUSE_COMPILE, CAUSE_CAPTURE, CAUSE_THROTTLED)
"""Those that hold up a whole process; any other such cause is a `pause`."""
LOOP_CAUSES = (CAUSE_EVENT_LOOP,)
"""Those that hold up the event loop alone: the engine, on a thread of its own, goes on."""
CAUSES: dict[str, str] = {
    CAUSE_INGRESS: "first byte in to handed over to the engine",
    CAUSE_TOKENIZE: "text to tokens",
    CAUSE_MEDIA: "images, audio and video of its prompt: fetched, and made into the model's input",
    CAUSE_HIDDEN_QUEUE: "handed over, not yet seen by the scheduler",
    CAUSE_SCHEDULER_QUEUE: "waiting for the scheduler to take it up",
    CAUSE_GRAMMAR: "not to be scheduled before the grammar of its structured output was compiled",
    CAUSE_KV_TRANSFER: "not to be scheduled before its KV blocks had come from elsewhere",
    CAUSE_PREFILL: "its own prompt",
    CAUSE_DECODE: "its own tokens: what its steps would have cost alone",
    CAUSE_BATCHING: "what the tokens of the sequences beside it added to its steps",
    CAUSE_INTERFERENCE: "what the prompts of other requests added to its steps, and steps it was left out of",
    CAUSE_PREEMPTION: "put back, waited, and computed again",
    CAUSE_HOST: "between two steps of the engine; where a device is timed, all the time it had nothing to do in between",
    CAUSE_TRANSFER: "to and from the device",
    CAUSE_APPLICATION: "stages the application named itself, and the time between two generations of one request",
    CAUSE_DETOKENIZE: "tokens to text, after the last token",
    CAUSE_EGRESS: "last token to last byte handed over",
    CAUSE_GC: "garbage collection",
    CAUSE_COMPILE: "torch compiling",
    CAUSE_CAPTURE: "torch capturing a CUDA graph",
    CAUSE_FIRST_USE: "what a step took longer since it was the first of its engine, or of its size",
    CAUSE_EVENT_LOOP: "the event loop was kept from going on: by a call that blocks it, or for want of a core or of the GIL",
    CAUSE_THROTTLED: "the CPU quota was used up",
    CAUSE_GPU_THROTTLED: "what steps took longer while a GPU's clocks were held down",
    CAUSE_STARVED: "the engine's thread could have run and had no CPU",
    CAUSE_FAULTS: "the kernel mapped memory to the engine's thread, page by page",
    CAUSE_BLOCKED: "the engine's thread waited, for a lock, the GIL, a disk or the device",
    CAUSE_PAUSE: "something else that held up the process",
    CAUSE_UNEXPLAINED: "nobody saw",
}

# ── conventions ──────────────────────────────────────────────────────────────────────────────────────────────────
OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"
REQUEST_STREAM = "gen_ai.request.stream"
USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
USAGE_CACHE_READ = "gen_ai.usage.cache_read.input_tokens"
TOKEN_TYPE = "gen_ai.token.type"
TOKEN_INPUT, TOKEN_OUTPUT = "input", "output"
ERROR_TYPE = "error.type"
HTTP_REQUEST_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_RESPONSE_STATUS_CODE = "http.response.status_code"
URL_SCHEME = "url.scheme"
URL_FULL = "url.full"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"
SERVICE_NAME = "service.name"
SERVICE_INSTANCE_ID = "service.instance.id"
PROCESS_PID = "process.pid"

HW_ID, HW_NAME, HW_TYPE, HW_PARENT = "hw.id", "hw.name", "hw.type", "hw.parent"
HW_MODEL, HW_VENDOR, HW_DRIVER_VERSION = "hw.model", "hw.vendor", "hw.driver_version"
GPU_TASK = "hw.gpu.task"
GPU_COUNT, GPU_MODELS, GPU_DRIVER = "infer.gpu.count", "infer.gpu.models", "infer.gpu.driver_version"
"""On a resource."""

OPERATION_CHAT = "chat"
OPERATION_TEXT_COMPLETION = "text_completion"
OPERATION_GENERATE = "generate_content"
OPERATION_EMBEDDINGS = "embeddings"
OPERATION_INFERENCE = "inference"
OTHER = "_OTHER"
CLOCK_HOST, CLOCK_DEVICE = "host", "device"
STEP_PREFILL, STEP_DECODE, STEP_MIXED = "prefill", "decode", "mixed"
METRIC_OVERFLOW = "otel.metric.overflow"
"""Attribute of the series that stands for those past the limit (metrics SDK specification)."""
UNKNOWN_SERVICE = "unknown_service:python"

ERROR_CLIENT_DISCONNECT = "client_disconnect"
ERROR_TIMEOUT = "timeout"
ERROR_PROCESS_DIED = "process_died"
ERROR_CANCELLED = "cancelled"
NOT_ERRORS = ("", ERROR_CLIENT_DISCONNECT, ERROR_CANCELLED)
"""What is no fault of the server."""

# Compatibility: names that vLLM and SGLang put on their request span, with vLLM's meaning. Off by default.
LATENCY_QUEUE = "gen_ai.latency.time_in_queue"
LATENCY_TTFT = "gen_ai.latency.time_to_first_token"
LATENCY_E2E = "gen_ai.latency.e2e"
LATENCY_PREFILL = "gen_ai.latency.time_in_model_prefill"
LATENCY_DECODE = "gen_ai.latency.time_in_model_decode"

# ── ours: attributes ─────────────────────────────────────────────────────────────────────────────────────────────
STAGE = "infer.stage"
CLOCK = "infer.clock"
KEEP_REASON = "infer.keep.reason"
SLO_MISSED = "infer.slo.missed"
MISSED_NONE, MISSED_ERROR = "none", "error"
"""In place of objectives, on a metric: all were met; it failed."""
BLAME_PREFIX = "infer.blame."
BLAME = {cause: BLAME_PREFIX + cause for cause in CAUSES}
"""The attribute of each cause: its time in s. They sum to the duration."""
BLAME_CAUSE = "infer.blame.cause"
BLAME_TOP = "infer.blame.top"
OFFENDER_DELAY = "infer.offender.delay"
"""On the link to the request whose prompt held this one up most: for how long, s."""
OFFENDER_CLASS, VICTIM_CLASS = "infer.offender.class", "infer.victim.class"
"""The traffic class where one was said, else the size of the prompt."""
TENANT = "infer.tenant"
TRAFFIC_CLASS = "infer.traffic.class"
REQUEST_ID = "infer.request.id"
WAIT_REASON = "infer.wait.reason"
REQUEST_STATE = "infer.request.state"
STATE_QUEUED, STATE_RUNNING = "queued", "running"
DIED_IN = "infer.died_in"
UNSAMPLED = "infer.unsampled"
TELEMETRY_LOST = "infer.telemetry.lost"
TTFT = "infer.time_to_first_token"
SEQUENCES = "infer.sequences"
PREEMPTIONS = "infer.preemptions"
TOKENS_DRAFTED = "infer.speculative.drafted"
TOKENS_ACCEPTED = "infer.speculative.accepted"
QUEUE_HIDDEN = "infer.queue.hidden"
QUEUE_SCHEDULER = "infer.queue.scheduler"
SEND_WAIT = "infer.send.wait"
DETOKENIZE = "infer.detokenize"
RESPONSE_STARTED = "infer.response.started"
CHUNKS = "infer.response.chunks"
ITEMS = "infer.items"
STEP_ID = "infer.step.id"
STEP_KIND = "infer.step.kind"
STEP_TOKENS = "infer.step.tokens"
BATCH_SIZE = "infer.batch.size"
OTHERS_PREFILL_TOKENS = "infer.others.prefill.tokens"
STEPS_COUNT = "infer.steps.count"
STEPS_SUM = "infer.steps.duration.sum"
STEPS_P50 = "infer.steps.duration.p50"
STEPS_P95 = "infer.steps.duration.p95"
STEPS_MAX = "infer.steps.duration.max"
STEPS_SLOWEST = "infer.steps.slowest.id"
STEPS_DISCARDED = "infer.steps.discarded"
STEPS_LEFT_OUT = "infer.steps.left_out"
ITL_MAX = "infer.inter_token_latency.max"
BATCH_SIZE_MAX = "infer.batch.size.max"
KV_UTILIZATION_START = "infer.kv_cache.utilization.start"
KV_UTILIZATION_END = "infer.kv_cache.utilization.end"
"""Of its engine, when a step was scheduled: on `prefill` its first; on `decode` the one after its first token, and its last."""
KV_SIZE = "infer.kv_cache.size"
"""On `prefill` and `decode`: bytes of a KV cache that is this request's alone, when the stage ended."""
DEVICE_METHOD = "infer.device.method"
"""`event`: by marks on the device's streams; `host`: by the host's clock, from before it launched until it had."""
DEVICE_STEPS = "infer.device.steps"
DEVICE_STEPS_ALL = "infer.device.steps.all"
"""On a stage: how many of its steps were timed, of how many."""
DEVICE_DURATION = "infer.device.duration"
DEVICE_SPAN = "infer.device.span"
"""On a decode step: from mark to mark, ns."""
DEVICE_SHARE = "infer.device.share"
"""On a stage: its request's part of the duration, an estimate by tokens; with all others' and what nobody got, it is the whole."""
DEVICE_SHARE_METHOD = "infer.device.share.method"
MEMORY_FREE_START = "infer.device.memory.free.start"
MEMORY_FREE_FIRST_TOKEN = "infer.device.memory.free.first_token"
MEMORY_FREE_END = "infer.device.memory.free.end"
"""Bytes of the device that had least, as of the second before the request came, had its first token, and ended."""
TRANSFER_SIZE, TRANSFER_PINNED = "infer.transfer.size", "infer.transfer.pinned"
"""On `h2d` and `d2h`: bytes, and whether the host's side of them was page-locked, without which the host waits for the copy."""
MEMORY_WANTED, MEMORY_LIMIT = "infer.device.memory.wanted", "infer.device.memory.limit"
MEMORY_FREE = "infer.device.memory.free"
MEMORY_KIND = "infer.device.memory.kind"
MEMORY_KINDS = ("allocated", "reserved", "active", "inactive_split", "private_pools", "outside", "free")
DEVICE_LAUNCH = "infer.device.launch"
DEVICE_QUEUE = "infer.device.queue"
DEVICE_GAP = "infer.device.gap"
DEVICE_ERROR = "infer.device.error"
DEVICE_LIMIT = "infer.device.limit"
PAUSE_CAUSE = "infer.pause.cause"
PAUSE_DURATION = "infer.pause.duration"
MARK = "infer.mark.name"
MARK_EVICTION = "kv_eviction"
MARK_EMPTY, MARK_DUMMY = "empty_step", "dummy_batch"
MARK_NAMES = ("allocator_retry", "allocator_oom", MARK_EMPTY, MARK_DUMMY)
MARK_COUNT = "infer.mark.count"
MARK_WINDOW = "infer.mark.window"
"""How long before the event it may have been, s."""
PAUSES_LEFT_OUT = "infer.pauses.left_out"
READY_BY = "infer.ready.by"
MODULE = "infer.module"
PHASES_LEFT_OUT = "infer.phases.left_out"
STARTUP_PHASE = "infer.startup.phase"
FIRST_REQUEST = "infer.request.first"
THROTTLE_REASON = "infer.gpu.throttle.reason"
"""On a request, with commas: why clocks were held down when it came or while it was there."""
GPU_UNIT = "infer.gpu.unit"
ENGINE = "infer.engine"
PROCESS_ROLE = "infer.process.role"
WORKER_RANK = "infer.worker.rank"
INTEGRATION = "infer.integration"
HOOK_STATE = "infer.hook.state"
HOOK_ACTIVE, HOOK_MISSING = "active", "missing"
LOSS_REASON = "infer.loss.reason"
LOSS_OVER_BUDGET = "steps_over_budget"
"""No loss of a request: step spans that there was no room for."""
CPU_MODE = "cpu.mode"
DOCTOR = "infer.doctor"
CLIENT_HEADERS = "infer.client.time_to_headers"
CLIENT_FIRST_BYTE = "infer.client.time_to_first_byte"
CLIENT_FIRST_TOKEN = "infer.client.time_to_first_token"
CLIENT_ITL_MAX = "infer.client.inter_token_latency.max"
CLIENT_ITL_MEAN = "infer.client.inter_token_latency.mean"
CLIENT_CHUNKS = "infer.client.chunks"
CLIENT_SERVER = "infer.client.server.duration"
CLIENT_NETWORK = "infer.client.network.duration"
CLIENT_CLOSED_EARLY = "infer.client.closed_early"

# ── metrics ──────────────────────────────────────────────────────────────────────────────────────────────────────
# A superset of the recommended bounds that resolves 1 ms between tokens and 60 s to the first one.
DURATION_BOUNDS = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84, 327.68,
)  # fmt: skip
TTFT_BOUNDS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.35, 0.5, 0.75, 1.0,
    1.5, 2.5, 3.5, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0,
)  # fmt: skip
TPOT_BOUNDS = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2,
    0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
)  # fmt: skip
STAGE_BOUNDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75,
    1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
BATCH_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)

HISTOGRAM, COUNTER, UP_DOWN, GAUGE = "histogram", "counter", "updowncounter", "gauge"


class Metric(NamedTuple):
    """One metric on the wire. `bounds` only for histograms; `attributes` are all that it may carry."""

    name: str
    instrument: str
    unit: str
    description: str
    attributes: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


_REQUEST = (OPERATION_NAME, PROVIDER_NAME, REQUEST_MODEL)
_ENGINE = (ENGINE, PROCESS_PID)
_CALLER = (TENANT, TRAFFIC_CLASS)
"""Only where it is configured how to find them."""

REQUEST_DURATION = Metric(
    "gen_ai.server.request.duration",
    HISTOGRAM,
    "s",
    "Arrival to last byte, every request; failed and aborted ones carry error.type.",
    (*_REQUEST, ERROR_TYPE, *_CALLER),
    DURATION_BOUNDS,
)
TIME_TO_FIRST_TOKEN = Metric(
    "gen_ai.server.time_to_first_token",
    HISTOGRAM,
    "s",
    "Arrival to first token, as near the reader as the server sees; successful requests only.",
    (*_REQUEST, *_CALLER),
    TTFT_BOUNDS,
)
TIME_PER_OUTPUT_TOKEN = Metric(
    "gen_ai.server.time_per_output_token",
    HISTOGRAM,
    "s",
    "(last token - first token) / (tokens - 1), one value per successful request.",
    (*_REQUEST, *_CALLER),
    TPOT_BOUNDS,
)
INTER_TOKEN_LATENCY = Metric(
    "infer.inter_token_latency",
    HISTOGRAM,
    "s",
    "Time between two steps that delivered tokens to one request, one value per gap.",
    (*_REQUEST, *_CALLER),
    TPOT_BOUNDS,
)
STAGE_DURATION = Metric(
    "infer.stage.duration",
    HISTOGRAM,
    "s",
    "Time of a request in one stage.",
    (STAGE, CLOCK, *_REQUEST),
    STAGE_BOUNDS,
)
BLAME_DURATION = Metric(
    "infer.blame.duration",
    COUNTER,
    "s",
    "Time of finished requests by what it went into; the causes of a request sum to its duration.",
    (BLAME_CAUSE, *_REQUEST, *_CALLER),
)
INTERFERENCE_DURATION = Metric(
    "infer.interference.duration",
    COUNTER,
    "s",
    "Time that prompts of other requests (offender) took from finished ones (victim), by the class of each: interactive, "
    "batch, else by prompt: short (under 256 tokens), medium, long (from 2048), unknown; in sum, the cause interference.",
    (OFFENDER_CLASS, VICTIM_CLASS),
)
BLAME_SLOW_DURATION = Metric(
    "infer.blame.slow.duration",
    COUNTER,
    "s",
    "The part of infer.blame.duration that is of slow requests: those that missed an objective (OTEL_INFER_SLO), or are among "
    "the slowest of their size (OTEL_INFER_SLOW_PERCENT).",
    (BLAME_CAUSE, *_REQUEST, *_CALLER),
)
REQUEST_OBJECTIVES = Metric(
    "infer.request.objectives",
    COUNTER,
    "{request}",
    "Where OTEL_INFER_SLO is set, requests by what they missed of it: `none`, names of objectives, or `error`; not those "
    "that their client had stopped before they had a token, or missed anything.",
    (SLO_MISSED, *_REQUEST, *_CALLER),
)
REQUEST_ABANDONED = Metric(
    "infer.request.abandoned",
    HISTOGRAM,
    "s",
    "How long an aborted request had waited, by the stage it was in; without error.type its client had it stopped.",
    (STAGE, ERROR_TYPE, *_REQUEST, *_CALLER),
    STAGE_BOUNDS,
)
REQUEST_KEPT = Metric(
    "infer.request.kept",
    COUNTER,
    "{request}",
    "Requests whose decode steps were kept, by reason; `none`: without them, `unsampled`: not exported.",
    (KEEP_REASON,),
)
REQUEST_ACTIVE = Metric(
    "infer.request.active",
    UP_DOWN,
    "{request}",
    "Requests in flight: queued (no engine has taken them up yet) or running, as all are where there is no engine.",
    (REQUEST_STATE,),
)
ENGINE_WAITING = Metric(
    "infer.engine.waiting",
    UP_DOWN,
    "{request}",
    "Requests that an engine's scheduler knows and has not scheduled, by what they wait for: room in the batch or in the KV "
    "cache (capacity); to be allowed at all: a grammar that is compiled (grammar), KV blocks that come from elsewhere "
    "(kv_transfer), more of their prompt (input), something else (other).",
    (WAIT_REASON,),
)
TOKENS = Metric(
    "infer.request.tokens",
    COUNTER,
    "{token}",
    "Tokens of finished requests: of their prompts (input) and made for them (output).",
    (TOKEN_TYPE, *_REQUEST, *_CALLER),
)
DRAFTED = Metric(
    "infer.speculative.tokens.drafted",
    COUNTER,
    "{token}",
    "Tokens guessed ahead for finished requests (speculative decoding).",
    _REQUEST,
)
ACCEPTED = Metric(
    "infer.speculative.tokens.accepted",
    COUNTER,
    "{token}",
    "Tokens guessed ahead that were right.",
    _REQUEST,
)
REQUEST_PREEMPTIONS = Metric(
    "infer.request.preemptions",
    COUNTER,
    "{preemption}",
    "How often a running sequence was put back to free KV blocks.",
    _REQUEST,
)
STEP_DURATION = Metric(
    "infer.step.duration",
    HISTOGRAM,
    "s",
    "One engine step, scheduled to tokens known.",
    (STEP_KIND, CLOCK, *_ENGINE),
    STAGE_BOUNDS,
)
STEP_EXECUTION = Metric(
    "infer.step.execution.duration",
    HISTOGRAM,
    "s",
    "What a worker took for its part of one engine step, by its rank; the slowest rank is what the others wait for. By the clock "
    "of its device one that was timed stands for those that were not.",
    (WORKER_RANK, CLOCK, *_ENGINE),
    STAGE_BOUNDS,
)
DEVICE_ATTRIBUTED = Metric(
    "infer.device.attributed",
    COUNTER,
    "s",
    "Time of devices that is attributed to finished requests, by their tokens in each step; an estimate: steps that were not timed "
    "count as those that were, other ranks as the first.",
    (*_REQUEST, *_CALLER),
)
DEVICE_MEMORY = Metric(
    "infer.device.memory.usage",
    UP_DOWN,
    "By",
    "Memory of a device as a process of the server has it: allocated, reserved, active and inactive_split by torch's allocator, "
    "and of what is reserved, what CUDA graphs and the application's own pools have to themselves (private_pools); free by the "
    "driver; outside: neither free nor reserved.",
    (HW_ID, PROCESS_PID, MEMORY_KIND),
)
PINNED_MEMORY = Metric(
    "infer.pinned_memory.usage",
    UP_DOWN,
    "By",
    "Page-locked memory of the host that torch's allocator holds in a process of the server.",
    (PROCESS_PID,),
)
DEVICE_QUEUED = Metric(
    "infer.step.device.queue",
    HISTOGRAM,
    "s",
    "How long a step that was launched waited for the device.",
    (WORKER_RANK, *_ENGINE),
    STAGE_BOUNDS,
)
DEVICE_IDLE = Metric(
    "infer.step.device.gap",
    HISTOGRAM,
    "s",
    "How long the device had nothing to do on an engine's stream between two steps.",
    (WORKER_RANK, *_ENGINE),
    STAGE_BOUNDS,
)
STEP_BATCH_SIZE = Metric(
    "infer.step.batch.size",
    HISTOGRAM,
    "{sequence}",
    "Sequences in one engine step.",
    (STEP_KIND, *_ENGINE),
    BATCH_BOUNDS,
)
STEP_TOKENS_TOTAL = Metric(
    "infer.step.tokens",
    COUNTER,
    "{token}",
    "Tokens scheduled in engine steps: of prompts (prefill) and one per running sequence (decode).",
    (STEP_KIND, *_ENGINE),
)
PAUSES = Metric(
    "infer.pause.duration",
    HISTOGRAM,
    "s",
    "How long a process was held up: by garbage collection (gc, over 1 ms), torch.compile (compile), CUDA graph capture "
    "(capture), CPU quota (throttled); or its event loop alone (event_loop, over 20 ms). What a start compiles and captures is in "
    "infer.startup.duration.",
    (PAUSE_CAUSE,),
    STAGE_BOUNDS,
)
MARKS = Metric(
    "infer.marks",
    COUNTER,
    "{mark}",
    "What may have held up a process, of unknown length: the CUDA allocator freed what it kept and asked again "
    "(allocator_retry), or had no more memory (allocator_oom); the engine had steps of nothing (empty_step), or one that only "
    "keeps step with its peers (dummy_batch).",
    (MARK,),
)
STARTUP_DURATION = Metric(
    "infer.startup.duration",
    HISTOGRAM,
    "s",
    "What a process spent on getting ready, once per process and phase; `total`: from its beginning until it was ready.",
    (STARTUP_PHASE, READY_BY, ERROR_TYPE),
    STAGE_BOUNDS,
)
KV_USAGE = Metric("infer.kv_cache.usage", UP_DOWN, "{block}", "KV-cache blocks in use.", _ENGINE)
KV_LIMIT = Metric("infer.kv_cache.limit", UP_DOWN, "{block}", "KV-cache blocks there are.", _ENGINE)
KV_BLOCK_SIZE = Metric(
    "infer.kv_cache.block.size",
    GAUGE,
    "{token}",
    "What a block of the KV cache holds, on average where layers differ.",
    _ENGINE,
)
KV_HEADROOM = Metric(
    "infer.kv_cache.headroom",
    GAUGE,
    "{step}",
    "Steps until the KV cache is full, if all that run go on, nobody leaves and nobody comes: free tokens / running sequences.",
    _ENGINE,
)
KV_PREFIX_QUERIES = Metric(
    "infer.kv_cache.prefix.queries",
    COUNTER,
    "{token}",
    "Prompt tokens of finished requests that were looked up in the prefix cache; what a preemption looks up again is not one.",
    _REQUEST,
)
KV_PREFIX_HITS = Metric(
    "infer.kv_cache.prefix.hits",
    COUNTER,
    "{token}",
    "Prompt tokens of finished requests that the prefix cache had.",
    _REQUEST,
)
KV_EVICTIONS = Metric(
    "infer.kv_cache.evictions",
    COUNTER,
    "{block}",
    "Blocks that the prefix cache gave up for others.",
)
KV_UTILIZATION = Metric("infer.kv_cache.utilization", GAUGE, "1", "KV-cache usage / limit, 0 to 1.", _ENGINE)
KV_OF_ENGINE = (KV_USAGE, KV_LIMIT, KV_BLOCK_SIZE, KV_HEADROOM, KV_UTILIZATION)
"""What an engine says with its steps, and nobody says of one that is gone."""
_GPU = (HW_ID, HW_NAME, HW_TYPE, HW_MODEL, HW_VENDOR, HW_DRIVER_VERSION, HW_PARENT)
GPU_UTILIZATION = Metric(
    "hw.gpu.utilization",
    GAUGE,
    "1",
    "Share of the time in which any kernel ran, however small: 1 is not full. See infer.gpu.activity.",
    (*_GPU, GPU_TASK),
)
GPU_MEMORY_USAGE = Metric(
    "hw.gpu.memory.usage", UP_DOWN, "By", "Memory of the GPU in use, by whomever.", _GPU
)
GPU_MEMORY_LIMIT = Metric("hw.gpu.memory.limit", UP_DOWN, "By", "Memory of the GPU.", _GPU)
GPU_MEMORY_UTILIZATION = Metric(
    "hw.gpu.memory.utilization", GAUGE, "1", "Memory in use / memory there is.", _GPU
)
GPU_POWER = Metric("hw.power", GAUGE, "W", "Power that the GPU draws, over the last second.", _GPU)
GPU_ENERGY = Metric(
    "hw.energy", COUNTER, "J", "Energy that the GPU has used since its driver was loaded.", _GPU
)
GPU_TEMPERATURE = Metric("hw.temperature", GAUGE, "Cel", "Temperature of the GPU.", _GPU)
GPU_ERRORS = Metric(
    "hw.errors",
    COUNTER,
    "{error}",
    "Errors of the GPU: of its memory since its driver was loaded (ECC: corrected, uncorrected); critical ones that the driver "
    "told since the server began (xid_NUMBER).",
    (*_GPU, ERROR_TYPE),
)
ECC_ERRORS = ("corrected", "uncorrected")
"""Of the GPU's memory, as ERROR_TYPE."""
BEGUN_ELSEWHERE: dict[Metric, tuple[str, ...]] = {GPU_ENERGY: (), GPU_ERRORS: ECC_ERRORS}
"""Counters that have counted for longer than we are here; where only some of a counter have, which ones."""
GPU_THROTTLED = Metric(
    "infer.gpu.throttled",
    GAUGE,
    "1",
    "1 while the GPU's clocks are held down for this reason: power_cap, hw_slowdown, sync_boost, sw_thermal, hw_thermal, "
    "power_brake.",
    (*_GPU, THROTTLE_REASON),
)
GPU_ACTIVITY = Metric(
    "infer.gpu.activity",
    GAUGE,
    "1",
    "Share of the cycles in which a unit of the GPU was at work, over 5 s: sm, tensor, dram (GPM, Hopper and later).",
    (*_GPU, GPU_UNIT),
)
SELF_HOOKS = Metric(
    "infer.self.hooks",
    UP_DOWN,
    "{hook}",
    "Hooks of each integration, where its library is in use: bound (active) or not (missing).",
    (INTEGRATION, HOOK_STATE),
)
SELF_LOST = Metric(
    "infer.self.lost",
    COUNTER,
    "{item}",
    "Telemetry that did not arrive, by reason: facts overwritten or torn, requests there was no room for, step spans over budget, spans refused.",
    (LOSS_REASON,),
)
SELF_LEFT_OUT = Metric(
    "infer.self.steps.left_out",
    COUNTER,
    "{span}",
    "Step spans that there was no room for, by the reason for which their request was kept.",
    (KEEP_REASON,),
)
SELF_ERRORS = Metric("infer.self.errors", COUNTER, "{error}", "Probes of ours that raised and were disabled.")
SELF_SPANS = Metric("infer.self.spans", COUNTER, "{span}", "Spans that the destination accepted.")
SELF_BYTES = Metric(
    "infer.self.export.size", COUNTER, "By", "Bytes of spans handed to the exporter, uncompressed."
)
SELF_SHARE = Metric(
    "infer.self.steps.share",
    GAUGE,
    "1",
    "Share of the step spans that may be made, so that the sidecar stays inside OTEL_INFER_BUDGET; 1 = all.",
)
SELF_CPU = Metric("infer.self.cpu.time", COUNTER, "s", "CPU time of the sidecar.", (CPU_MODE,))
SELF_MEMORY = Metric("infer.self.memory.usage", UP_DOWN, "By", "Resident memory of the sidecar.")

METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All of them, in the order in which docs show them."""
