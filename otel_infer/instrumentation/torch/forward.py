"""torch models that no engine claims (BERT-like, vision): the outermost `forward` is the stage of a request.

    model.eval() ─▶ train(False) ─▶ the model is outermost         model(...) ─▶ forward ─▶ inner modules, at no cost

`eval()` is called on whole models, by users and by `from_pretrained`, and goes down from there. The calls of such a model
are seen through `_compiled_call_impl`, the place of a module where `Module.compile` puts what is to be called instead: as
a descriptor on its class, so that no module holds anything of ours, and copies, replicas and pickles are what they were.
Inside a claim (`generate`, a batch, another model) it is silent.

A call is a stage of the current request. Without one it is a request of its own, unless gradients are on: that is a
training loop. Times are the host's: on an accelerator the work may still be going on when `forward` returns. Not seen:
models that were loaded before `instrument()`, and what is called by another way than `model(...)`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

from otel_infer import _clock
from otel_infer.gpu.timed_work import StageWork
from otel_infer.gpu.timing import UNTIMED, timing
from otel_infer.instrumentation.hooks.engines import strip_model_path
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.suppression import loading_for_engine, torch_suppressed
from otel_infer.instrumentation.hooks.target import TargetMismatch
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import request_span, start

PROVIDER, OPERATION, STAGE = events.TORCH, "inference", "forward"
ENGINE_MODULES = ("vllm.", "sglang.", "tensorrt_llm.")
"""Whose models are run step by step, for many requests at once."""

_MODULE = "torch.nn.modules.module:Module"
_CALL_ATTRIBUTE = "_compiled_call_impl"
_LAYER_MODULES = "torch.nn.modules."

_outermost_modules: dict[int, weakref.ref[Any]] = {}
_patched_classes: weakref.WeakSet[type] = weakref.WeakSet()
_named_requests: weakref.WeakSet[request_span.RequestSpan] = weakref.WeakSet()


class _TorchInstrumentor(Instrumentor):
    """Also takes off what the models of the user have brought upon their classes."""

    def remove(self) -> None:
        super().remove()
        for owner in list(_patched_classes):
            if owner.__dict__.get(_CALL_ATTRIBUTE) is _call_descriptor:
                delattr(owner, _CALL_ATTRIBUTE)
        _patched_classes.clear()


instrumentor = _TorchInstrumentor("torch", "torch", ("torch",), is_engine=True)


class _CallDescriptor:
    """On a class in the place of `_compiled_call_impl`: for its outermost modules, a call that is seen.

    What a module itself has there (after `Module.compile`) stays in its `__dict__`, where torch keeps it.
    """

    hook = Hook("")
    is_compiling: Callable[[], bool]
    is_grad_enabled: Callable[[], bool]
    is_tracing: Callable[[], bool]

    def bind_torch_functions(self) -> None:
        """Where it knows what it is doing."""
        import torch

        self.is_compiling, self.is_tracing = torch.compiler.is_compiling, torch.jit.is_tracing
        self.is_grad_enabled = torch.is_grad_enabled

    def __get__(self, module: Any, owner: Any = None) -> Any:
        if module is None:
            return None
        # First, since under torch.compile it is a constant, and nothing of what follows is looked at.
        if (
            self.is_compiling()
            or torch_suppressed.get()
            or id(module) not in _outermost_modules
            or not self.hook.alive
        ):
            return module.__dict__.get(_CALL_ATTRIBUTE)
        return MethodType(_call_traced, module)

    def __set__(self, module: Any, value: Any) -> None:
        module.__dict__[_CALL_ATTRIBUTE] = value

    def __delete__(self, module: Any) -> None:
        module.__dict__.pop(_CALL_ATTRIBUTE, None)

    def __reduce__(self) -> Any:
        # cloudpickle pickles classes of `__main__` whole: elsewhere this is None, as torch has it.
        return type(None), ()


_call_descriptor = _CallDescriptor()


def _call_traced(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    inner = module.__dict__.get(_CALL_ATTRIBUTE) or module._call_impl
    forward = _begin_forward(module)
    if forward is None:
        return inner(*args, **kwargs)
    token = torch_suppressed.set(True)
    failure: BaseException | None = None
    try:
        return inner(*args, **kwargs)
    except BaseException as exc:
        failure = exc
        raise
    finally:
        torch_suppressed.reset(token)
        _end_forward(forward, args, kwargs, failure)
        del failure  # or it would hold its own traceback


class _ForwardCall(NamedTuple):
    """One call of an outermost module, while it runs. `token`: of a request of its own, which it made current."""

    request: request_span.RequestSpan
    started_at: int
    token: Any
    timing_handle: Any


def _begin_forward(module: Any) -> _ForwardCall | None:
    """None where the call is not to be recorded."""
    try:
        if _call_descriptor.is_tracing():
            return None
        request = start.current_request()
        if request is not None:
            _set_model_name(request, module)
            return _ForwardCall(request, _clock.now(), None, _begin_timing(module))
        if not recorder.active or _call_descriptor.is_grad_enabled():
            return None
        name = model_name(module)
        request = start.open_request(
            f"{OPERATION} {name}",
            owner=PROVIDER,
            operation=OPERATION,
            provider=PROVIDER,
            model=name,
            generative=False,
        )
        if request is None:
            return None
        return _ForwardCall(request, request.arrived_at, request.attach(), _begin_timing(module))
    except BaseException as exc:
        _call_descriptor.hook.mark_failed(exc)
        return None


def _end_forward(forward: _ForwardCall, args: Any, kwargs: Any, failure: BaseException | None) -> None:
    request, started_at, token, begun = forward
    try:
        if token is not None:
            start.detach(token)
        timing.end(begun, StageWork(STAGE, request.handle))
        request.record_stage(STAGE, started_at, _read_batch_size(args, kwargs))
        if token is not None and failure is None:
            request.close()
        elif token is not None:
            request.close(events.ERROR, type(failure).__qualname__)
    except BaseException as exc:
        _call_descriptor.hook.mark_failed(exc)


def _begin_timing(module: Any) -> Any:
    """On the device where its weights are; on the thread's if it has none, or is nobody's usual module."""
    device = None
    if timing.is_device_timed:
        with contextlib.suppress(Exception):
            device = next(module.parameters()).device
    try:
        return timing.begin(on=device)
    except Exception as exc:  # a device that has failed; the request is open by now
        _call_descriptor.hook.mark_failed(exc)
        return UNTIMED


def _set_model_name(request: request_span.RequestSpan, module: Any) -> None:
    """Says what served the request: the first model, until somebody knows better."""
    if not request.is_named and request not in _named_requests:
        _named_requests.add(request)
        request.set_operation(OPERATION, PROVIDER, model_name(module))


def _read_batch_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many inputs are in the batch, by the first tensor of two dimensions or more; 0 = there is none."""
    for value in (*args, *kwargs.values()):
        for tensor in value.values() if isinstance(value, dict) else (value,):
            try:
                shape = getattr(tensor, "shape", None)
            except Exception:  # an object of the user's that only computes it
                continue
            if isinstance(shape, tuple) and len(shape) >= 2:
                return int(shape[0])
    return 0


