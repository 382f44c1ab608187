"""Code shared by `request`, `stage` and `step`: context manager, decorator, and logging of errors."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import sys
from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar, cast

from otel_infer.gpu.timing import timing

F = TypeVar("F", bound=Callable[..., Any])
ENGINE = "custom"


class TracedScope(contextlib.AbstractContextManager[Any]):
    """A scope for `with` and `async with`, and a decorator for every kind of function."""

    new_scope: Callable[[], TracedScope]
    """Returns a new scope with the same arguments, for one call of the decorated function."""
    attaches = False
    """Whether the scope sets the current context while it is open."""

    async def __aenter__(self) -> Any:
        return self.__enter__()

    async def __aexit__(self, *exc_info: Any) -> None:
        self.__exit__(*exc_info)

    def __call__(self, function: F) -> F:
        new_scope = self.new_scope
        if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
            return cast(F, functools.wraps(function)(_wrap_generator(new_scope, function, self.attaches)))
        if inspect.iscoroutinefunction(function):

            async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
                with new_scope():
                    return await function(*args, **kwargs)

            return cast(F, functools.wraps(function)(async_wrapper))

        def sync_wrapper(*args: Any, **kwargs: Any) -> Any:
            with new_scope():
                return function(*args, **kwargs)

        return cast(F, functools.wraps(function)(sync_wrapper))


def _wrap_generator(
    new_scope: Callable[[], TracedScope], function: Callable[..., Any], attaches: bool
) -> Callable[..., Any]:
    """Returns a generator function of the same kind, whose generators run in the scope until they end."""
    if not inspect.isgeneratorfunction(function):
        return _wrap_async_generator(new_scope, function, attaches)

    def generator_wrapper(*args: Any, **kwargs: Any) -> Any:
        if not attaches:
            with new_scope():
                return (yield from function(*args, **kwargs))
        # Each stream has a separate context, because the consumer may read several streams alternately.
        inner_context = contextvars.copy_context()
        with _ContextScope(inner_context, new_scope()):
            return (yield from _run_in_context(inner_context, function(*args, **kwargs)))

    return generator_wrapper


def _wrap_async_generator(
    new_scope: Callable[[], TracedScope], function: Callable[..., Any], attaches: bool
) -> Callable[..., Any]:
    async def async_generator_wrapper(*args: Any, **kwargs: Any) -> Any:
        items = function(*args, **kwargs)
        inner_context = contextvars.copy_context() if attaches else None
        with new_scope() if inner_context is None else _ContextScope(inner_context, new_scope()):
            step = items.__anext__()
            try:
                while True:
                    try:
                        item = await _bind_context(inner_context, step)
                    except StopAsyncIteration:
                        return
                    try:
                        step = items.asend((yield item))
                    except GeneratorExit:
                        raise
                    except BaseException as exc:
                        step = items.athrow(exc)
            finally:
                # An event loop that ends closes both generators concurrently.
                if not getattr(items, "ag_running", False):
                    await _bind_context(inner_context, items.aclose())

    return async_generator_wrapper


def _bind_context(context: contextvars.Context | None, work: Awaitable[Any]) -> Awaitable[Any]:
    """Returns an awaitable that runs in the context; `work` itself if there is none."""
    return work if context is None else _ContextAwaitable(context, work)


class _ContextAwaitable:
    """An awaitable whose steps run in the given context, not in the context of the awaiting task."""

    def __init__(self, context: contextvars.Context, work: Awaitable[Any]) -> None:
        self._context, self._work = context, work

    def __await__(self) -> Generator[Any, Any, Any]:
        steps: Any = self._work.__await__()
        return (yield from _run_in_context(self._context, steps))


class _ContextScope(contextlib.AbstractContextManager[None]):
    """A scope that is entered and left in the given context, not in the context of the caller."""

    def __init__(self, context: contextvars.Context, scope: TracedScope) -> None:
        self._context, self._scope = context, scope

    def __enter__(self) -> None:
        self._context.run(self._scope.__enter__)

    def __exit__(self, *exc_info: Any) -> None:
        self._context.run(self._scope.__exit__, *exc_info)


def _run_in_context(
    context: contextvars.Context, stream: Generator[Any, Any, Any]
) -> Generator[Any, Any, Any]:
    """Yields the items of `stream` as `yield from` does, with each step in the given context."""
    step: Callable[[Any], Any] = stream.send
    value: Any = None
    while True:
        try:
            item = context.run(step, value)
        except StopIteration as end:
            return end.value
        try:
            step, value = stream.send, (yield item)
        except GeneratorExit:
            context.run(stream.close)
            raise
        except BaseException as exc:
            step, value = stream.throw, exc


def resolve_device(gpu: object) -> Any:
    """Returns the `torch.device` for the argument `gpu` of `stage` and `step`; None before timing started.

    True means the calling thread's current device, which may differ from the device it used first.
    Any other value is passed to `torch.device`, which raises if it names no device.
    """
    if not timing.is_device_timed:
        return None
    torch: Any = sys.modules["torch"]
    if gpu is not True:
        return torch.device(gpu)
    kind = "cuda" if torch.cuda.is_initialized() else "xpu"
    return torch.device(kind, getattr(torch, kind).current_device())
