"""Metrics of requests, engine steps and KV cache, with unit, buckets and meaning."""

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

HISTOGRAM, COUNTER, UP_DOWN_COUNTER, GAUGE = "histogram", "counter", "updowncounter", "gauge"


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
LATENCY_DURATION = Metric(
    "infer.latency.duration",
    COUNTER,
    "s",
    "Time of finished requests by what it went into; the causes of a request sum to its duration.",
    (LATENCY_CAUSE, *_REQUEST, *_CALLER),
)
INTERFERENCE_DURATION = Metric(
    "infer.interference.duration",
    COUNTER,
    "s",
    "Time that prompts of other requests (offender) took from finished ones (victim), by the class of each: interactive, "
    "batch, else by prompt: short (under 256 tokens), medium, long (from 2048), unknown; in sum, the cause interference.",
    (INTERFERENCE_CLASS, INTERFERENCE_WAITING_CLASS),
)
LATENCY_SLOW_DURATION = Metric(
    "infer.latency.slow.duration",
    COUNTER,
    "s",
    "The part of infer.latency.duration that is of slow requests: those that missed an objective (OTEL_INFER_SLO), or are among "
    "the slowest of their size (OTEL_INFER_SLOW_PERCENT).",
    (LATENCY_CAUSE, *_REQUEST, *_CALLER),
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
    UP_DOWN_COUNTER,
    "{request}",
    "Requests in flight: queued (no engine has taken them up yet) or running, as all are where there is no engine.",
    (REQUEST_STATE,),
)
ENGINE_WAITING = Metric(
    "infer.engine.waiting",
    UP_DOWN_COUNTER,
    "{request}",
    "Requests that an engine's scheduler knows and has not scheduled, by what they wait for: room in the batch or in the KV "
    "cache (capacity); to be allowed at all: a grammar that is compiled (grammar), KV blocks that come from elsewhere "
    "(kv_transfer), more of their prompt (input), something else (other).",
    (WAIT_REASON,),
)
REQUEST_TOKENS = Metric(
    "infer.request.tokens",
    COUNTER,
    "{token}",
    "Tokens of finished requests: of their prompts (input) and made for them (output).",
    (TOKEN_TYPE, *_REQUEST, *_CALLER),
)
DRAFTED_TOKENS = Metric(
    "infer.speculative.tokens.drafted",
    COUNTER,
    "{token}",
    "Tokens guessed ahead for finished requests (speculative decoding).",
    _REQUEST,
)
ACCEPTED_TOKENS = Metric(
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
    UP_DOWN_COUNTER,
    "By",
    "Memory of a device as a process of the server has it: allocated, reserved, active and inactive_split by torch's allocator, "
    "and of what is reserved, what CUDA graphs and the application's own pools have to themselves (private_pools); free by the "
    "driver; outside: neither free nor reserved.",
    (HW_ID, PROCESS_PID, MEMORY_KIND),
)
PINNED_MEMORY = Metric(
    "infer.pinned_memory.usage",
    UP_DOWN_COUNTER,
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
    (MARK_NAME,),
)
STARTUP_DURATION = Metric(
    "infer.startup.duration",
    HISTOGRAM,
    "s",
    "What a process spent on getting ready, once per process and phase; `total`: from its beginning until it was ready.",
    (STARTUP_PHASE, READY_BY, ERROR_TYPE),
    STAGE_BOUNDS,
)
KV_USAGE = Metric("infer.kv_cache.usage", UP_DOWN_COUNTER, "{block}", "KV-cache blocks in use.", _ENGINE)
KV_LIMIT = Metric("infer.kv_cache.limit", UP_DOWN_COUNTER, "{block}", "KV-cache blocks there are.", _ENGINE)
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
ENGINE_KV_METRICS = (KV_USAGE, KV_LIMIT, KV_BLOCK_SIZE, KV_HEADROOM, KV_UTILIZATION)
"""What an engine says with its steps, and nobody says of one that is gone."""
