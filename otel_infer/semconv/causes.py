"""The table of causes: what the time of a request is attributed to.

The causes of a request sum to its duration.

Attribution, diagnosis, the report, docs, dashboards and alerts read this table. A new cause is one row here
and the code that measures it.
"""

from __future__ import annotations

from typing import NamedTuple

from otel_infer.semconv import spans

CAUSE_SOCKET_QUEUE = "socket_queue"
CAUSE_INGRESS = "ingress"
CAUSE_TOKENIZE = "tokenize"
CAUSE_MEDIA = "media"
CAUSE_HIDDEN_QUEUE = "hidden_queue"
CAUSE_SCHEDULER_QUEUE = "scheduler_queue"
CAUSE_POOL_QUEUE = "pool_queue"
CAUSE_LOCK_QUEUE = "lock_queue"
CAUSE_WORK_QUEUE = "work_queue"
CAUSE_BATCH_WAIT = "batch_wait"
CAUSE_GRAMMAR = "grammar"
CAUSE_KV_TRANSFER = "kv_transfer"
CAUSE_PREFILL = "prefill"
CAUSE_DECODE = "decode"
CAUSE_BATCHING = "batching"
CAUSE_INTERFERENCE = "interference"
CAUSE_PREEMPTION = "preemption"
CAUSE_HOST_BUBBLE = "host_bubble"
CAUSE_TRANSFER = "transfer"
CAUSE_APPLICATION = "application"
CAUSE_DETOKENIZE = "detokenize"
CAUSE_EGRESS = "egress"
CAUSE_GC = "gc"
CAUSE_COMPILE = "compile"
CAUSE_CAPTURE = "capture"
CAUSE_WARMUP = "warmup"
CAUSE_EVENT_LOOP = "event_loop"
CAUSE_THROTTLED = "throttled"
CAUSE_GPU_THROTTLED = "gpu_throttled"
CAUSE_STARVED = "starved"
CAUSE_PAGE_FAULTS = "page_faults"
CAUSE_BLOCKED = "blocked"
CAUSE_RAN_LONGER = "ran_longer"
CAUSE_PAUSE = "pause"
CAUSE_UNEXPLAINED = "unexplained"

GROUP_PRE_ENGINE = "pre_engine"
GROUP_QUEUE = "queue"
GROUP_OWN_WORK = "own_work"
GROUP_STALL = "stall"
GROUP_HOST = "host"
GROUP_POST_ENGINE = "post_engine"
GROUP_UNKNOWN = "unknown"
"""Groups of causes, as diagnosis reads them."""
LATE_EVENT_LOOP, LATE_STEP, LATE_REQUEST, LATE_PROCESS = CAUSE_EVENT_LOOP, "step", "request", "process"
"""What can be late while the code of its thread is sampled."""
STOPS_PROCESS, STOPS_EVENT_LOOP = "process", "event_loop"
"""A pause stops all threads of a process, or its event loop while the engine continues."""


class Cause(NamedTuple):
    """A row of the table.

    `colour`: in the report, light enough for black text. `stages`: the stages whose time is this cause,
    unless another cause took it. `pause`: what it stops, if it is a pause; empty if it is none. `is_fault`:
    whether an alert may name it; a request's own work is no fault. `is_warmup`: it happens once, before a
    server has run all its shapes. `slows_decode`: it delays tokens beyond the request's own decode. `sampled`:
    what is late while this time passes, so that the code of the late thread shows its reason. `change`: what to
    change first; empty where only the symptom decides.
    """

    name: str
    group: str
    colour: str
    meaning: str
    change: str = ""
    stages: tuple[str, ...] = ()
    pause: str = ""
    is_fault: bool = True
    is_warmup: bool = False
    slows_decode: bool = False
    sampled: tuple[str, ...] = ()


_LATE_CODE = (LATE_REQUEST, LATE_EVENT_LOOP)

