"""Registers models that nobody put into evaluation mode: whose weights were loaded or moved, or that come as programs.

    load_state_dict, to            ─▶ the model is outermost, until `train()` is called
    torch.jit.load, torch.jit.freeze, torch.jit.optimize_for_inference, torch.export.load(…).module() ─▶ the program is outermost
    torch.jit.script, torch.jit.trace of a model in evaluation mode ─▶ likewise
    aoti_load_package ─▶ its calls are the stage `forward`

A call with gradients and without a request is a training loop, and not recorded (`forward`). Nor are the calls by which
`torch.jit.trace` checks its result.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from otel_infer.instrumentation.hooks.engines import read_file_name
from otel_infer.instrumentation.hooks.guarded_calls import call_safely
from otel_infer.instrumentation.hooks.probe import Hook, WrapperFactory
from otel_infer.instrumentation.hooks.suppression import suppress_torch
from otel_infer.instrumentation.model_calls import ModelLibrary, count_rows, wrap_call
from otel_infer.instrumentation.torch.forward import PROVIDER, instrumentor, is_watched, watch_module

_MODULE = "torch.nn.modules.module:Module"
_PACKAGE = "torch.export.pt2_archive._package"

_package_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Names of compiled packages, by their files."""


def _read_package_name(package: Any) -> str:
    return _package_names.get(package) or type(package).__name__


def _watch_loaded(module: Any) -> None:
    if hasattr(module, "_modules"):
        watch_module(module)


def _patch_method(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """For a method of a module, after which that is ready to be called."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if hook.alive:
            call_safely(hook, _watch_loaded, self)
        return result

    return method


def _patch_copy(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """For a method of a program that copies it: what is made of a program that is outermost is so too."""

    def copy_module(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = original(self, *args, **kwargs)
        if hook.alive:
            call_safely(hook, _watch_loaded if is_watched(self) else _watch_compiled, module)
        return module

    return copy_module


def _watch_compiled(module: Any) -> None:
    if getattr(module, "training", True) is False:
        _watch_loaded(module)


def _patch_maker(watch: Callable[[Any], None]) -> WrapperFactory:
    """Returns a factory for a function that returns a module. `watch`: is called with it."""

    def make_wrapper(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            module = original(*args, **kwargs)
            if hook.alive:
                call_safely(hook, watch, module)
            return module

        return make

    return make_wrapper


def _patch_load_package(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def load_package(path: Any, *args: Any, **kwargs: Any) -> Any:
        package = original(path, *args, **kwargs)
        if hook.alive and isinstance(path, str):
            call_safely(hook, lambda: _package_names.__setitem__(package, read_file_name(path)))
        return package

    return load_package


_TARGETS: tuple[tuple[str, WrapperFactory, str], ...] = (
    (f"{_MODULE}.load_state_dict", _patch_method, "loading"),
    (f"{_MODULE}.to", _patch_method, "loading"),
    ("torch.jit:load", _patch_maker(_watch_loaded), "jit"),
    ("torch.jit:freeze", _patch_maker(_watch_loaded), "jit"),
    ("torch.jit:optimize_for_inference", _patch_maker(_watch_loaded), "jit"),
    ("torch.jit._recursive:create_script_module", _patch_maker(_watch_compiled), "jit"),
    ("torch.jit._trace:make_module", _patch_maker(_watch_compiled), "jit"),
    ("torch.jit._trace:_check_trace", suppress_torch, "jit"),
    ("torch.jit._script:RecursiveScriptModule.__copy__", _patch_copy, "jit"),
    ("torch.jit._script:RecursiveScriptModule.__deepcopy__", _patch_copy, "jit"),
    ("torch.fx.graph_module:GraphModule.__copy__", _patch_copy, "fx"),
    ("torch.fx.graph_module:GraphModule.__deepcopy__", _patch_copy, "fx"),
    ("torch.fx.graph_module:reduce_graph_module", _patch_maker(_watch_compiled), "fx"),
    ("torch.export.exported_program:ExportedProgram.module", _patch_maker(_watch_loaded), "export"),
    ("torch._inductor:aoti_load_package", _patch_load_package, "inductor"),
    (
        f"{_PACKAGE}:AOTICompiledModel.__call__",
        wrap_call(ModelLibrary(PROVIDER, _read_package_name), count_rows),
        "aot",
    ),
)
for _target, _make, _part in _TARGETS:
    instrumentor.patch_hot_path(_target, optional=True, part=_part)(_make)
