"""What a server does before it serves: it loads models, and starts the loop that batches.

from_pretrained ─▶ weights        a phase of the start; of a model that a request waits for, a stage of the request
manager.start ─▶ ready            where no application says so: see `otel_infer.assembly.startup`
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.transformers._integration import ENGINE, apart, integration, model_name
from otel_infer.instrumentation.transformers.continuous_batching import MANAGER
from otel_infer.instrumentation.transformers.continuous_batching import PART as BATCHING
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import request_span
from otel_infer.tracing import start as ingress

PART = "weights"


class _Loading(threading.local):
    """Whether this thread is loading a model already: some are made of others."""

    going_on = False


_loading = _Loading()


@integration.step_hook("transformers.modeling_utils:PreTrainedModel.from_pretrained", part=PART)
def from_pretrained(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def load(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if _loading.going_on or not hook.alive:
            return original(cls, *args, **kwargs)
        started_at, request = _begin(hook)
        _loading.going_on = True
        model, error_type = None, ""
        try:
            model = original(cls, *args, **kwargs)
            return model
        except BaseException as exc:
            error_type = type(exc).__qualname__
            raise
        finally:
            _loading.going_on = False
            _end(hook, started_at, request, model, error_type)

    return load


def _begin(hook: Hook) -> tuple[int, request_span.LiveRequest | None]:
    started_at, request = _clock.now(), None
    try:
        request = ingress.current()
        if request is None:
            recorder.startup(events.PhaseBegan(started_at, events.WEIGHTS))
    except BaseException as exc:
        hook.fail(exc)
    return started_at, request


def _end(
    hook: Hook, started_at: int, request: request_span.LiveRequest | None, model: Any, error_type: str
) -> None:
    try:
        if request is not None:
            request.stage(events.WEIGHTS, started_at)
            return
        model = model[0] if isinstance(model, tuple) else model  # with `output_loading_info=True`
        name = "" if model is None else model_name(model)
        ended = events.PhaseEnded(_clock.now(), started_at, events.WEIGHTS, ENGINE, name, error_type)
        recorder.startup(ended)
    except BaseException as exc:
        hook.fail(exc)


def _starting(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    begun = apart(original, hook)

    def start(*args: Any, **kwargs: Any) -> Any:
        started_at = _clock.now()
        result = begun(*args, **kwargs)
        if hook.alive and ingress.current() is None:
            ended = events.PhaseEnded(_clock.now(), started_at, events.READY, events.BY_ENGINE, "", "")
            recorder.startup(ended)
        return result

    return start


integration.step_hook(f"{MANAGER}.start", optional=True, part=BATCHING)(_starting)
