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
from otel_infer.instrumentation.hooks.engines import name_of
from otel_infer.instrumentation.hooks.instrumentor import Integration
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.suppression import claimed, owned
from otel_infer.instrumentation.hooks.target import Drift
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import request_span, start

PROVIDER, OPERATION, STAGE = events.TORCH, "inference", "forward"
ENGINES = ("vllm.", "sglang.", "tensorrt_llm.")
"""Whose models are run step by step, for many requests at once."""

_MODULE = "torch.nn.modules.module:Module"
_PLACE = "_compiled_call_impl"
_LAYERS = "torch.nn.modules."

_outermost: dict[int, weakref.ref[Any]] = {}
_classes: weakref.WeakSet[type] = weakref.WeakSet()
_named: weakref.WeakSet[request_span.LiveRequest] = weakref.WeakSet()


class _Torch(Integration):
    """Also takes off what the models of the user have brought upon their classes."""

    def remove(self) -> None:
        super().remove()
        for owner in list(_classes):
            if owner.__dict__.get(_PLACE) is _calls:
                delattr(owner, _PLACE)
        _classes.clear()


integration = _Torch("torch", "torch", ("torch",), is_engine=True)


class _Calls:
    """On a class in the place of `_compiled_call_impl`: for its outermost modules, a call that is seen.

    What a module itself has there (after `Module.compile`) stays in its `__dict__`, where torch keeps it.
    """

    hook = Hook("")
    is_compiling: Callable[[], bool]
    is_grad_enabled: Callable[[], bool]
    is_tracing: Callable[[], bool]

    def ask_torch(self) -> None:
        """Where it knows what it is doing."""
        import torch

        self.is_compiling, self.is_tracing = torch.compiler.is_compiling, torch.jit.is_tracing
        self.is_grad_enabled = torch.is_grad_enabled

    def __get__(self, module: Any, owner: Any = None) -> Any:
        if module is None:
            return None
        # First, since under torch.compile it is a constant, and nothing of what follows is looked at.
        if self.is_compiling() or claimed.get() or id(module) not in _outermost or not self.hook.alive:
            return module.__dict__.get(_PLACE)
        return MethodType(_seen, module)

    def __set__(self, module: Any, value: Any) -> None:
        module.__dict__[_PLACE] = value

    def __delete__(self, module: Any) -> None:
        module.__dict__.pop(_PLACE, None)

    def __reduce__(self) -> Any:
        # cloudpickle pickles classes of `__main__` whole: elsewhere this is None, as torch has it.
        return type(None), ()


_calls = _Calls()


