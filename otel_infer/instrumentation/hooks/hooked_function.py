"""Compiled forms of hooks that have nothing to do in most calls (`_hooked.c`), where that was built."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, cast

from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.suppression import torch_suppressed
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.native import native
from otel_infer.tracing import context
from otel_infer.tracing.request_span import REQUEST_KEY, RequestSpan

_PROPAGATE, _TOKENIZE = range(2)
"""Kinds of a hooked function, as numbered in `_hooked.c`."""
Function = Callable[..., Any]


def compile_propagating(original: Function, hook: Hook, call: Function) -> Function:
    """Returns a compiled form of `call`, which it calls if there is a request or a suppression to propagate."""
    return _compile(_PROPAGATE, original, hook, call, torch_suppressed.get)


def compile_tokenizing(
    original: Function, hook: Hook, call: Function, thread_state: Any, count_tokens: Function
) -> Function:
    """Returns a compiled form of `call`: `original` is a stage of the current request, if there is one.

    `thread_state.busy`: whether the calling thread is inside such a stage.
    """
    return _compile(_TOKENIZE, original, hook, call, (thread_state, count_tokens, events.TOKENIZE))


def _compile(kind: int, original: Function, hook: Hook, call: Function, needed: Any) -> Function:
    if native is None or context.variable is None:
        return call
    get_context = context.variable.get
    compiled: Any = native.HookedFunction(
        kind, original, call, hook, MethodType, RequestSpan, REQUEST_KEY, get_context, needed
    )
    # Libraries look there for the flag of a coroutine function, for example.
    for name in ("__code__", "__defaults__", "__kwdefaults__", "__globals__"):
        setattr(compiled, name, getattr(call, name))
    return cast("Function", compiled)
