"""Defines metrics of requests, engine steps and KV cache, with unit, buckets and meaning."""

from __future__ import annotations

from typing import NamedTuple

from otel_infer.semconv.attributes import (
    CLOCK,
    ENGINE,
    ERROR_TYPE,
    HW_ID,
    INTERFERENCE_CLASS,
    INTERFERENCE_WAITING_CLASS,
    KEEP_REASON,
    LATENCY_CAUSE,
    MARK_NAME,
    MEMORY_KIND,
    OPERATION_NAME,
    PAUSE_CAUSE,
    PROCESS_PID,
    PROVIDER_NAME,
    READY_BY,
    REQUEST_MODEL,
    REQUEST_STATE,
    SLO_MISSED,
    STAGE,
    STARTUP_PHASE,
    STEP_KIND,
    TENANT,
    TOKEN_TYPE,
    TRAFFIC_CLASS,
    WAIT_REASON,
    WORKER_RANK,
)

# Supersets of the recommended bounds, which resolve 1 ms between tokens and 60 s to the first token.
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

HISTOGRAM, COUNTER, UP_DOWN_COUNTER, GAUGE = "histogram", "counter", "updowncounter", "gauge"


class Metric(NamedTuple):
    """A metric on the wire. `bounds` is for histograms only. `attributes`: all that a data point may have."""

    name: str
    instrument: str
    unit: str
    description: str
    attributes: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


_REQUEST = (OPERATION_NAME, PROVIDER_NAME, REQUEST_MODEL)
_ENGINE = (ENGINE, PROCESS_PID)
_CALLER = (TENANT, TRAFFIC_CLASS)
"""Present only if OTEL_INFER_TENANT or OTEL_INFER_TRAFFIC_CLASS is set."""

