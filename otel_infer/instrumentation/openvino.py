"""Records inferences of OpenVINO's compiled models as stages of their request, and the compilation of a model.

    Core.compile_model ─▶ phase `weights`        compiled(…), request.infer ─▶ `forward`
    request.start_async ─ wait, or its callback ─▶ `forward`
    queue.start_async ─ no request is idle ─▶ `queue wait` ─ its callback, or wait_all ─▶ `forward`

Read and run: 2026.4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.guarded_calls import call_safely
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.model_loading import wrap_loading
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.model_calls import (
    ModelLibrary,
    StartedCall,
    StartedCalls,
    begin_call,
    count_rows,
    wrap_call,
)
from otel_infer.ringbuffer import events

PROVIDER = events.OPENVINO
_API = "openvino._ov_api"
_BASE = "openvino._pyopenvino:InferRequest"
ATTRIBUTE = "otel_infer_calls"
"""Attribute of requests and queues: their calls that have been started."""

instrumentor = Instrumentor("openvino", "openvino", ("openvino",), is_engine=True)


def read_compiled_name(compiled: Any) -> str:
    """Returns the name of the model's graph."""
    return str(compiled.get_property("NETWORK_NAME"))


def read_model(request: Any) -> str:
    """Returns the name of the model of an inference request."""
    return read_compiled_name(request.get_compiled_model())


def read_place(request: Any) -> str:
    """Returns the device of the model of an inference request."""
    return ",".join(request.get_compiled_model().get_property("EXECUTION_DEVICES"))


LIBRARY = ModelLibrary(PROVIDER, read_model, read_place=read_place, keeps_names=True)

instrumentor.patch_hot_path(f"{_API}:Core.compile_model", reads=("model",))(
    wrap_loading(PROVIDER, read_compiled_name)
)
instrumentor.patch_hot_path(f"{_API}:InferRequest.infer", reads=("inputs",))(wrap_call(LIBRARY, count_rows))


def _get_started(owner: Any) -> StartedCalls:
    """Returns the calls that a request or queue has started."""
    started: StartedCalls | None = owner.__dict__.get(ATTRIBUTE)
    if started is None:
        started = StartedCalls()
        setattr(owner, ATTRIBUTE, started)
    return started


def _start_call(owner: Any, request: Any, key: Any, inputs: Any, hook: Hook) -> Any:
    """Returns the call that is about to start; None if it is not recorded. `key`: what its callback is given."""
    call = begin_call(LIBRARY, request, hook)
    if call is None:
        return None
    call.leave()
    call_safely(hook, lambda: _get_started(owner).add(key, call, count_rows((inputs,), {})))
    return call


# ── one request ──────────────────────────────────────────────────────────────────────────────────────────────────────


@instrumentor.patch_hot_path(f"{_API}:InferRequest.start_async", reads=("inputs",), part="async")
def _patch_start(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def start_async(self: Any, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        call = _start_call(self, self, None, inputs, hook)
        try:
            return original(self, inputs, *args, **kwargs)
        except BaseException as exc:
            if call is not None:
                call_safely(hook, _get_started(self).fail, call, exc)
            raise

    return start_async


def _patch_wait(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = original(self, *args, **kwargs)
        except BaseException as exc:
            call_safely(hook, _get_started(self).end_last, exc)
            raise
        if result is not False:  # `wait_for` returns it before the end
            call_safely(hook, _get_started(self).end_last)
        return result

    return wait


for _name in ("wait", "wait_for"):
    instrumentor.patch_hot_path(f"{_API}:InferRequest.{_name}", part="async")(_patch_wait)


@instrumentor.patch_hot_path(f"{_BASE}.cancel", optional=True, part="async")
def _patch_cancel(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def cancel(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        started: StartedCalls | None = getattr(self, ATTRIBUTE, None)
        if started is not None:
            call_safely(hook, started.end_last, GeneratorExit())
        return result

    return cancel


@instrumentor.patch_hot_path(f"{_API}:InferRequest.set_callback", part="async")
def _patch_callback(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def set_callback(self: Any, *args: Any, **kwargs: Any) -> Any:
        started = _get_started(self)  # the callback must not keep the request alive
        if not args and "callback" in kwargs:
            args, kwargs = (kwargs["callback"],), {k: v for k, v in kwargs.items() if k != "callback"}
        return original(self, *_follow_callback(args, lambda *_: started.end_last(), hook), **kwargs)

    return set_callback


def _follow_callback(
    args: tuple[Any, ...], end: Callable[..., StartedCall | None], hook: Hook
) -> tuple[Any, ...]:
    """Returns the arguments of `set_callback`, whose callback, the first, calls `end` before, and runs in the call's context."""
    if not args or not callable(args[0]):  # the library refuses it
        return args
    callback = args[0]

    def end_and_call(*given: Any) -> Any:
        started: StartedCall | None = call_safely(hook, end, *given)
        return callback(*given) if started is None else started.context.run(callback, *given)

    return end_and_call, *args[1:]


# ── a queue of requests ──────────────────────────────────────────────────────────────────────────────────────────────


@instrumentor.patch_hot_path(
    f"{_API}:AsyncInferQueue.start_async", reads=("inputs", "userdata"), part="queue"
)
def _patch_queue_start(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def start_async(self: Any, inputs: Any = None, userdata: Any = None, *args: Any, **kwargs: Any) -> Any:
        is_full = not self.is_ready()
        call = _start_call(self, self[0], userdata, inputs, hook)
        try:
            if call is not None and is_full:
                self.get_idle_request_id()  # waits, as the original does then
                now = _clock.now()
                call.request.record_event(events.StageEnded(now, call.started_at, events.QUEUE_WAIT, 0))
                call.started_at = now
            return original(self, inputs, userdata, *args, **kwargs)
        except BaseException as exc:
            if call is not None:
                call_safely(hook, _get_started(self).fail, call, exc)
            raise

    return start_async


@instrumentor.patch_hot_path(f"{_API}:AsyncInferQueue.set_callback", part="queue")
def _patch_queue_callback(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def set_callback(self: Any, *args: Any, **kwargs: Any) -> Any:
        started = _get_started(self)
        followed = _follow_callback(args, lambda _, userdata: started.end_one(userdata), hook)
        return original(self, *followed, **kwargs)

    return set_callback


@instrumentor.patch_hot_path(f"{_API}:AsyncInferQueue.wait_all", part="queue")
def _patch_wait_all(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """For a queue without a callback, and for the calls that failed: they do not call back."""

    def wait_all(self: Any, *args: Any, **kwargs: Any) -> Any:
        started = _get_started(self)
        waited = started.list_running()  # other threads may start more
        try:
            result = original(self, *args, **kwargs)
        except BaseException as exc:
            call_safely(hook, started.end_these, waited, exc)
            raise
        call_safely(hook, started.end_these, waited)
        return result

    return wait_all
