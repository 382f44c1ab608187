"""Records compilations by `torch.compile` as pauses. Requests wait for them, up to a minute each.

    CompilationCallbackHandler.run_start_callbacks ─ run_end_callbacks ─▶ a pause

The handler's methods are patched. Callbacks registered with `on_compile_start` and `on_compile_end` are not
used, because `torch._dynamo.reset()` removes them all. torch reports only the outermost compilation of all
threads. A nested one (a lazy backward, a CUDA graph recording) is part of it. With two threads the pause
lasts from the first begin to the last end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder

_HANDLER = "torch._dynamo.callback:CompilationCallbackHandler"

instrumentor = Instrumentor("torch_compile", "torch", ("torch._dynamo",))


class _Compilation:
    """The current compilation. `started_at`: monotonic ns; 0 = none, or it began before the hooks."""

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
            recorder.record_pause(events.PAUSE_COMPILE, started_at, _clock.now())
        return original(self, *args, **kwargs)

    return run_end_callbacks
