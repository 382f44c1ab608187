"""Hooks that record the start of a server: load of a model's weights, start of the batching loop.

* `from_pretrained` records `weights`, as a phase of the start or a stage of the request that waits for it.
* `manager.start` records `ready`, for servers whose application does not; see `otel_infer.assembly.startup`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.engines import read_model_name
from otel_infer.instrumentation.hooks.model_loading import wrap_loading
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.transformers._instrumentor import (
    ENGINE,
    instrumentor,
    wrap_in_empty_context,
)
from otel_infer.instrumentation.transformers.continuous_batching import MANAGER
from otel_infer.instrumentation.transformers.continuous_batching import PART as BATCHING
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import start

PART = "weights"


def _read_loaded_name(loaded: Any) -> str:
    """Returns the name of what `from_pretrained` returned: a model, or a pair with `output_loading_info=True`."""
    return read_model_name(loaded[0] if isinstance(loaded, tuple) else loaded)


instrumentor.patch_hot_path("transformers.modeling_utils:PreTrainedModel.from_pretrained", part=PART)(
    wrap_loading(ENGINE, _read_loaded_name)
)


def _wrap_manager_start(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    start_in_empty_context = wrap_in_empty_context(original, hook)

    def start_manager(*args: Any, **kwargs: Any) -> Any:
        started_at = _clock.now()
        result = start_in_empty_context(*args, **kwargs)
        if hook.alive and start.current_request() is None:
            phase = events.PhaseEnded(_clock.now(), started_at, events.READY, events.BY_ENGINE, "", "")
            recorder.record_startup(phase)
        return result

    return start_manager


instrumentor.patch_hot_path(f"{MANAGER}.start", optional=True, part=BATCHING)(_wrap_manager_start)