REQUEST_DURATION = Metric(
    "gen_ai.server.request.duration",
    HISTOGRAM,
    "s",
    "Arrival to last byte of every inference; failed and aborted ones have error.type.",
    (*_REQUEST, ERROR_TYPE, *_CALLER),
    DURATION_BOUNDS,
)
TIME_TO_FIRST_TOKEN = Metric(
    "gen_ai.server.time_to_first_token",
    HISTOGRAM,
    "s",
    "Arrival to first token, measured as close to the client as the server can; successful requests only.",
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
    "Time between two consecutive steps that delivered tokens to a request, one value per gap.",
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
LATENCY_DURATION = Metric(
    "infer.latency.duration",
    COUNTER,
    "s",
    "Time of finished requests by cause; the causes of a request sum to its duration.",
    (LATENCY_CAUSE, *_REQUEST, *_CALLER),
)
INTERFERENCE_DURATION = Metric(
    "infer.interference.duration",
    COUNTER,
    "s",
    "Delay of finished requests by the prompts of other requests; the total is the cause interference. By "
    "the class of the interfering and of the waiting request: interactive, batch, else by prompt: short "
    "(under 256 tokens), medium, long (from 2048), unknown.",
    (INTERFERENCE_CLASS, INTERFERENCE_WAITING_CLASS),
)
LATENCY_SLOW_DURATION = Metric(
    "infer.latency.slow.duration",
    COUNTER,
    "s",
    "The part of infer.latency.duration that belongs to slow requests. A slow request missed an objective "
    "(OTEL_INFER_SLO) or is among the slowest of its size (OTEL_INFER_SLOW_PERCENT).",
    (LATENCY_CAUSE, *_REQUEST, *_CALLER),
)
REQUEST_OBJECTIVES = Metric(
    "infer.request.objectives",
    COUNTER,
    "{request}",
    "Requests by the objectives of OTEL_INFER_SLO that they missed: names of objectives, `none`, or "
    "`error`. Not counted: requests that their client cancelled before a token or a missed objective.",
    (SLO_MISSED, *_REQUEST, *_CALLER),
)
REQUEST_ABANDONED = Metric(
    "infer.request.abandoned",
    HISTOGRAM,
    "s",
    "Time from arrival to abort, by the stage that was aborted; without error.type the client cancelled the "
    "request.",
    (STAGE, ERROR_TYPE, *_REQUEST, *_CALLER),
    STAGE_BOUNDS,
)
REQUEST_KEPT = Metric(
    "infer.request.kept",
    COUNTER,
    "{request}",
    "Requests by the reason why their decode steps were exported; `none`: exported without steps, "
    "`unsampled`: not exported.",
    (KEEP_REASON,),
)
REQUEST_ACTIVE = Metric(
    "infer.request.active",
    UP_DOWN_COUNTER,
    "{request}",
    "Requests in flight: queued (not yet taken up by an engine) or running. Without an engine all are "
    "running.",
    (REQUEST_STATE,),
)
REQUEST_HUNG = Metric(
    "infer.request.hung",
    GAUGE,
    "{request}",
    "Requests in flight of a server that hangs: no step of an engine has ended for 60 s. 0 while it does not.",
)
ENGINE_WAITING = Metric(
    "infer.engine.waiting",
    UP_DOWN_COUNTER,
    "{request}",
    "Requests in an engine's scheduler queue, by wait reason. Room in the batch or in the KV cache: "
    "capacity. Compilation of a grammar: grammar. KV blocks from elsewhere: kv_transfer. More of the "
    "prompt: input. Anything else: other.",
    (WAIT_REASON,),
)
REQUEST_TOKENS = Metric(
    "infer.request.tokens",
    COUNTER,
    "{token}",
    "Tokens of finished requests: prompt tokens (input) and generated tokens (output).",
    (TOKEN_TYPE, *_REQUEST, *_CALLER),
)
DRAFTED_TOKENS = Metric(
    "infer.speculative.tokens.drafted",
    COUNTER,
    "{token}",
    "Draft tokens proposed for finished requests (speculative decoding).",
    _REQUEST,
)
ACCEPTED_TOKENS = Metric(
    "infer.speculative.tokens.accepted",
    COUNTER,
    "{token}",
    "Draft tokens of finished requests that were accepted.",
    _REQUEST,
)
REQUEST_PREEMPTIONS = Metric(
    "infer.request.preemptions",
    COUNTER,
    "{preemption}",
    "Preemptions of finished requests: a running sequence returned to the queue to free KV blocks.",
    _REQUEST,
)
STEP_DURATION = Metric(
    "infer.step.duration",
    HISTOGRAM,
    "s",
    "Time of one engine step, from scheduling until its tokens were known.",
    (STEP_KIND, CLOCK, *_ENGINE),
    STAGE_BOUNDS,
)
STEP_EXECUTION = Metric(
    "infer.step.execution.duration",
    HISTOGRAM,
    "s",
    "Time that a worker needed for its part of an engine step, by rank; the other ranks wait for the "
    "slowest. By the clock of the device, a timed step also stands for steps that were not timed.",
    (WORKER_RANK, CLOCK, *_ENGINE),
    STAGE_BOUNDS,
)
DEVICE_ATTRIBUTED = Metric(
    "infer.device.attributed",
    COUNTER,
    "s",
    "Device time attributed to finished requests, by their tokens in each step. An estimate: untimed steps "
    "count like timed steps, and other ranks like the first.",
    (*_REQUEST, *_CALLER),
)
DEVICE_MEMORY = Metric(
    "infer.device.memory.usage",
    UP_DOWN_COUNTER,
    "By",
    "Memory of a device, as reported by a process of the server. By torch's allocator: allocated, reserved, "
    "active, inactive_split, and private_pools (the reserved part of CUDA graphs and the application's own "
    "pools). By the driver: free. Neither free nor reserved: outside.",
    (HW_ID, PROCESS_PID, MEMORY_KIND),
)
PINNED_MEMORY = Metric(
    "infer.pinned_memory.usage",
    UP_DOWN_COUNTER,
    "By",
    "Page-locked host memory that torch's allocator holds in a process of the server.",
    (PROCESS_PID,),
)
DEVICE_QUEUED = Metric(
    "infer.step.device.queue",
    HISTOGRAM,
    "s",
    "Time that a launched step waited for the device.",
    (WORKER_RANK, *_ENGINE),
    STAGE_BOUNDS,
)
DEVICE_IDLE = Metric(
    "infer.step.device.gap",
    HISTOGRAM,
    "s",
    "Idle time of the device on an engine's stream between two steps.",
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
    "Tokens scheduled in engine steps: prompt tokens (prefill) and one per running sequence (decode).",
    (STEP_KIND, *_ENGINE),
)
PAUSES = Metric(
    "infer.pause.duration",
    HISTOGRAM,
    "s",
    "Pauses of a process, by cause: garbage collection (gc, over 1 ms), torch.compile (compile), CUDA graph "
    "capture (capture), CPU quota (throttled); or of its event loop alone (event_loop, over 20 ms). "
    "Compilation and captures of a start are in infer.startup.duration.",
    (PAUSE_CAUSE,),
    STAGE_BOUNDS,
)
MARKS = Metric(
    "infer.marks",
    COUNTER,
    "{mark}",
    "Marks, which may have delayed a process for an unknown time. The CUDA allocator freed its cache and "
    "retried (allocator_retry), or ran out of memory (allocator_oom). The engine had empty steps "
    "(empty_step), or a dummy batch to stay in step with its peers (dummy_batch).",
    (MARK_NAME,),
)
STARTUP_DURATION = Metric(
    "infer.startup.duration",
    HISTOGRAM,
    "s",
    "Time that a process needed to get ready, once per process and phase; `total`: from process start until "
    "it was ready.",
    (STARTUP_PHASE, READY_BY, ERROR_TYPE),
    STAGE_BOUNDS,
)
KV_USAGE = Metric("infer.kv_cache.usage", UP_DOWN_COUNTER, "{block}", "KV blocks in use.", _ENGINE)
KV_LIMIT = Metric("infer.kv_cache.limit", UP_DOWN_COUNTER, "{block}", "KV blocks in total.", _ENGINE)
KV_BLOCK_SIZE = Metric(
    "infer.kv_cache.block.size",
    GAUGE,
    "{token}",
    "Tokens per KV block, on average where layers differ.",
    _ENGINE,
)
KV_HEADROOM = Metric(
    "infer.kv_cache.headroom",
    GAUGE,
    "{step}",
    "Steps until the KV cache is full, if all running sequences continue and none joins: free tokens / "
    "running sequences.",
    _ENGINE,
)
KV_PREFIX_QUERIES = Metric(
    "infer.kv_cache.prefix.queries",
    COUNTER,
    "{token}",
    "Prompt tokens of finished requests that were looked up in the prefix cache; look-ups after a "
    "preemption do not count.",
    _REQUEST,
)
KV_PREFIX_HITS = Metric(
    "infer.kv_cache.prefix.hits",
    COUNTER,
    "{token}",
    "Prompt tokens of finished requests that were in the prefix cache.",
    _REQUEST,
)
KV_EVICTIONS = Metric("infer.kv_cache.evictions", COUNTER, "{block}", "Blocks that the prefix cache evicted.")
KV_UTILIZATION = Metric("infer.kv_cache.utilization", GAUGE, "1", "KV-cache usage / limit, 0 to 1.", _ENGINE)
ENGINE_KV_METRICS = (KV_USAGE, KV_LIMIT, KV_BLOCK_SIZE, KV_HEADROOM, KV_UTILIZATION)
"""Metrics that an engine reports with its steps. The series of an engine that is gone are removed."""
