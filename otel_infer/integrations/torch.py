"""torch models that no engine claims (BERT-like, vision): the outermost `forward` is the stage of a request.

    model.eval() ─▶ the model is outermost          model(...) ─▶ forward ─▶ its inner modules, at no cost

`eval()` is called on whole models, by users and by `from_pretrained`; the modules inside are told by `train(False)`. The
calls of such a model are seen through `_compiled_call_impl`, the place of a module where `Module.compile` puts what is
to be called instead: as a descriptor on its class, so that no module holds anything of ours, and copies, replicas and
pickles are what they were. Inside a claim (`generate`, a batch, another model) it is silent.

A call is a stage of the current request. Without one it is a request of its own, unless gradients are on: that is a
training loop. Times are the host's: on an accelerator the work may still be going on when `forward` returns. Not seen:
models that were loaded before `instrument()`, and what is called by another way than `model(...)`.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from types import CodeType, MethodType
from typing import Any

from otel_infer import clock, facts, ingress
from otel_infer.integrations._base import Integration
from otel_infer.integrations._claims import claims
from otel_infer.patching import Drift, Hook
from otel_infer.ring.recorder import recorder

PROVIDER, OPERATION, STAGE = "torch", "inference", "forward"
ENGINES = ("vllm.", "sglang.", "tensorrt_llm.")
"""Whose models are run step by step, for many requests at once."""

_MODULE = "torch.nn.modules.module:Module"
_PLACE = "_compiled_call_impl"
_LAYERS = "torch.nn.modules."

_outermost: dict[int, weakref.ref[Any]] = {}
_classes: weakref.WeakSet[type] = weakref.WeakSet()
_named: weakref.WeakSet[ingress.LiveRequest] = weakref.WeakSet()
_hook = Hook(f"{_MODULE}.__call__")


class _Torch(Integration):
    """Also takes off what models of the user have brought upon their classes."""

    def remove(self) -> None:
        super().remove()
        _hook.alive = False
        for owner in list(_classes):
            if owner.__dict__.get(_PLACE) is _calls:
                delattr(owner, _PLACE)
        _classes.clear()


integration = _Torch("torch", "torch", ("torch",), is_engine=True)


class _Calls:
    """On a class in the place of `_compiled_call_impl`: for its outermost modules, a call that is seen.

    What a module itself has there (after `Module.compile`) stays in its `__dict__`, where torch keeps and drops it.
    """

    is_compiling: Callable[[], bool]

    def __get__(self, module: Any, owner: Any = None) -> Any:
        if module is None:
            return None
        if self.is_compiling() or claims.depth or id(module) not in _outermost or not _hook.alive:
            return module.__dict__.get(_PLACE)
        return MethodType(_seen, module)

    def __set__(self, module: Any, value: Any) -> None:
        module.__dict__[_PLACE] = value

    def __delete__(self, module: Any) -> None:
        module.__dict__.pop(_PLACE, None)

    def __reduce__(self) -> Any:
        # Classes of `__main__` are pickled whole by cloudpickle: elsewhere this is None, as torch has it.
        return type(None), ()


_calls = _Calls()


def _seen(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    inner = module.__dict__.get(_PLACE) or module._call_impl
    forward = _begin(module)
    if forward is None:
        return inner(*args, **kwargs)
    claims.depth += 1
    try:
        result = inner(*args, **kwargs)
    except BaseException as exc:
        forward.end(_rows(args, kwargs), exc)
        raise
    finally:
        claims.depth -= 1
    forward.end(_rows(args, kwargs), None)
    return result


class _Forward:
    """One call of an outermost module, while it runs."""

    __slots__ = ("own", "request", "started_at", "token")

    def __init__(self, request: ingress.LiveRequest, own: bool) -> None:
        self.request, self.own = request, own
        self.token = request.attach() if own else None
        self.started_at = request.arrived_at if own else clock.now()

    def end(self, rows: int, exc: BaseException | None) -> None:
        try:
            self.request.stage(STAGE, self.started_at, rows)
            if not self.own:
                return
            ingress.detach(self.token)
            if exc is None:
                self.request.close()
            else:
                self.request.close(facts.ERROR, type(exc).__qualname__)
        except BaseException as ours:
            _hook.fail(ours)


def _begin(module: Any) -> _Forward | None:
    try:
        request = ingress.current()
        if request is not None:
            _name(request, module)
            return _Forward(request, own=False)
        if not recorder.active or sys.modules["torch"].is_grad_enabled():
            return None
        name = model_name(module)
        request = ingress.open_request(
            f"{OPERATION} {name}",
            owner=PROVIDER,
            operation=OPERATION,
            provider=PROVIDER,
            model=name,
            generative=False,
        )
        return None if request is None else _Forward(request, own=True)
    except BaseException as exc:
        _hook.fail(exc)
        return None


def _name(request: ingress.LiveRequest, module: Any) -> None:
    """Says what served the request, once and only where nobody knows better."""
    if not request.engine and not request.operation and request not in _named:
        _named.add(request)
        request.name(OPERATION, PROVIDER, model_name(module))


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many inputs are in the batch, by the first tensor of two dimensions or more; 0 = there is none."""
    for value in (*args, *kwargs.values()):
        found = value.values() if isinstance(value, dict) else (value,)
        for tensor in found:
            shape = getattr(tensor, "shape", None)
            if isinstance(shape, tuple) and len(shape) >= 2:
                return int(shape[0])
    return 0


def model_name(module: Any) -> str:
    """The served name of a model: its hub id, its folder's own name (never a path), or its class."""
    module = getattr(module, "_orig_mod", module)
    name = getattr(getattr(module, "config", None), "_name_or_path", "")
    if not isinstance(name, str) or not name:
        return str(getattr(module, "original_name", "") or type(module).__name__)
    if os.path.isabs(name) or name.startswith("."):
        return os.path.basename(name.rstrip("/\\"))
    return name


# ── which modules are outermost ──────────────────────────────────────────────────────────────────────────────────


def _watch(module: Any) -> None:
    kind, number = type(module), id(module)
    if number in _outermost or kind.__module__.startswith(ENGINES):
        return
    if kind.__module__.startswith(_LAYERS) and not module._modules:
        return  # a frozen BatchNorm is a layer of a model, and so is every Linear
    _outermost[number] = weakref.ref(module, lambda ref: _forget(number, ref))
    _put_on(kind)


def _forget(number: int, ref: weakref.ref[Any]) -> None:
    if _outermost.get(number) is ref:
        del _outermost[number]


def _put_on(kind: type) -> None:
    if getattr(kind, _PLACE, None) is not None or any(_PLACE in c.__dict__ and c.__dict__[_PLACE] is _calls for c in kind.__mro__):
        return
    try:
        setattr(kind, _PLACE, _calls)
    except (AttributeError, TypeError):
        return  # a class that takes no attributes: its calls stay unseen
    _classes.add(kind)