def _seen(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    inner = module.__dict__.get(_PLACE) or module._call_impl
    forward = _begin(module)
    if forward is None:
        return inner(*args, **kwargs)
    token = claimed.set(True)
    failure: BaseException | None = None
    try:
        return inner(*args, **kwargs)
    except BaseException as exc:
        failure = exc
        raise
    finally:
        claimed.reset(token)
        _end(forward, args, kwargs, failure)
        del failure  # or it would hold its own traceback


class _Forward(NamedTuple):
    """One call of an outermost module, while it runs. `token`: of a request of its own, which it made current."""

    request: request_span.LiveRequest
    started_at: int
    token: Any
    begun: Any


def _begin(module: Any) -> _Forward | None:
    """None where the call is not to be recorded."""
    try:
        if _calls.is_tracing():
            return None
        request = start.current()
        if request is not None:
            _name(request, module)
            return _Forward(request, _clock.now(), None, _launching(module))
        if not recorder.active or _calls.is_grad_enabled():
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
        return _Forward(request, request.arrived_at, request.attach(), _launching(module))
    except BaseException as exc:
        _calls.hook.fail(exc)
        return None


def _end(forward: _Forward, args: Any, kwargs: Any, failure: BaseException | None) -> None:
    request, started_at, token, begun = forward
    try:
        if token is not None:
            start.detach(token)
        timing.end(begun, StageWork(STAGE, request.handle))
        request.stage(STAGE, started_at, _rows(args, kwargs))
        if token is not None and failure is None:
            request.close()
        elif token is not None:
            request.close(events.ERROR, type(failure).__qualname__)
    except BaseException as exc:
        _calls.hook.fail(exc)


def _launching(module: Any) -> Any:
    """On the device where its weights are; on the thread's if it has none, or is nobody's usual module."""
    device = None
    if timing.is_by_device:
        with contextlib.suppress(Exception):
            device = next(module.parameters()).device
    try:
        return timing.begin(on=device)
    except Exception as exc:  # a device that has failed; the request is open by now
        _calls.hook.fail(exc)
        return UNTIMED


def _name(request: request_span.LiveRequest, module: Any) -> None:
    """Says what served the request: the first model, until somebody knows better."""
    if not request.named and request not in _named:
        _named.add(request)
        request.name(OPERATION, PROVIDER, model_name(module))


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
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
    return name_of(name)


# ── which modules are outermost ──────────────────────────────────────────────────────────────────────────────────


class _Descent(threading.local):
    """Whether this thread is inside a `train` that goes down from module to module."""

    going_on = False


_descent = _Descent()


@integration.step_hook(f"{_MODULE}.train", reads=("mode",))
def train(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """`eval()` is `train(False)`, and so is whatever classes have made of it."""
    # torch itself is still being imported here, as far as its modules.
    if not hasattr(sys.modules["torch.nn.modules.module"].Module, _PLACE):
        raise Drift(_MODULE, f"there is no {_PLACE}")
    _calls.hook = hook
    for ref in list(_outermost.values()):  # known from before an `uninstrument()`
        _put_on(type(ref()))

    def train(self: Any, mode: bool = True) -> Any:
        if _descent.going_on or not hook.alive:
            return original(self, mode)
        _descent.going_on = True
        try:
            result = original(self, mode)
        finally:
            _descent.going_on = False
        try:
            if mode:
                _outermost.pop(id(self), None)
            else:
                _watch(self)
        except BaseException as exc:
            hook.fail(exc)
        return result

    return train


@integration.step_hook("torch._dynamo.eval_frame:OptimizedModule.__init__", part="compile")
def optimized(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """`torch.compile(model)` is outermost if the model was, and dynamo has no business in our own frames."""
    dynamo = sys.modules["torch._dynamo.eval_frame"]
    # Before 2.7 it is in the compiled half only.
    skip_code = getattr(dynamo, "skip_code", None) or sys.modules["torch"]._C._dynamo.eval_frame.skip_code
    for function in (_Calls.__get__, _seen, _begin, _end, _rows):
        skip_code(function.__code__)

    def init(self: Any, mod: Any, *args: Any, **kwargs: Any) -> None:
        original(self, mod, *args, **kwargs)
        if hook.alive:
            try:
                if id(mod) in _outermost:
                    _watch(self)
            except BaseException as exc:
                hook.fail(exc)

    return init


def _watch(module: Any) -> None:
    kind, number = type(module), id(module)
    # An engine may run models that are the user's own.
    if number in _outermost or owned.get() or kind.__module__.startswith(ENGINES):
        return
    if kind.__module__.startswith(_LAYERS) and (not module._modules or kind.__bases__ == (object,)):
        return  # a frozen BatchNorm is a layer of a model, and `nn.Module` itself the class of all there are
    if _put_on(kind):
        _outermost[number] = weakref.ref(module, lambda ref: _forget(number, ref))


def _forget(number: int, ref: weakref.ref[Any]) -> None:
    if _outermost.get(number) is ref:
        del _outermost[number]


def _put_on(kind: type) -> bool:
    """Whether calls of this class are seen from now on; not of one that takes no attributes."""
    if not any(owner.__dict__.get(_PLACE) is _calls for owner in kind.__mro__):
        _calls.ask_torch()
        try:
            setattr(kind, _PLACE, _calls)
        except (AttributeError, TypeError):
            return False
        _classes.add(kind)
    return True
