"""Records the outermost `forward` of torch models that no engine runs (BERT-like, vision) as a stage.

    model.eval() ─▶ train(False) ─▶ the model is outermost         model(...) ─▶ forward ─▶ inner modules, at no cost

`eval()` is called on whole models, by applications and by `from_pretrained`, and recurses into the inner
modules. A model that is unpickled or copied keeps its mode. Calls of such a model are intercepted through `_compiled_call_impl`, the attribute in which
`Module.compile` stores the function to call instead. A descriptor on the class takes its place. So no module
holds an object of ours, and copies, replicas and pickles are unchanged. Nothing is recorded while torch is
suppressed: inside `generate`, a batch or another model.

A call is a stage of the current request. Without a request it becomes a separate request, unless gradients
are enabled, because that is a training loop. Stage times are host times: on an accelerator the work may still
be running when `forward` returns. Device time is recorded in addition where the device is timed.
A part of a model that is a class of the application is watched as well, so a call of another method (`encode_image`, `forward`)
is seen by the parts that it calls. Models that were loaded before `instrument()` are not recorded.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from otel_infer import _clock
from otel_infer.gpu.timed_work import StageWork
from otel_infer.gpu.timing import UNTIMED, timing
from otel_infer.instrumentation.hooks.engines import read_model_name
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.suppression import call_with_flag, loading_for_engine, torch_suppressed
from otel_infer.instrumentation.hooks.target import TargetMismatch
from otel_infer.instrumentation.torch.call_descriptor import (
    CALL_ATTRIBUTE,
    CallDescriptor,
    ModelNames,
    get_call,
    read_batch_size,
)
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import request_span, start
from otel_infer.tracing.context import current_context, detach
from otel_infer.tracing.deferred_request import DeferredRequest
from otel_infer.tracing.outcome import classify_exception
from otel_infer.tracing.request_span import REQUEST_KEY
from otel_infer.tracing.work import Work

PROVIDER, OPERATION, STAGE = events.TORCH, "inference", events.FORWARD
ENGINE_MODULES = ("vllm.", "sglang.", "tensorrt_llm.")
"""Prefixes of engine modules. Their models are ignored, because one forward pass serves many requests."""

_MODULE = "torch.nn.modules.module:Module"
_LAYER_MODULES = "torch.nn.modules."

_outermost_modules: dict[int, weakref.ref[Any]] = {}
_patched_classes: weakref.WeakSet[type] = weakref.WeakSet()
_model_names: dict[int, ModelNames] = {}
"""Names of the outermost modules that were called, by their ids."""
_wholes: dict[int, weakref.ref[Any]] = {}
"""The models that modules are parts of, by the ids of the parts."""


class _TorchInstrumentor(Instrumentor):
    """The instrumentor for torch, which also removes its descriptor from the classes of models."""

    def remove(self) -> None:
        super().remove()
        for owner in list(_patched_classes):
            if owner.__dict__.get(CALL_ATTRIBUTE) is _call_descriptor:
                delattr(owner, CALL_ATTRIBUTE)
        _patched_classes.clear()


instrumentor = _TorchInstrumentor("torch", "torch", ("torch",), is_engine=True)


def _call_traced(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a module as a stage of its request. Most calls enter no other function of ours but the last."""
    inner = module.__dict__.get(CALL_ATTRIBUTE) or module._call_impl
    started_at, token, handle = _clock.now(), None, UNTIMED
    try:
        request = None if _call_descriptor.is_tracing() else current_context().get(REQUEST_KEY)
        if type(request) is DeferredRequest or type(request) is Work:
            request = start.begin_model_call()
        if request is None or request.ended:
            request, token = _open_request(module)
        elif not request.is_named and not request.has_forward_name:  # the first model that served it
            request.has_forward_name = True
            request.set_operation(*(_model_names.get(id(module)) or _read_names(module)).operation)
        if request is not None and started_at >= timing.thread.check_due_at:
            handle = _begin_timing(module)
    except BaseException as exc:
        _call_descriptor.hook.mark_failed(exc)
        request = None
    if request is None:
        # Parts of a model that is trained are no inferences either, such as a backbone without gradients.
        is_training = getattr(module, "training", False) and _call_descriptor.is_grad_enabled()
        if is_training:
            return call_with_flag(torch_suppressed, inner, args, kwargs)
        return inner(*args, **kwargs)
    flag, failure = torch_suppressed.set(True), None
    try:
        return inner(*args, **kwargs)
    except BaseException as exc:
        failure = exc
        raise
    finally:
        torch_suppressed.reset(flag)
        try:
            first: Any = args[0] if args else next(iter(kwargs.values()), None)
            shape: Any = first.shape if type(first) is _call_descriptor.tensor else ()
            items = int(shape[0]) if len(shape) > 1 else read_batch_size(args, kwargs)
            items = items if failure is None else events.RAISED
            if token is None and handle == UNTIMED:
                request.record_stage(STAGE, started_at, items)
            else:
                _end_forward(request, started_at, token, handle, failure, items)
        except BaseException as exc:
            _call_descriptor.hook.mark_failed(exc)
        del failure  # breaks the reference cycle with its traceback


