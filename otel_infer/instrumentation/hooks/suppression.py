"""Context flags that suppress torch spans where an engine, a batch or an outer model records the work."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from otel_infer.instrumentation.hooks.probe import Hook

torch_suppressed: ContextVar[bool] = ContextVar("otel_infer-torch-suppressed", default=False)
"""True where the `torch` instrumentor records no forward pass.

A context variable, not a thread-local: tasks share a thread, and work moves to other threads.
"""

loading_for_engine: ContextVar[bool] = ContextVar("otel_infer-loading-for-engine", default=False)
"""True while an engine loads a model. The engine's instrumentor records the model, so `torch` ignores it."""


def call_with_flag(
    variable: ContextVar[bool], function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Returns what a function returns, during which the flag is set."""
    token = variable.set(True)
    try:
        return function(*args, **kwargs)
    finally:
        variable.reset(token)


def _make_flag_patch(variable: ContextVar[bool]) -> Callable[[Callable[..., Any], Hook], Callable[..., Any]]:
    """Returns a wrapper factory that sets the flag while a function runs.

    It suits only functions that return when their work is done, not coroutines or generators.
    """

    def make_wrapper(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return call_with_flag(variable, original, args, kwargs)

        return call

    return make_wrapper


suppress_torch, mark_engine_models = _make_flag_patch(torch_suppressed), _make_flag_patch(loading_for_engine)
"""Wrapper factories for `patch_hot_path`, which set `torch_suppressed` and `loading_for_engine`."""
