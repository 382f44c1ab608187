"""Who tells of a forward pass: inside a claim, `torch` keeps silent about the models that are run."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from otel_infer.instrumentation.hooks.probe import Hook

torch_suppressed: ContextVar[bool] = ContextVar("otel_infer-claimed", default=False)
"""A context variable and not one of the thread: tasks take turns on a thread, and work moves to others."""

loading_for_engine: ContextVar[bool] = ContextVar("otel_infer-owned", default=False)
"""Models that are loaded in here are an engine's, which tells of them wherever they run."""


def _make_flag_patch(variable: ContextVar[bool]) -> Callable[[Callable[..., Any], Hook], Callable[..., Any]]:
    """Makes step hooks that set it for as long as a function runs; for those that return when their work is done."""

    def make_wrapper(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        def call_with_flag(*args: Any, **kwargs: Any) -> Any:
            token = variable.set(True)
            try:
                return original(*args, **kwargs)
            finally:
                variable.reset(token)

        return call_with_flag

    return make_wrapper


suppress_torch, mark_engine_models = _make_flag_patch(torch_suppressed), _make_flag_patch(loading_for_engine)
"""A step hook that claims whatever runs inside; one that says whose the models are that it loads."""