def _open_request(module: Any) -> tuple[request_span.RequestSpan | None, Any]:
    """Returns a separate request for a call, and its context token; None if the call is not recorded."""
    if not recorder.active or _call_descriptor.is_grad_enabled() or _call_descriptor.is_tracing():
        return None, None
    (operation, provider, model), name = _model_names.get(id(module)) or _read_names(module)
    request = start.open_request(
        name, owner=PROVIDER, operation=operation, provider=provider, model=model, generative=False
    )
    _call_descriptor.renew_separate_requests()
    return request, None if request is None else request.attach()


def _end_forward(
    request: request_span.RequestSpan,
    started_at: int,
    token: Any,
    timing_handle: Any,
    failure: BaseException | None,
    items: int,
) -> None:
    """Ends a call that is timed on a device, or is a separate request (with a context `token`)."""
    if token is not None:
        detach(token)
        started_at = request.arrived_at
    try:
        if timing_handle != UNTIMED:
            timing.end(timing_handle, StageWork(STAGE, request.handle))
    except Exception as exc:  # the device failed; the stage is recorded nevertheless
        _call_descriptor.hook.mark_failed(exc)
    request.record_stage(STAGE, started_at, items)
    if token is not None:
        request.close(*classify_exception(failure))


def _end_failed(
    request: request_span.RequestSpan, started_at: int, token: Any, failure: BaseException
) -> None:
    """Ends a call that compiled code began, and that raised."""
    _end_forward(request, started_at, token, UNTIMED, failure, events.RAISED)


def _begin_timing(module: Any) -> Any:
    """Begins device timing on the device of the module's weights; without weights on the thread's device."""
    device = None
    if timing.is_device_timed:
        with contextlib.suppress(Exception):
            device = next(module.parameters()).device
    try:
        return timing.begin(on=device)
    except Exception as exc:  # the device failed; the request is open already and goes on
        _call_descriptor.hook.mark_failed(exc)
        return UNTIMED


def _read_names(module: Any) -> ModelNames:
    whole = _wholes.get(id(module))
    model = read_model_name((whole() if whole is not None else None) or module)
    names = _model_names[id(module)] = ModelNames((OPERATION, PROVIDER, model), f"{OPERATION} {model}")
    return names


_call_descriptor = CallDescriptor(_outermost_modules, _call_traced)
_call_descriptor.connect_compiled(_model_names, STAGE, PROVIDER, _end_failed, read_batch_size)


# ── outermost modules ────────────────────────────────────────────────────────────────────────────────────────────


class _TrainRecursion(threading.local):
    """Whether this thread is inside a `train` call that recurses into the inner modules."""

    is_active = False


_train_recursion = _TrainRecursion()