def model_name(module: Any) -> str:
    """The served name of a model: its hub id, its folder's own name (never a path), or its class."""
    module = getattr(module, "_orig_mod", module)
    name = getattr(getattr(module, "config", None), "_name_or_path", "")
    if not isinstance(name, str) or not name:
        return str(getattr(module, "original_name", "") or type(module).__name__)
    return strip_model_path(name)


# ── which modules are outermost ──────────────────────────────────────────────────────────────────────────────────


class _TrainRecursion(threading.local):
    """Whether this thread is inside a `train` that goes down from module to module."""

    is_active = False


_train_recursion = _TrainRecursion()


@instrumentor.patch_hot_path(f"{_MODULE}.train", reads=("mode",))
def patch_train(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """`eval()` is `train(False)`, and so is whatever classes have made of it."""
    # torch itself is still being imported here, as far as its modules.
    if not hasattr(sys.modules["torch.nn.modules.module"].Module, _CALL_ATTRIBUTE):
        raise TargetMismatch(_MODULE, f"there is no {_CALL_ATTRIBUTE}")
    _call_descriptor.hook = hook
    for ref in list(_outermost_modules.values()):  # known from before an `uninstrument()`
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
                _outermost_modules.pop(id(self), None)
            else:
                _watch_module(self)
        except BaseException as exc:
            hook.mark_failed(exc)
        return result

    return train


@instrumentor.patch_hot_path("torch._dynamo.eval_frame:OptimizedModule.__init__", part="compile")
def patch_optimized_module(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """`torch.compile(model)` is outermost if the model was, and dynamo has no business in our own frames."""
    dynamo = sys.modules["torch._dynamo.eval_frame"]
    # Before 2.7 it is in the compiled half only.
    skip_code = getattr(dynamo, "skip_code", None) or sys.modules["torch"]._C._dynamo.eval_frame.skip_code
    for function in (_CallDescriptor.__get__, _call_traced, _begin_forward, _end_forward, _read_batch_size):
        skip_code(function.__code__)

    def init_optimized(self: Any, mod: Any, *args: Any, **kwargs: Any) -> None:
        original(self, mod, *args, **kwargs)
        if hook.alive:
            try:
                if id(mod) in _outermost_modules:
                    _watch_module(self)
            except BaseException as exc:
                hook.mark_failed(exc)

    return init_optimized


def _watch_module(module: Any) -> None:
    kind, number = type(module), id(module)
    # An engine may run models that are the user's own.
    if number in _outermost_modules or loading_for_engine.get() or kind.__module__.startswith(ENGINE_MODULES):
        return
    if kind.__module__.startswith(_LAYER_MODULES) and (not module._modules or kind.__bases__ == (object,)):
        return  # a frozen BatchNorm is a layer of a model, and `nn.Module` itself the class of all there are
    if _patch_class(kind):
        _outermost_modules[number] = weakref.ref(module, lambda ref: _forget_module(number, ref))


def _forget_module(number: int, ref: weakref.ref[Any]) -> None:
    if _outermost_modules.get(number) is ref:
        del _outermost_modules[number]


def _patch_class(kind: type) -> bool:
    """Whether calls of this class are seen from now on; not of one that takes no attributes."""
    if not any(owner.__dict__.get(_CALL_ATTRIBUTE) is _call_descriptor for owner in kind.__mro__):
        _call_descriptor.bind_torch_functions()
        try:
            setattr(kind, _CALL_ATTRIBUTE, _call_descriptor)
        except (AttributeError, TypeError):
            return False
        _patched_classes.add(kind)
    return True
