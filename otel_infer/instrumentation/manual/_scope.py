"""What `request`, `stage` and `step` have in common: how they are used, and that no mistake in them reaches the caller."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import logging
import sys
from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar, cast

from otel_infer.gpu.timing import timing

F = TypeVar("F", bound=Callable[..., Any])
ENGINE = "custom"

_logged: set[str] = set()


def log_unrecorded(what: str, exc: Exception) -> None:
    """Something is left unrecorded, which is said once. Never the message: it may quote what it was given."""
    if what not in _logged:
        _logged.add(what)
        logging.getLogger("otel_infer").warning("%s is not recorded: %s", what, type(exc).__name__)


class TracedScope(contextlib.AbstractContextManager[Any]):
    """What is used as `with` and `async with`, and as a decorator of whatever kind of function."""

    new_scope: Callable[[], TracedScope]
    """Makes a new one like this, for one call of what is decorated."""
    attaches = False
    """Whether it is current in its context while it lasts."""

    async def __aenter__(self) -> Any:
        return self.__enter__()

    async def __aexit__(self, *how: Any) -> None:
        self.__exit__(*how)

    def __call__(self, function: F) -> F:
        again = self.new_scope
        if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
            return cast(F, functools.wraps(function)(_wrap_generator(again, function, self.attaches)))
        if inspect.iscoroutinefunction(function):

            async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
                with again():
                    return await function(*args, **kwargs)

            return cast(F, functools.wraps(function)(async_wrapper))

        def sync_wrapper(*args: Any, **kwargs: Any) -> Any:
            with again():
                return function(*args, **kwargs)

        return cast(F, functools.wraps(function)(sync_wrapper))


def _wrap_generator(
    again: Callable[[], TracedScope], function: Callable[..., Any], attaches: bool
) -> Callable[..., Any]:
    """A generator function in place of another: a stream stays a stream, also when it is closed early."""
    if inspect.isgeneratorfunction(function):

        def generator_wrapper(*args: Any, **kwargs: Any) -> Any:
            if not attaches:
                with again():
                    return (yield from function(*args, **kwargs))
            # Its own, also between two items: whoever takes them may be at another stream by then.
            inside = contextvars.copy_context()
            with _ContextScope(inside, again()):
                return (yield from _run_in_context(inside, function(*args, **kwargs)))

        return generator_wrapper

    async def async_generator_wrapper(*args: Any, **kwargs: Any) -> Any:
        items = function(*args, **kwargs)
        inside = contextvars.copy_context() if attaches else None
        with again() if inside is None else _ContextScope(inside, again()):
            step = items.__anext__()
            try:
                while True:
                    try:
                        item = await _bind_context(inside, step)
                    except StopAsyncIteration:
                        return
                    try:
                        step = items.asend((yield item))
                    except GeneratorExit:
                        raise
                    except BaseException as thrown:
                        step = items.athrow(thrown)
            finally:
                if not getattr(items, "ag_running", False):  # a loop that ends closes both of us at once
                    await _bind_context(inside, items.aclose())

    return async_generator_wrapper


def _bind_context(context: contextvars.Context | None, work: Awaitable[Any]) -> Awaitable[Any]:
    """In that context, or where it is awaited."""
    return work if context is None else _ContextAwaitable(context, work)


class _ContextAwaitable:
    """Something to be awaited, each step of it in a context, and not in that of whoever awaits."""

    def __init__(self, context: contextvars.Context, work: Awaitable[Any]) -> None:
        self._context, self._work = context, work

    def __await__(self) -> Generator[Any, Any, Any]:
        steps: Any = self._work.__await__()
        return (yield from _run_in_context(self._context, steps))


class _ContextScope(contextlib.AbstractContextManager[None]):
    """A scope that is entered and left in a context, and not in that of whoever runs it."""

    def __init__(self, context: contextvars.Context, scope: TracedScope) -> None:
        self._context, self._scope = context, scope

    def __enter__(self) -> None:
        self._context.run(self._scope.__enter__)

    def __exit__(self, *how: Any) -> None:
        self._context.run(self._scope.__exit__, *how)


def _run_in_context(
    context: contextvars.Context, stream: Generator[Any, Any, Any]
) -> Generator[Any, Any, Any]:
    """As `yield from`, each step of the stream in this context."""
    step: Callable[[Any], Any] = stream.send
    said: Any = None
    while True:
        try:
            item = context.run(step, said)
        except StopIteration as end:
            return end.value
        try:
            step, said = stream.send, (yield item)
        except GeneratorExit:
            context.run(stream.close)
            raise
        except BaseException as raised:
            step, said = stream.throw, raised


def resolve_device(gpu: object) -> Any:
    """What `gpu` of `stage` and `step` means, as a `torch.device`: `True` is the calling thread's current device, which need not be
    the one that it used first; anything else names it. None where no device is timed yet. Raises what torch does for what
    is no device."""
    if not timing.is_device_timed:
        return None
    torch: Any = sys.modules["torch"]
    if gpu is not True:
        return torch.device(gpu)
    kind = "cuda" if torch.cuda.is_initialized() else "xpu"
    return torch.device(kind, getattr(torch, kind).current_device())
