"""Makes hooks on functions that an engine calls once per step or block: compiled (`_step_hook.c`) where that was built.

A compiled hook calls the original and records the usual step. Python code records all others.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, cast

from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.ringbuffer.native import native

CB_SCHEDULE, CB_UPDATE, VLLM_SCHEDULE, VLLM_UPDATE, VLLM_EVICT = range(5)
"""Places of a hook, as numbered in `_step_hook.c`."""


def compile_step_hook(
    place: int, original: Callable[..., Any], record: Any, hook: Hook, call: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns the hook `call` on `original` in its compiled form, or `call` itself.

    `record(self, result, hook)` records any step after the original was called. For `VLLM_UPDATE` it is the whole
    hook, with such a function as `finish`. For `VLLM_EVICT` it is the counter.
    """
    if native is None:
        return call
    return cast("Callable[..., Any]", native.StepHook(place, original, record, hook, MethodType))
