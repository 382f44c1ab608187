"""Records the runs of ONNX Runtime's sessions as stages of their request, the load of a model, and copies to and from a device.

    InferenceSession(…) ─▶ phase `weights`        session.run, run_with_iobinding, run_with_ort_values, run_async ─▶ `forward`
    IOBinding.bind_cpu_input, ortvalue_from_numpy ─▶ `h2d`                    copy_outputs_to_cpu, OrtValue.numpy ─▶ `d2h`

`run_async` ends in a thread of the runtime. Read and run: 1.32.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.engines import read_file_name
from otel_infer.instrumentation.hooks.guarded_calls import call_safely
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.model_loading import wrap_loading
from otel_infer.instrumentation.hooks.probe import Hook, WrapperFactory
from otel_infer.instrumentation.model_calls import (
    ModelLibrary,
    begin_call,
    count_rows,
    forget_model,
    wrap_call,
)
from otel_infer.ringbuffer import events
from otel_infer.tracing import start

PROVIDER = events.ONNXRUNTIME
_MODULE = "onnxruntime.capi.onnxruntime_inference_collection"
_CPU = "CPUExecutionProvider"

instrumentor = Instrumentor("onnxruntime", "onnxruntime", ("onnxruntime",), is_engine=True)


def read_model(session: Any) -> str:
    """Returns the name of a session's model: of its file or folder, else of its graph."""
    path = getattr(session, "_model_path", None)
    return read_file_name(str(path)) if path else str(session.get_modelmeta().graph_name)


def read_place(session: Any) -> str:
    """Returns the execution provider that is asked first."""
    return str(next(iter(session.get_providers()), ""))


LIBRARY = ModelLibrary(PROVIDER, read_model, read_place=read_place, keeps_names=True)

instrumentor.patch_hot_path(f"{_MODULE}:InferenceSession.__init__")(wrap_loading(PROVIDER, read_model))
for _name, _reads in (
    ("run", ("output_names", "input_feed")),
    ("run_with_ort_values", ("output_names", "input_dict_ort_values")),
    ("run_with_iobinding", ("iobinding",)),
):
    instrumentor.patch_hot_path(f"{_MODULE}:Session.{_name}", reads=_reads)(wrap_call(LIBRARY, count_rows))


@instrumentor.patch_hot_path(f"{_MODULE}:Session.set_providers", optional=True, part="providers")
def _patch_set_providers(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def set_providers(self: Any, *args: Any, **kwargs: Any) -> Any:
        forget_model(self)
        return original(self, *args, **kwargs)

    return set_providers


@instrumentor.patch_hot_path(
    f"{_MODULE}:Session.run_async", reads=("input_feed", "callback", "user_data"), optional=True, part="async"
)
def _patch_run_async(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def run_async(
        self: Any,
        output_names: Any,
        input_feed: Any,
        callback: Any,
        user_data: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        around = contextvars.copy_context()
        call = begin_call(LIBRARY, self, hook) if callable(callback) else None  # else the library refuses it
        if call is None:
            return original(self, output_names, input_feed, callback, user_data, *args, **kwargs)
        rows = count_rows((input_feed,), {})

        def end_and_call(results: Any, data: Any, error: str) -> Any:
            call_safely(hook, call.end, rows, RuntimeError() if error else None)
            return around.run(callback, results, data, error)

        try:
            return original(self, output_names, input_feed, end_and_call, user_data, *args, **kwargs)
        except BaseException as exc:
            call_safely(hook, call.end, rows, exc)
            raise
        finally:
            call.leave()

    return run_async


# ── copies ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _patch_copy(stage: str, count_bytes: Callable[[tuple[Any, ...], dict[str, Any]], int]) -> WrapperFactory:
    """Returns a factory for a function that copies. `count_bytes`: of its arguments; 0 = nothing leaves its memory."""

    def make_wrapper(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        def copy(*args: Any, **kwargs: Any) -> Any:
            request = start.find_request() if hook.alive else None
            if request is None:
                return original(*args, **kwargs)
            started_at = _clock.now()
            result = original(*args, **kwargs)
            try:
                size = count_bytes(args, kwargs)
                if size and not request.ended:
                    moved = _clock.now(), started_at, stage, size, events.PINNED_UNKNOWN
                    request.record_event(events.make_tuple(events.BytesMoved, moved))
            except BaseException as exc:
                hook.mark_failed(exc)
            return result

        return copy

    return make_wrapper


def _count_bound(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns the bytes of `bind_cpu_input(binding, name, array)`, if the session runs on a device."""
    array = args[2] if len(args) > 2 else kwargs.get("arr_on_cpu")
    return 0 if read_place(args[0]._session) == _CPU else int(getattr(array, "nbytes", 0))


def _count_outputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns the bytes of the outputs of a binding that are on a device."""
    return sum(_count_value((value,), {}) for value in args[0].get_outputs())


def _count_made(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns the bytes of `ortvalue_from_numpy(class, array, device_type)`, if the value is made on a device."""
    device = args[2] if len(args) > 2 else kwargs.get("device_type", "cpu")
    return 0 if device == "cpu" else int(args[1].nbytes)


def _count_value(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns the bytes of a value that is on a device."""
    value = args[0]
    return 0 if value.device_name().lower() == "cpu" else int(value.tensor_size_in_bytes())


for _name, _stage, _count in (
    ("IOBinding.bind_cpu_input", "h2d", _count_bound),
    ("IOBinding.copy_outputs_to_cpu", "d2h", _count_outputs),
    ("OrtValue.ortvalue_from_numpy", "h2d", _count_made),
    ("OrtValue.numpy", "d2h", _count_value),
):
    instrumentor.patch_hot_path(f"{_MODULE}:{_name}", optional=True, part="copies")(
        _patch_copy(_stage, _count)
    )
