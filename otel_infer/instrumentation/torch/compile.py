"""`torch.compile` at work: compilations that requests wait for, of which one may take a minute.

    CompilationCallbackHandler.run_start_callbacks ─ run_end_callbacks ─▶ a pause

Where torch tells those who asked by `on_compile_start` and `on_compile_end`, and not as one of them:
`torch._dynamo.reset()` forgets them all. It is the outermost compilation of all threads: one inside another (a lazy
backward, a graph that CUDA records) is a part of it, and of two threads the pause is from the first begin to the last end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.ringbuffer.recorder import recorder

CAUSE = "compile"
_HANDLER = "torch._dynamo.callback:CompilationCallbackHandler"

instrumentor = Instrumentor("torch_compile", "torch", ("torch._dynamo",))


class _Compilation:
    """The one that is going on. `started_at` 0: none, or one that began before we came."""

    started_at = 0


_current = _Compilation()


@instrumentor.patch_hot_path(f"{_HANDLER}.run_start_callbacks")
def patch_start_callbacks(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def run_start_callbacks(self: Any, *args: Any, **kwargs: Any) -> Any:
        if hook.alive:
            _current.started_at = _clock.now()
        return original(self, *args, **kwargs)

    return run_start_callbacks


@instrumentor.patch_hot_path(f"{_HANDLER}.run_end_callbacks")
def patch_end_callbacks(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def run_end_callbacks(self: Any, *args: Any, **kwargs: Any) -> Any:
        started_at, _current.started_at = _current.started_at, 0
        if hook.alive and started_at:
            recorder.record_pause(CAUSE, started_at, _clock.now())
        return original(self, *args, **kwargs)

    return run_end_callbacks
