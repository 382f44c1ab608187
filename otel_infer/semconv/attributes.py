"""Defines attribute names and their values on the wire."""

from __future__ import annotations

from otel_infer.semconv.causes import CAUSES

# ── attributes of the conventions ──────────────────────────────────────────────────────────────────────────────────
OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
USAGE_CACHE_READ = "gen_ai.usage.cache_read.input_tokens"
TOKEN_TYPE = "gen_ai.token.type"
TOKEN_INPUT, TOKEN_OUTPUT = "input", "output"
ERROR_TYPE = "error.type"
HTTP_REQUEST_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_RESPONSE_STATUS_CODE = "http.response.status_code"
RPC_SYSTEM_NAME, RPC_METHOD, RPC_RESPONSE_STATUS_CODE = (
    "rpc.system.name", "rpc.method", "rpc.response.status_code",
)  # fmt: skip
"""The RPC conventions 1.45: the method is fully qualified, the status code is a name such as `OK`."""
MESSAGING_SYSTEM, MESSAGING_OPERATION_NAME, MESSAGING_OPERATION_TYPE = (
    "messaging.system", "messaging.operation.name", "messaging.operation.type",
)  # fmt: skip
MESSAGING_DESTINATION, MESSAGING_MESSAGE_ID = "messaging.destination.name", "messaging.message.id"
"""The messaging conventions 1.45. The span of a job that is processed is a CONSUMER span."""
MESSAGING_PROCESS = "process"
"""Name and type of the operation of a worker that processes a job."""
URL_SCHEME = "url.scheme"
URL_PATH = "url.path"
URL_FULL = "url.full"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"
SERVICE_NAME = "service.name"
SERVICE_NAMESPACE = "service.namespace"
SERVICE_INSTANCE_ID = "service.instance.id"
PROCESS_PID = "process.pid"

HW_ID, HW_NAME, HW_TYPE, HW_PARENT = "hw.id", "hw.name", "hw.type", "hw.parent"
HW_MODEL, HW_VENDOR, HW_DRIVER_VERSION = "hw.model", "hw.vendor", "hw.driver_version"
GPU_TASK = "hw.gpu.task"
GPU_COUNT, GPU_MODELS, GPU_DRIVER = "infer.gpu.count", "infer.gpu.models", "infer.gpu.driver_version"
"""Attributes of a resource."""

OPERATION_EMBEDDINGS = "embeddings"
OPERATION_INFERENCE = "inference"
OPERATION_RERANK = "rerank"
OPERATION_GENERATE_CONTENT = "generate_content"
OPERATION_TRANSCRIPTION = "transcription"
OPERATION_CHAT, OPERATION_TEXT_COMPLETION = "chat", "text_completion"
OTHER = "_OTHER"
CLOCK_HOST, CLOCK_DEVICE = "host", "device"
STEP_PREFILL, STEP_DECODE, STEP_MIXED = "prefill", "decode", "mixed"
METRIC_OVERFLOW = "otel.metric.overflow"
"""Attribute of the series that aggregates all series beyond the cardinality limit (metrics SDK
specification).
"""
UNKNOWN_SERVICE = "unknown_service:python"

ERROR_CLIENT_DISCONNECT = "client_disconnect"
ERROR_TIMEOUT = "timeout"
ERROR_PROCESS_DIED = "process_died"
ERROR_CANCELLED = "cancelled"
NON_ERROR_TYPES = ("", ERROR_CLIENT_DISCONNECT, ERROR_CANCELLED)
"""Values of `error.type` that are no fault of the server. The empty string means no error."""

# Compatibility: attributes of the request spans of vLLM and SGLang, with vLLM's meaning. Off by default.
LATENCY_QUEUE = "gen_ai.latency.time_in_queue"
LATENCY_TTFT = "gen_ai.latency.time_to_first_token"
LATENCY_E2E = "gen_ai.latency.e2e"
LATENCY_PREFILL = "gen_ai.latency.time_in_model_prefill"
LATENCY_DECODE = "gen_ai.latency.time_in_model_decode"

