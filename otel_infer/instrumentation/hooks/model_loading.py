"""Records the load of a model as the phase `weights` of the start, or as a stage of the request that waits for it.

The outermost load counts, because a model may load others as its components.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.engines import read_file_name
from otel_infer.instrumentation.hooks.guarded_calls import call_safely
from otel_infer.instrumentation.hooks.probe import Hook, WrapperFactory
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import request_span, start


class _ModelLoading(threading.local):
    """Whether this thread already loads a model."""

    is_loading = False


_loading = _ModelLoading()


def wrap_loading(engine: str, read_name: Callable[[Any], str]) -> WrapperFactory:
    """Returns a factory for a function that loads a model, or for the `__init__` of one.

    `read_name`: returns the name of what the function returned, or of the object that `__init__` made.
    """

    def make_wrapper(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        is_init = getattr(original, "__name__", "") == "__init__"

        def load_model(*args: Any, **kwargs: Any) -> Any:
            if _loading.is_loading or not hook.alive:
                return original(*args, **kwargs)
            started_at, request = _begin_loading(hook)
            _loading.is_loading = True
            model, error_type = None, ""
            try:
                result = original(*args, **kwargs)
                model = args[0] if is_init else result
                return result
            except BaseException as exc:
                error_type = type(exc).__qualname__
                raise
            finally:
                _loading.is_loading = False
                _end_loading(hook, started_at, request, (engine, model, read_name), error_type)

        return load_model

    return make_wrapper


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
    hook: Hook,
    started_at: int,
    request: request_span.RequestSpan | None,
    loaded: tuple[str, Any, Callable[[Any], str]],
    error_type: str,
) -> None:
    """Records the end. `loaded`: the engine, the model or None, and the function that reads its name."""
    try:
        if request is not None:
            request.record_stage(events.WEIGHTS, started_at, events.RAISED if error_type else 0)
            return
        engine, model, read_name = loaded
        name = "" if model is None else read_name(model)
        recorder.record_startup(
            events.PhaseEnded(_clock.now(), started_at, events.WEIGHTS, engine, name, error_type)
        )
    except BaseException as exc:
        hook.mark_failed(exc)


_SOURCES = ("model_path", "models_path", "config_path", "path", "model", "config")
"""Names of the first parameter of such an `__init__`."""


class LoadedNames:
    """Names of the models of a library whose objects are compiled, and do not tell from where they were loaded.

    A library's `__init__` takes the path first; what is made of a model takes that first.
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def read_name(self, owner: Any) -> str:
        """Returns the name of the folder or file of a model, or of the model of an object; else the object's class."""
        return self._names.get(owner) or type(owner).__name__

    def copy_name(self, owner: Any, source: Any) -> None:
        """Names an object by the path of a model, or as another object, if that has a name."""
        if isinstance(source, (str, os.PathLike)):
            self._names[owner] = read_file_name(str(source).rstrip("/"))
            return
        with contextlib.suppress(TypeError):  # it takes no weak references
            if source in self._names:
                self._names[owner] = self._names[source]

    def wrap_loading(self, original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        """A factory for the `__init__` of a model."""
        return wrap_loading(self._engine, self.read_name)(self.wrap_owner(original, hook), hook)

    def wrap_owner(self, original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        """A factory for the `__init__` of what is made of a model or of a path, its first argument."""

        def init(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            if hook.alive and args:
                named = (kwargs[name] for name in _SOURCES if name in kwargs)
                source = args[1] if len(args) > 1 else next(named, None)
                call_safely(hook, self.copy_name, args[0], source)

        init.__name__ = "__init__"
        return init