CAUSE_TABLE = (
    Cause(
        CAUSE_SOCKET_QUEUE, GROUP_PRE_ENGINE, "#6d9fd4",
        "in the server's socket, not yet read by the server",
        "with an event loop keep blocking calls off it: `def` instead of `async def`, or asyncio.to_thread; else add worker threads or processes",
        stages=(spans.SPAN_ACCEPT,),
        sampled=(LATE_EVENT_LOOP,),
    ),
    Cause(
        CAUSE_INGRESS, GROUP_PRE_ENGINE, "#7fb2e5",
        "from the server's call of the application until the request is handed to the engine",
        "make what runs before the engine faster or concurrent: body reads, look-ups, authentication",
        stages=(spans.SPAN_INGRESS,),
        sampled=_LATE_CODE,
    ),
    Cause(
        CAUSE_TOKENIZE, GROUP_PRE_ENGINE, "#a9cdf0",
        "tokenization of the prompt",
        "shorter prompts, a compiled tokenizer, or more API server processes",
        stages=(spans.SPAN_TOKENIZE,),
        sampled=_LATE_CODE,
    ),
    Cause(
        CAUSE_MEDIA, GROUP_PRE_ENGINE, "#93b9d8",
        "images, audio and video of the prompt: fetched and preprocessed",
        "smaller media from a nearby store, or fetched by the client; more API servers to preprocess them",
        stages=(spans.SPAN_FETCH_MEDIA, spans.SPAN_PREPARE_MEDIA),
        sampled=_LATE_CODE,
    ),
    Cause(
        CAUSE_HIDDEN_QUEUE, GROUP_QUEUE, "#f3d27a",
        "handed to the engine, not yet seen by its scheduler",
        "shorter steps: fewer prompt tokens in each (chunked prefill), or smaller batches; poll for new requests more often",
    ),
    Cause(
        CAUSE_SCHEDULER_QUEUE, GROUP_QUEUE, "#e8b931",
        "in the scheduler's queue",
        stages=(spans.SPAN_QUEUE,),
    ),
    Cause(
        CAUSE_POOL_QUEUE, GROUP_QUEUE, "#f0c95a",
        "waited for a thread of a pool",
        "fewer blocking calls in the pool, or more threads if they only wait (FastAPI: anyio.to_thread.current_default_thread_limiter().total_tokens; waitress: threads; gRPC: max_workers)",
        stages=(spans.SPAN_POOL_WAIT,),
        sampled=(LATE_REQUEST,),
    ),
    Cause(
        CAUSE_LOCK_QUEUE, GROUP_QUEUE, "#f7dc92",
        "waited for a lock, a semaphore or a condition of the application",
        "batch the requests that the lock lets through one by one, hold it for less, or add server processes",
        stages=(spans.SPAN_LOCK_WAIT,),
        sampled=_LATE_CODE,
    ),
    Cause(
        CAUSE_WORK_QUEUE, GROUP_QUEUE, "#e3c56f",
        "in a queue of the application, until a worker took it",
        "more or faster workers, larger batches if the model has room, or fewer requests at once",
        stages=(spans.SPAN_QUEUE_WAIT,),
        sampled=(LATE_REQUEST,),
    ),
    Cause(
        CAUSE_BATCH_WAIT, GROUP_QUEUE, "#dcc98f",
        "taken by a worker that waited for more requests of its batch",
        "a shorter wait for more requests, and none while a worker is idle",
        stages=(spans.SPAN_BATCH_WAIT,),
    ),
    Cause(
        CAUSE_GRAMMAR, GROUP_PRE_ENGINE, "#d9c069",
        "in the queue until the grammar of its structured output was compiled",
        "simpler schemas, and the same ones again, because compiled grammars are cached; compile each once before serving",
        stages=(spans.SPAN_GRAMMAR,),
    ),
    Cause(
        CAUSE_KV_TRANSFER, GROUP_PRE_ENGINE, "#c9b27c",
        "in the queue until its KV blocks had arrived from another instance",
        "a faster connection for KV blocks, or prefill of short prompts where they arrive",
        stages=(spans.SPAN_KV_TRANSFER,),
    ),
    Cause(
        CAUSE_PREFILL, GROUP_OWN_WORK, "#d79bd0",
        "prefill of the request's prompt",
        "shorter or capped prompts, the prefix cache, prefill in smaller chunks",
        stages=(spans.SPAN_PREFILL,),
        is_fault=False,
    ),
    Cause(
        CAUSE_DECODE, GROUP_OWN_WORK, "#74b866",
        "its own work in the model: what its steps, or its `forward`, would have cost alone",
        "a smaller or quantized model, speculative decoding, or a faster device",
        stages=(spans.SPAN_FORWARD, spans.SPAN_DECODE, *spans.MODEL_PARTS),
        is_fault=False,
    ),
    Cause(
        CAUSE_BATCHING, GROUP_OWN_WORK, "#b0d99f",
        "what the other sequences of the batch added to its steps, or other items to the call of a model",
        "smaller batches for live traffic, and offline traffic on a separate replica",
        is_fault=False, slows_decode=True,
    ),
    Cause(
        CAUSE_INTERFERENCE, GROUP_STALL, "#ee7f6b",
        "prefill of other requests in its steps, and steps in which it was not scheduled",
        "chunked prefill with fewer prompt tokens a step; long prompts on a separate replica",
        slows_decode=True,
    ),
    Cause(
        CAUSE_PREEMPTION, GROUP_STALL, "#e29a63",
        "preempted, queued again and recomputed",
        "more KV cache, or fewer and shorter sequences at the same time",
        slows_decode=True,
    ),
    Cause(
        CAUSE_HOST_BUBBLE, GROUP_HOST, "#c2b3a3",
        "between two steps of the engine; where a device is timed, also its idle time within a step",
        "see what the engine's thread does between its steps (py-spy): callbacks, detokenizing, sending",
        slows_decode=True,
        sampled=(LATE_STEP,),
    ),
    Cause(
        CAUSE_TRANSFER, GROUP_HOST, "#a8b3a0",
        "copies to the device and from it",
        "page-locked memory, and fewer copies between host and device",
        stages=(spans.SPAN_H2D, spans.SPAN_D2H),
    ),
    Cause(
        CAUSE_APPLICATION, GROUP_PRE_ENGINE, "#8ec9e8",
        "stages that the application recorded, and its code between stages before the engine, or between two generations",
        "open the longest of these stages, or gaps between stages, in the trace, and make that code faster or concurrent",
        is_fault=False,
        sampled=_LATE_CODE,
    ),
    Cause(
        CAUSE_DETOKENIZE, GROUP_POST_ENGINE, "#9bd8cf",
        "detokenization after the last token",
        "detokenize while tokens arrive, or in more processes",
        stages=(spans.STAGE_DETOKENIZE,),
        sampled=_LATE_CODE,
    ),
    Cause(
        CAUSE_EGRESS, GROUP_POST_ENGINE, "#6cc0b5",
        "from the last token, or the result of the model, until the last byte is handed to the socket",
        "see `infer.send.wait` for slow clients; else move work after the model out of the request",
        stages=(spans.SPAN_POSTPROCESS,),
        sampled=_LATE_CODE,
    ),
    Cause(
        CAUSE_GC, GROUP_STALL, "#b79be0",
        "garbage collection",
        "gc.freeze() once the server is warm, a higher threshold, fewer long-lived objects",
        pause=STOPS_PROCESS, slows_decode=True,
        sampled=_LATE_CODE,
    ),
    Cause(
        CAUSE_COMPILE, GROUP_STALL, "#cdb8ec",
        "torch.compile",
        "warm up all shapes before the first request",
        pause=STOPS_PROCESS, is_warmup=True, slows_decode=True,
    ),
    Cause(
        CAUSE_CAPTURE, GROUP_STALL, "#c3a4e8",
        "capture of a CUDA graph",
        "capture the graphs of all batch sizes before the first request",
        pause=STOPS_PROCESS, is_warmup=True, slows_decode=True,
    ),
    Cause(
        CAUSE_WARMUP, GROUP_STALL, "#d9a8c4",
        "waiting for the first step of the engine, and what a step took longer as the first of its engine or its size",
        "run a batch and a prompt of each size once before the server reports that it is ready",
        is_warmup=True, slows_decode=True,
    ),
    Cause(
        CAUSE_EVENT_LOOP, GROUP_HOST, "#a9a3ea",
        "the event loop was blocked by a call, or waited for a core or the GIL",
        "move the blocking call off the event loop: `def` instead of `async def`, or asyncio.to_thread",
        pause=STOPS_EVENT_LOOP,
        sampled=(LATE_EVENT_LOOP,),
    ),
    Cause(
        CAUSE_THROTTLED, GROUP_STALL, "#9d8fd6",
        "the CPU quota of the container was used up",
        "raise the CPU quota of the container",
        pause=STOPS_PROCESS, slows_decode=True,
    ),
    Cause(
        CAUSE_GPU_THROTTLED, GROUP_STALL, "#8fa0e0",
        "what steps took longer while the clocks of a GPU were throttled",
        "cool the GPU, and check its power supply (nvidia-smi -q -d PERFORMANCE)",
        slows_decode=True,
    ),
    Cause(
        CAUSE_STARVED, GROUP_STALL, "#e0b58a",
        "the engine's thread was runnable and had no CPU",
        "more cores, or fewer threads and processes on them (OMP_NUM_THREADS, workers, neighbours)",
        slows_decode=True,
    ),
    Cause(
        CAUSE_PAGE_FAULTS, GROUP_STALL, "#c7c48d",
        "the kernel mapped memory for the engine's thread, page by page",
        "keep freed memory: MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ at 1 GiB, or jemalloc",
        slows_decode=True,
    ),
    Cause(
        CAUSE_BLOCKED, GROUP_STALL, "#e39ab0",
        "the engine's thread waited for a lock, the GIL, a disk or the device",
        "find what it waits for (py-spy dump): a lock, another thread that holds the GIL, a slow disk, or the device",
        slows_decode=True,
        sampled=(LATE_STEP,),
    ),
    Cause(
        CAUSE_RAN_LONGER, GROUP_STALL, "#d2a79b",
        "the engine's thread was on a CPU for longer than such steps usually take",
        "see which code the engine calls in its steps; else fewer threads beside it, which share its caches, memory and clock",
        slows_decode=True,
        sampled=(LATE_STEP,),
    ),
    Cause(
        CAUSE_PAUSE, GROUP_STALL, "#ded0f2",
        "another pause of the whole process",
        "find what stops the process: other work on its cores, a debugger, a suspended container",
        slows_decode=True,
        sampled=(LATE_STEP,),
    ),
    Cause(
        CAUSE_UNEXPLAINED, GROUP_UNKNOWN, "#b9bec6",
        "not covered by any measurement",
        "put `otel_infer.stage` around the code in question, or sample it (py-spy)",
        is_fault=False,
        sampled=(LATE_STEP, *_LATE_CODE),
    ),
)  # fmt: skip
"""In the order in which docs list them."""

CAUSES = {row.name: row for row in CAUSE_TABLE}
STAGE_CAUSES = {stage: row.name for row in CAUSE_TABLE for stage in row.stages}
"""The cause of a stage's time, unless another cause took it."""
PAUSE_CAUSES = tuple(row.name for row in CAUSE_TABLE if row.pause == STOPS_PROCESS)
"""Pauses of a whole process that are recorded by name; any other is a `pause`."""
EVENT_LOOP_CAUSES = tuple(row.name for row in CAUSE_TABLE if row.pause == STOPS_EVENT_LOOP)


def select_causes(*groups: str) -> tuple[str, ...]:
    """Returns the names of the causes in these groups, in the order of the table."""
    return tuple(row.name for row in CAUSE_TABLE if row.group in groups)


def describe_cause(name: str) -> str:
    """Returns the meaning of a cause; empty for a name that is not in the table."""
    return CAUSES[name].meaning if name in CAUSES else ""
