"""Defines span and event names, stages and startup phases on the wire."""

from __future__ import annotations

SCOPE = "otel_infer"
SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
SPAN_ACCEPT = "accept"
SPAN_INGRESS = "ingress"
SPAN_POOL_WAIT = "pool wait"
SPAN_LOCK_WAIT = "lock wait"
SPAN_QUEUE_WAIT = "queue wait"
"""In a queue of the application, from the put of a request's item until a worker took it."""
SPAN_BATCH_WAIT = "batch wait"
"""From when a worker took a request's item until it took the last one of the same batch, or stopped waiting for more."""
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
SPAN_ENCODE, SPAN_ENCODE_PROMPT = "encode", "encode prompt"
SPAN_DENOISE_STEP, SPAN_DECODE_IMAGE = "denoise step", "decode image"
MODEL_PARTS = (SPAN_ENCODE, SPAN_ENCODE_PROMPT, SPAN_DENOISE_STEP, SPAN_DECODE_IMAGE)
"""Parts of one call of a model, inside of `forward` or `prefill`: encoders, each step of a diffusion, the image's decoder."""
SPAN_POSTPROCESS = "postprocess"
SPAN_DOCTOR = "otel_infer doctor"
EVENT_PAUSE = "infer.pause"
"""On the request span: a pause of the process, or of its event loop, during the request."""
EVENT_MARK = "infer.mark"
"""On the request span: a mark of the process, of unknown duration, perhaps during the request."""
EVENT_OUT_OF_MEMORY = "infer.out_of_memory"
"""On the request span: a device allocation of the request failed.

Attributes: bytes wanted, bytes free, and the limit in bytes.
"""
SPAN_SERVER_START = "server start"
"""Root span of a trace per server start, which includes the starts of its engine and workers.

It covers the time from the start of the process until it was ready.
"""
SPAN_PROCESS_START = {"engine": "engine start", "worker": "worker start"}
"""By role: the start of a process that a server starts. The span is below the server's."""
SPAN_IMPORTS = "imports"
SPAN_WEIGHTS = "weights"
SPAN_WARMUP = "warmup"
SPAN_COMPILE = "compile"
SPAN_CAPTURE = "capture"
SPAN_READY = "ready"
STARTUP_PHASES = {
    SPAN_IMPORTS: "import of the watched libraries, with what they import; from the start of the process if it follows within 1 s",
    SPAN_WEIGHTS: "loading of a model, from disk or over the network",
    SPAN_WARMUP: "test run of a model by its engine, with compilation and captures if it does them",
    SPAN_COMPILE: "torch.compile during the warm-up",
    SPAN_CAPTURE: "capture of CUDA graphs during the warm-up",
    SPAN_READY: "the application's own startup: its lifespan until it accepts requests, or the start of its engine",
}
"""The phases of a start, in their usual order. A phase may contain other phases."""
STARTUP_PAUSES = (SPAN_COMPILE, SPAN_CAPTURE)
"""Pauses that are also phases of a start."""
STARTUP_TOTAL = "total"
"""In place of a phase: the whole start."""
EVENT_IMPORTED = "infer.imported"
"""On the `imports` span: the import of a library was complete."""
SPAN_HTTP = "HTTP"
STAGE_DETOKENIZE = "detokenize"
"""No span: a part of `postprocess`, and a stage of the metrics."""
WAITS_BEFORE_ARRIVAL = (SPAN_ACCEPT, SPAN_QUEUE_WAIT)
"""Waits that may have begun before the server saw the request: in its socket, or in a queue of jobs."""
WAIT_STAGES = (SPAN_POOL_WAIT, SPAN_LOCK_WAIT)
"""Waits of a request for a thread or a lock, before its first token. They lie inside other stages or between them."""
NESTED_STAGES = (
    *WAIT_STAGES,
    SPAN_FETCH_MEDIA,
    SPAN_PREPARE_MEDIA,
    SPAN_GRAMMAR,
    SPAN_KV_TRANSFER,
    *MODEL_PARTS,
    STAGE_DETOKENIZE,
)
"""Stages inside other stages: `ingress`, `tokenize`, `queue`, `prefill`, `forward`, `postprocess`."""
STAGES = (
    SPAN_ACCEPT,
    SPAN_INGRESS,
    SPAN_QUEUE_WAIT,
    SPAN_BATCH_WAIT,
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
"""Stages that time device work. Their spans name the clock that timed them."""