# ── attributes under infer.* ───────────────────────────────────────────────────────────────────────────────────────
STAGE = "infer.stage"
CLOCK = "infer.clock"
KEEP_REASON = "infer.keep.reason"
KEEP_REASON_ERROR = "error"
KEEP_REASON_ABORTED = "aborted"
KEEP_REASON_PREEMPTED = "preempted"
KEEP_REASON_SLO = "slo"
KEEP_REASON_SLOW = "slow"
KEEP_REASON_INTERFERER = "interferer"
KEEP_REASON_BASELINE = "baseline"
KEEP_REASON_SAMPLED = "sampled"
KEEP_REASON_ALL = "all"
KEEP_REASON_BUDGET = "budget"
KEEP_REASON_NONE = "none"
KEEP_REASON_UNSAMPLED = "unsampled"
KEEP_REASONS = (
    KEEP_REASON_ERROR, KEEP_REASON_ABORTED, KEEP_REASON_PREEMPTED, KEEP_REASON_SLO, KEEP_REASON_SLOW, KEEP_REASON_INTERFERER, KEEP_REASON_BASELINE,
    KEEP_REASON_SAMPLED, KEEP_REASON_ALL, KEEP_REASON_BUDGET, KEEP_REASON_NONE, KEEP_REASON_UNSAMPLED,
)  # fmt: skip
"""`budget`: an ordinary request whose steps fit the budget. `none`: exported without its steps."""
PRIORITY_REASONS = (
    KEEP_REASON_SLO, KEEP_REASON_SLOW, KEEP_REASON_ERROR, KEEP_REASON_ABORTED, KEEP_REASON_PREEMPTED,
)  # fmt: skip
"""Keep reasons that a user may ask about. The request that delayed such a request most is exported too."""
NOTABLE_REASONS = (*PRIORITY_REASONS, KEEP_REASON_INTERFERER)
"""Keep reasons of requests that are worth opening."""
SLO_MISSED = "infer.slo.missed"
SLO_MISSED_NONE, SLO_MISSED_ERROR = "none", "error"
"""Values in place of objective names, on a metric: all objectives were met; the request failed."""
LATENCY_PREFIX = "infer.latency."
LATENCY_BY_CAUSE = {cause: LATENCY_PREFIX + cause for cause in CAUSES}
"""Attribute of each cause: its time in seconds. The values of a request sum to its duration."""
LATENCY_CAUSE = "infer.latency.cause"
LATENCY_TOP_CAUSE = "infer.latency.top_cause"
INTERFERENCE_DELAY = "infer.interference.delay"
"""On the link to the request whose prompt delayed this request most: the delay in seconds."""
INTERFERENCE_CLASS, INTERFERENCE_WAITING_CLASS = (
    "infer.interference.class",
    "infer.interference.waiting_class",
)
"""The traffic class of a request, or the size class of its prompt if it has none."""
TENANT = "infer.tenant"
TRAFFIC_CLASS = "infer.traffic.class"
REQUEST_ID = "infer.request.id"
WAIT_REASON = "infer.wait.reason"
REQUEST_STATE = "infer.request.state"
STATE_QUEUED, STATE_RUNNING = "queued", "running"
FAILED_STAGE = "infer.failed_stage"
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
DETOKENIZE_DURATION = "infer.detokenize.duration"
RESPONSE_CHUNKS = "infer.response.chunks"
ITEMS = "infer.items"
POOL_SIZE = "infer.pool.size"
"""Threads of the pool that a request waited for."""
WAIT_KIND = "infer.wait.kind"
"""Class of the object that a request waited for; one of `WAIT_KINDS`."""
WAIT_KINDS = (
    "asyncio.Lock",
    "asyncio.Semaphore",
    "asyncio.Condition",
    "threading.Semaphore",
    "threading.Condition",
)
STEP_ID = "infer.step.id"
STEP_KIND = "infer.step.kind"
STEP_TOKENS = "infer.step.tokens"
BATCH_SIZE = "infer.batch.size"
BATCH_REQUESTS = "infer.batch.requests"
INTERFERENCE_PREFILL_TOKENS = "infer.interference.prefill_tokens"
STEPS_COUNT = "infer.steps.count"
STEPS_SUM = "infer.steps.duration.sum"
STEPS_P50 = "infer.steps.duration.p50"
STEPS_P95 = "infer.steps.duration.p95"
STEPS_MAX = "infer.steps.duration.max"
STEPS_SLOWEST_ID = "infer.steps.slowest.id"
STEPS_DISCARDED = "infer.steps.discarded"
STEPS_DROPPED = "infer.steps.dropped"
ITL_MAX = "infer.inter_token_latency.max"
BATCH_SIZE_MAX = "infer.batch.size.max"
KV_UTILIZATION_START = "infer.kv_cache.utilization.start"
KV_UTILIZATION_END = "infer.kv_cache.utilization.end"
"""KV utilization of the engine when a step was scheduled.

On `prefill`: the first step. On `decode`: the step after the first token (start) and the last step (end).
"""
KV_SIZE = "infer.kv_cache.size"
"""On `prefill` and `decode`: bytes of a KV cache that only this request uses, at the end of the stage."""
DEVICE_METHOD = "infer.device.method"
"""`event`: timed by events on the device's streams.

`host`: timed by the host's clock, from the start of the launch to its end.
"""
DEVICE_STEPS = "infer.device.steps"
DEVICE_STEPS_ALL = "infer.device.steps.all"
"""On a stage: the number of its timed steps, and the number of all its steps."""
DEVICE_DURATION = "infer.device.duration"
DEVICE_SPAN = "infer.device.span"
"""On a decode step: time between its two events on the device's stream, ns."""
DEVICE_SHARE = "infer.device.share"
"""On a stage: the request's part of the device duration, estimated by tokens.

The parts of all requests and the unattributed rest sum to the duration.
"""
DEVICE_SHARE_METHOD = "infer.device.share.method"
MEMORY_FREE_START = "infer.device.memory.free.start"
MEMORY_FREE_FIRST_TOKEN = "infer.device.memory.free.first_token"
MEMORY_FREE_END = "infer.device.memory.free.end"
"""Free bytes of the device with the least free memory, as last measured before arrival, the first token and
the end.
"""
DIFFUSION_STEPS = "infer.diffusion.steps"
IMAGE_WIDTH, IMAGE_HEIGHT = "infer.image.width", "infer.image.height"
"""Denoising steps of a request, and the size of the images that it made, px."""
AUDIO_DURATION = "infer.audio.duration"
"""Length of the audio that a request transcribes, s."""
BATCHES_ACTIVE, BATCHES_QUEUED = "infer.batches.active", "infer.batches.queued"
"""Batches that the threads of a model computed when a call was made, and that waited for one."""
EXECUTION_PROVIDER = "infer.execution_provider"
"""Where a model runs: ONNX Runtime's first execution provider, OpenVINO's device."""
TRANSFER_SIZE, TRANSFER_PINNED = "infer.transfer.size", "infer.transfer.pinned"
"""On `h2d` and `d2h`: bytes, and whether the host memory was page-locked.

Without page-locked memory the host waits for the copy.
"""
MEMORY_WANTED, MEMORY_LIMIT = "infer.device.memory.wanted", "infer.device.memory.limit"
MEMORY_FREE = "infer.device.memory.free"
MEMORY_KIND = "infer.device.memory.kind"
MEMORY_KIND_ALLOCATED, MEMORY_KIND_RESERVED, MEMORY_KIND_ACTIVE = "allocated", "reserved", "active"
MEMORY_KIND_INACTIVE_SPLIT, MEMORY_KIND_PRIVATE_POOLS = "inactive_split", "private_pools"
MEMORY_KIND_OUTSIDE, MEMORY_KIND_FREE = "outside", "free"
"""Kinds of device memory. The first five are the allocator's; `outside` is used by anything else."""
DEVICE_LAUNCH = "infer.device.launch"
DEVICE_QUEUE = "infer.device.queue"
DEVICE_GAP = "infer.device.gap"
DEVICE_CLOCK_ERROR = "infer.device.clock_error"
DEVICE_BOTTLENECK = "infer.device.bottleneck"
PAUSE_CAUSE = "infer.pause.cause"
PAUSE_DURATION = "infer.pause.duration"
CODE_FUNCTION, CODE_FILE, CODE_LINE = "code.function.name", "code.file.path", "code.line.number"
"""The code that the late thread was in during a pause."""
CODE_WAITER = "infer.code.waiter"
"""The function that waits for a lock that the code holds: its name, file and line."""
MARK_NAME = "infer.mark.name"
MARK_EVICTION = "kv_eviction"
MARK_EMPTY, MARK_DUMMY = "empty_step", "dummy_batch"
MARK_ALLOCATOR_RETRY, MARK_ALLOCATOR_OOM = "allocator_retry", "allocator_oom"
MARK_NAMES = (MARK_ALLOCATOR_RETRY, MARK_ALLOCATOR_OOM, MARK_EMPTY, MARK_DUMMY)
MARK_COUNT = "infer.mark.count"
MARK_WINDOW = "infer.mark.window"
"""Longest time that the mark may have happened before its event, s."""
PAUSES_DROPPED = "infer.pauses.dropped"
READY_BY = "infer.ready.by"
MODULE = "infer.module"
PHASES_DROPPED = "infer.phases.dropped"
STARTUP_PHASE = "infer.startup.phase"
FIRST_REQUEST = "infer.request.first"
THROTTLE_REASON = "infer.gpu.throttle.reason"
"""On a request, comma-separated: why GPU clocks were throttled at its arrival or while it was in flight."""
GPU_UNIT = "infer.gpu.unit"
ENGINE = "infer.engine"
WORKER_RANK = "infer.worker.rank"
INTEGRATION = "infer.integration"
HOOK_STATE = "infer.hook.state"
HOOK_ACTIVE, HOOK_MISSING = "active", "missing"
LOSS_REASON = "infer.loss.reason"
LOSS_REFUSED = "refused"
LOSS_QUEUE_FULL = "queue_full"
LOSS_NOT_ENCODED = "not_encoded"
LOSS_METRICS_REFUSED = "metrics_refused"
LOSS_OVER_BUDGET = "steps_over_budget"
"""Step spans that did not fit the budget; no request is lost."""
LOSS_EVENTS_OVERWRITTEN = "events_overwritten"
LOSS_EVENTS_TORN = "events_torn"
LOSS_NOT_RECORDED = "not_recorded"
LOSS_NOT_CONVERTED = "requests_not_converted"
LOSS_VALUES_CUT = "values_cut"
LOSS_SIDECAR_ENDED = "sidecar_ended"
"""Requests that a sidecar had read and not exported when it was killed, or that came while none ran."""
LOSS_UNCONFIRMED = "unconfirmed"
"""Requests that were sent, without an answer of the destination; it may have them."""
LOSS_OTHER_DESTINATION = "other_destination"
LOSS_REASONS = (
    LOSS_REFUSED,
    LOSS_QUEUE_FULL,
    LOSS_NOT_ENCODED,
    LOSS_METRICS_REFUSED,
    LOSS_OVER_BUDGET,
    LOSS_EVENTS_OVERWRITTEN,
    LOSS_EVENTS_TORN,
    LOSS_NOT_RECORDED,
    LOSS_NOT_CONVERTED,
    LOSS_VALUES_CUT,
    LOSS_OTHER_DESTINATION,
)
"""Every reason has a series from the start, so that `rate()` and `increase()` see its first loss."""
REQUEST_LOSS_REASONS = (
    LOSS_NOT_RECORDED,
    LOSS_EVENTS_OVERWRITTEN,
    LOSS_SIDECAR_ENDED,
    LOSS_NOT_CONVERTED,
    LOSS_NOT_ENCODED,
    LOSS_QUEUE_FULL,
    LOSS_REFUSED,
    LOSS_UNCONFIRMED,
)
"""Why a whole request is not exported. Their order is the order of the ledger's words."""
EXPORT_RESULT = "infer.export.result"
EXPORT_RESULT_EXPORTED = "exported"
EXPORT_RESULT_NOT_SAMPLED = "not_sampled"
EXPORT_RESULT_REDUNDANT = "redundant"
"""Another library's span contains all that the request's span would."""
EXPORT_RESULTS = (EXPORT_RESULT_EXPORTED, EXPORT_RESULT_NOT_SAMPLED, EXPORT_RESULT_REDUNDANT)
CPU_MODE = "cpu.mode"
DOCTOR = "infer.doctor"
CLIENT_TIME_TO_HEADERS = "infer.client.time_to_headers"
CLIENT_TIME_TO_FIRST_BYTE = "infer.client.time_to_first_byte"
CLIENT_TIME_TO_FIRST_TOKEN = "infer.client.time_to_first_token"
CLIENT_ITL_MAX = "infer.client.inter_token_latency.max"
CLIENT_ITL_MEAN = "infer.client.inter_token_latency.mean"
CLIENT_CHUNKS = "infer.client.chunks"
CLIENT_SERVER_DURATION = "infer.client.server.duration"
CLIENT_NETWORK_DURATION = "infer.client.network.duration"
CLIENT_CLOSED_EARLY = "infer.client.closed_early"
