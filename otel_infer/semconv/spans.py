"""Span and event names, stages and phases on the wire."""

from __future__ import annotations

SCOPE = "otel_infer"
SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
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
SPAN_SERVER_START = "server start"
"""A trace of its own for each server, with those of its engine and workers in it, from its beginning until it was ready."""
SPAN_PROCESS_START = {"engine": "engine start", "worker": "worker start"}
"""By role: processes that a server starts; their spans are below the server's."""
SPAN_IMPORTS = "imports"
SPAN_WEIGHTS = "weights"
SPAN_WARMUP = "warmup"
SPAN_COMPILE = "compile"
SPAN_CAPTURE = "capture"
SPAN_READY = "ready"
STARTUP_PHASES = {
    SPAN_IMPORTS: "process began → the last library that was waited for was imported",
    SPAN_WEIGHTS: "a model was loaded, from wherever its weights lay",
    SPAN_WARMUP: "an engine tried its model: with compilation and captures, where it does that",
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
NESTED_STAGES = (SPAN_FETCH_MEDIA, SPAN_PREPARE_MEDIA, SPAN_GRAMMAR, SPAN_KV_TRANSFER, STAGE_DETOKENIZE)
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