@instrumentor.patch_hot_path(f"{_MODULE}.train", reads=("mode",))
def patch_train(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Returns a `train` that registers the module as outermost on `train(False)`, i.e. on `eval()`."""
    # torch is still being imported here: only modules up to `torch.nn.modules.module` are loaded.
    if not hasattr(sys.modules["torch.nn.modules.module"].Module, CALL_ATTRIBUTE):
        raise TargetMismatch(_MODULE, f"there is no {CALL_ATTRIBUTE}")
    _call_descriptor.hook = hook
    for ref in list(_outermost_modules.values()):  # registered before an `uninstrument()`
        _patch_class(type(ref()))

    def train(self: Any, mode: bool = True) -> Any:
        if _train_recursion.is_active or not hook.alive:
            return original(self, mode)
        _train_recursion.is_active = True
        try:
            result = original(self, mode)
        finally:
            _train_recursion.is_active = False
        try:
            if mode:
                for part in self.modules() if _outermost_modules else ():
                    _unwatch(id(part))
            else:
                watch_module(self)
        except BaseException as exc:
            hook.mark_failed(exc)
        return result

    return train


@instrumentor.patch_hot_path(f"{_MODULE}.__setstate__", reads=("state",))
def _patch_setstate(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Returns a `__setstate__` that registers a module which was in evaluation mode: unpickled, loaded or copied.

    Inner modules get their state before the module that contains them.
    """

    def setstate(self: Any, state: Any) -> None:
        original(self, state)
        if hook.alive:
            try:
                if self._modules and _outermost_modules:
                    for inner in self.modules():
                        _unwatch(id(inner))
                if self.__dict__.get("training") is False:
                    watch_module(self)
            except BaseException as exc:
                hook.mark_failed(exc)

    return setstate


@instrumentor.patch_hot_path("torch._dynamo.eval_frame:OptimizedModule.__init__", part="compile")
def patch_optimized_module(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Returns an `__init__` by which `torch.compile(model)` is outermost if the model was.

    Our functions are excluded from compilation by dynamo.
    """
    dynamo = sys.modules["torch._dynamo.eval_frame"]
    # Before torch 2.7 `skip_code` exists only in the C extension.
    skip_code = getattr(dynamo, "skip_code", None) or sys.modules["torch"]._C._dynamo.eval_frame.skip_code
    excluded = (
        get_call,
        _call_traced,
        call_with_flag,
        _open_request,
        _end_failed,
        _end_forward,
        read_batch_size,
    )
    for function in excluded:
        skip_code(function.__code__)

    def init_optimized(self: Any, mod: Any, *args: Any, **kwargs: Any) -> None:
        original(self, mod, *args, **kwargs)
        if hook.alive:
            try:
                if id(mod) in _outermost_modules:
                    watch_module(self)
            except BaseException as exc:
                hook.mark_failed(exc)

    return init_optimized


def watch_module(module: Any) -> None:
    """Registers a whole model, and those of its parts that are classes of the application."""
    if _watch_one(module):
        for part in module._modules.values():
            if part is None or type(part).__module__.startswith(_LAYER_MODULES):
                continue
            if _watch_one(part):
                _wholes[id(part)] = weakref.ref(module)


def is_watched(module: Any) -> bool:
    """Whether a module is registered as outermost."""
    return id(module) in _outermost_modules


def _watch_one(module: Any) -> bool:
    """Registers a module; returns whether it is new and can be registered."""
    kind, module_id = type(module), id(module)
    # An engine may also run model classes of the application, so the module name alone is not enough.
    if (
        module_id in _outermost_modules
        or loading_for_engine.get()
        or kind.__module__.startswith(ENGINE_MODULES)
    ):
        return False
    if kind.__module__.startswith(_LAYER_MODULES) and (not module._modules or kind.__bases__ == (object,)):
        # a single layer (a frozen BatchNorm), or `nn.Module` itself, the base class of all modules
        return False
    if not _patch_class(kind):
        return False
    _outermost_modules[module_id] = weakref.ref(module, lambda ref: _forget_module(module_id, ref))
    return True


def _forget_module(module_id: int, ref: weakref.ref[Any]) -> None:
    if _outermost_modules.get(module_id) is ref:
        _unwatch(module_id)


def _unwatch(module_id: int) -> None:
    """Removes what is known of a module. A later one may get its id."""
    _outermost_modules.pop(module_id, None)
    _model_names.pop(module_id, None)
    _wholes.pop(module_id, None)


def _patch_class(kind: type) -> bool:
    """Puts the descriptor on a class. Returns False if the class rejects new attributes."""
    if not any(owner.__dict__.get(CALL_ATTRIBUTE) is _call_descriptor for owner in kind.__mro__):
        _call_descriptor.bind_torch_functions()
        try:
            setattr(kind, CALL_ATTRIBUTE, _call_descriptor)
        except (AttributeError, TypeError):
            return False
        _patched_classes.add(kind)
    return True
