"""Puts a compiled hook (`_compiled_hook.c`) in place of a Python hook, where it was built."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, cast

from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.ringbuffer.native import native


def compile_hook(
    place: str,
    known: Any,
    original: Callable[..., Any],
    hook: Hook,
    call: Callable[..., Any],
    details: object = None,
) -> Callable[..., Any]:
    """Returns a compiled form of the hook `call`, which calls it for all but the frequent case; or `call` itself.

    `known`: what the compiled code of `place` needs; None where it is not built. `details`: of this hook.
    """
    if known is None:
        return call
    compiled: Any = native.CompiledHook(place, known, original, call, hook, MethodType, details)
    # Servers look there for the flag of a coroutine function.
    for name in ("__code__", "__defaults__", "__kwdefaults__", "__globals__"):
        setattr(compiled, name, getattr(call, name))
    return cast("Callable[..., Any]", compiled)
