"""Hooks that record the start of a server: load of a model's weights, start of the batching loop.

* `from_pretrained` records `weights`, as a phase of the start or a stage of the request that waits for it.
* `manager.start` records `ready`, for servers whose application does not; see `otel_infer.assembly.startup`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.engines import read_model_name
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
from otel_infer.tracing import request_span, start

PART = "weights"


class _ModelLoading(threading.local):
    """Whether this thread already loads a model: a model may load others as its components."""

    is_loading = False


_loading = _ModelLoading()


@instrumentor.patch_hot_path("transformers.modeling_utils:PreTrainedModel.from_pretrained", part=PART)
def wrap_from_pretrained(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if _loading.is_loading or not hook.alive:
            return original(cls, *args, **kwargs)
        started_at, request = _begin_loading(hook)
        _loading.is_loading = True
        model, error_type = None, ""
        try:
            model = original(cls, *args, **kwargs)
            return model
        except BaseException as exc:
            error_type = type(exc).__qualname__
            raise
        finally:
            _loading.is_loading = False
            _end_loading(hook, started_at, request, model, error_type)

    return from_pretrained


def _begin_loading(hook: Hook) -> tuple[int, request_span.RequestSpan | None]:
    started_at, request = _clock.now(), None
    try:
        request = start.current_request()
        if request is None:
            recorder.record_startup(events.PhaseBegan(started_at, events.WEIGHTS))
    except BaseException as exc:
        hook.mark_failed(exc)
    return started_at, request


def _end_loading(
    hook: Hook, started_at: int, request: request_span.RequestSpan | None, model: Any, error_type: str
) -> None:
    try:
        if request is not None:
            request.record_stage(events.WEIGHTS, started_at, events.RAISED if error_type else 0)
            return
        model = model[0] if isinstance(model, tuple) else model  # with `output_loading_info=True`
        name = "" if model is None else read_model_name(model)
        phase = events.PhaseEnded(_clock.now(), started_at, events.WEIGHTS, ENGINE, name, error_type)
        recorder.record_startup(phase)
    except BaseException as exc:
        hook.mark_failed(exc)


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
