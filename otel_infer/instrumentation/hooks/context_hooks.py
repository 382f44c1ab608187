"""Compiled forms of hooks that depend on the current request (`_context_hooks.c`), where they were built."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from otel_infer.instrumentation.hooks.compiled_hook import compile_hook
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.suppression import torch_suppressed
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.native import native
from otel_infer.tracing import context
from otel_infer.tracing.request_span import REQUEST_KEY, RequestSpan

_known = (
    (RequestSpan, REQUEST_KEY, context.variable, torch_suppressed)
    if native is not None and context.variable is not None
    else None
)
Function = Callable[..., Any]


def compile_thread_work(original: Function, hook: Hook, call: Function) -> Function:
    """Returns a compiled form of `call`, which it calls if there is a request or a suppression to propagate."""
    return compile_hook("work for a thread", _known, original, hook, call)


def compile_tokenizer(original: Function, hook: Hook, call: Function, count_tokens: Function) -> Function:
    """Returns a compiled form of `call`: `original` is a stage of the current request, if there is one."""
    return compile_hook("tokenizer", _known, original, hook, call, (count_tokens, events.TOKENIZE))


def compile_model_call(original: Function, hook: Hook, call: Function, details: tuple[Any, ...]) -> Function:
    """Returns a compiled form of `call`, which calls it for a model that is not known yet, and outside of requests.

    `details`: the library, its known models by their ids, the stage, `count_rows(args, kwargs)`, and whether that is
    `model_calls.count_rows`, which compiled code has as well.
    """
    return compile_hook("call of a model", _known, original, hook, call, details)


def compile_queue_put(
    original: Function, hook: Hook, call: Function, states: tuple[dict[int, Any], type]
) -> Function:
    """Returns a compiled form of `call`, which calls it only where a request puts an item whose queue has no state yet.

    `states`: states by id of a queue, and the type of the state of a queue that is followed.
    """
    return compile_hook("put into a queue", _known, original, hook, call, states)


def compile_queue_take(
    original: Function, hook: Hook, call: Function, following: tuple[dict[int, Any], type, Function, Function]
) -> Function:
    """Returns a compiled form of `call`, which follows an item only if its queue is followed.

    `following`: as `states` above, then `end_take(state, item, is_taken)`, which is called for all items but those for
    which `take_for_worker(work, request, item_id)` is: the first one of a batch.
    """
    return compile_hook("take from a queue", _known, original, hook, call, (*following, events.QUEUE_WAIT))


def compile_queue_get(original: Function, hook: Hook, call: Function, follow: Function) -> Function:
    """Returns a compiled form of `call`, which calls it only for a worker that has no work yet.

    `follow(queue, work)`: what is called for a worker that adds to its batch.
    """
    return compile_hook("get of a queue", _known, original, hook, call, (follow,))


def compile_sleep(original: Function, hook: Hook, call: Function) -> Function:
    """Returns a compiled form of `call`, which calls it only for a worker."""
    return compile_hook("sleep of a task", _known, original, hook, call)


class PythonTokenizerCall(threading.local):
    """Whether this thread is inside a timed call of a tokenizer."""

    busy = False


tokenizer_call: PythonTokenizerCall = PythonTokenizerCall() if native is None else native.TokenizerCall()
