"""Causes: what the time of a request is attributed to."""

from __future__ import annotations

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
CAUSE_HOST_BUBBLE = "host_bubble"
CAUSE_TRANSFER = "transfer"
CAUSE_APPLICATION = "application"
CAUSE_DETOKENIZE = "detokenize"
CAUSE_EGRESS = "egress"
CAUSE_GC = "gc"
CAUSE_COMPILE = "compile"
CAUSE_CAPTURE = "capture"
CAUSE_EVENT_LOOP = "event_loop"
CAUSE_WARMUP = "first_use"
CAUSE_THROTTLED = "throttled"
CAUSE_GPU_THROTTLED = "gpu_throttled"
CAUSE_STARVED = "starved"
CAUSE_PAGE_FAULTS = "page_faults"
CAUSE_BLOCKED = "blocked"
CAUSE_PAUSE = "pause"
CAUSE_UNEXPLAINED = "unexplained"
PAUSE_CAUSES = (CAUSE_GC, CAUSE_COMPILE, CAUSE_CAPTURE, CAUSE_THROTTLED)
"""Those that hold up a whole process; any other such cause is a `pause`."""
EVENT_LOOP_CAUSES = (CAUSE_EVENT_LOOP,)
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
    CAUSE_HOST_BUBBLE: "between two steps of the engine; where a device is timed, all the time it had nothing to do in between",
    CAUSE_TRANSFER: "to and from the device",
    CAUSE_APPLICATION: "stages the application named itself, and the time between two generations of one request",
    CAUSE_DETOKENIZE: "tokens to text, after the last token",
    CAUSE_EGRESS: "last token to last byte handed over",
    CAUSE_GC: "garbage collection",
    CAUSE_COMPILE: "torch compiling",
    CAUSE_CAPTURE: "torch capturing a CUDA graph",
    CAUSE_WARMUP: "what a step took longer since it was the first of its engine, or of its size",
    CAUSE_EVENT_LOOP: "the event loop was kept from going on: by a call that blocks it, or for want of a core or of the GIL",
    CAUSE_THROTTLED: "the CPU quota was used up",
    CAUSE_GPU_THROTTLED: "what steps took longer while a GPU's clocks were held down",
    CAUSE_STARVED: "the engine's thread could have run and had no CPU",
    CAUSE_PAGE_FAULTS: "the kernel mapped memory to the engine's thread, page by page",
    CAUSE_BLOCKED: "the engine's thread waited, for a lock, the GIL, a disk or the device",
    CAUSE_PAUSE: "something else that held up the process",
    CAUSE_UNEXPLAINED: "nobody saw",
}
