"""CUDA graphs while they are captured: the engine's thread is at it, and whoever is in flight waits.

    CUDAGraph.capture_begin ─ capture_end ─▶ a pause

Whoever captures comes by here: `torch.cuda.graph`, engines, torch's compiler; what that captures inside a compilation is told
of as a capture. Nothing of CUDA is touched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from otel_infer import clock
from otel_infer.integrations._base import Integration
from otel_infer.patching import Hook
from otel_infer.ring.recorder import recorder

CAUSE = "capture"
_GRAPH = "torch.cuda.graphs:CUDAGraph"

integration = Integration("cuda", "torch", ("torch.cuda.graphs",))


class _Capture(threading.local):
    """The one of this thread, of which there is one at a time. `started_at` 0: none, or one that began before we came."""

    started_at = 0


_current = _Capture()


@integration.step_hook(f"{_GRAPH}.capture_begin")
def capture_begin(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        started_at = clock.now()
        result = original(self, *args, **kwargs)
        if hook.alive:
            _current.started_at = started_at
        return result

    return capture_begin


@integration.step_hook(f"{_GRAPH}.capture_end")
def capture_end(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        started_at, _current.started_at = _current.started_at, 0
        try:
            return original(self, *args, **kwargs)
        finally:
            if hook.alive and started_at:
                recorder.paused(CAUSE, started_at, clock.now())

    return capture_end
