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

_said: set[str] = set()


def failed(what: str, exc: Exception) -> None:
    """Something is left unrecorded, which is said once. Never the message: it may quote what it was given."""
    if what not in _said:
        _said.add(what)
        logging.getLogger("otel_infer").warning("%s is not recorded: %s", what, type(exc).__name__)


class Scope(contextlib.AbstractContextManager[Any]):
    """What is used as `with` and `async with`, and as a decorator of whatever kind of function."""

    again: Callable[[], Scope]
    """Makes a new one like this, for one call of what is decorated."""
    attaches = False
    """Whether it is current in its context while it lasts."""

    async def __aenter__(self) -> Any:
        return self.__enter__()

    async def __aexit__(self, *how: Any) -> None:
        self.__exit__(*how)

    def __call__(self, function: F) -> F:
        again = self.again
        if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
            return cast(F, functools.wraps(function)(_stream(again, function, self.attaches)))
        if inspect.iscoroutinefunction(function):

            async def awaited(*args: Any, **kwargs: Any) -> Any:
                with again():
                    return await function(*args, **kwargs)

            return cast(F, functools.wraps(function)(awaited))

        def called(*args: Any, **kwargs: Any) -> Any:
            with again():
                return function(*args, **kwargs)

        return cast(F, functools.wraps(function)(called))


def _stream(again: Callable[[], Scope], function: Callable[..., Any], attaches: bool) -> Callable[..., Any]:
    """A generator function in place of another: a stream stays a stream, also when it is closed early."""
    if inspect.isgeneratorfunction(function):

        def generated(*args: Any, **kwargs: Any) -> Any:
            if not attaches:
                with again():
                    return (yield from function(*args, **kwargs))
            # Its own, also between two items: whoever takes them may be at another stream by then.
            inside = contextvars.copy_context()
            with _Within(inside, again()):
                return (yield from _run_in(inside, function(*args, **kwargs)))

        return generated

    async def streamed(*args: Any, **kwargs: Any) -> Any:
        items = function(*args, **kwargs)
        inside = contextvars.copy_context() if attaches else None
        with again() if inside is None else _Within(inside, again()):
            step = items.__anext__()
            try:
                while True:
                    try:
                        item = await _inside(inside, step)
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
                    await _inside(inside, items.aclose())

    return streamed


def _inside(context: contextvars.Context | None, work: Awaitable[Any]) -> Awaitable[Any]:
    """In that context, or where it is awaited."""
    return work if context is None else _Inside(context, work)


class _Inside:
    """Something to be awaited, each step of it in a context, and not in that of whoever awaits."""

    def __init__(self, context: contextvars.Context, work: Awaitable[Any]) -> None:
        self._context, self._work = context, work

    def __await__(self) -> Generator[Any, Any, Any]:
        steps: Any = self._work.__await__()
        return (yield from _run_in(self._context, steps))


class _Within(contextlib.AbstractContextManager[None]):
    """A scope that is entered and left in a context, and not in that of whoever runs it."""

    def __init__(self, context: contextvars.Context, scope: Scope) -> None:
        self._context, self._scope = context, scope

    def __enter__(self) -> None:
        self._context.run(self._scope.__enter__)

    def __exit__(self, *how: Any) -> None:
        self._context.run(self._scope.__exit__, *how)


def _run_in(context: contextvars.Context, stream: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
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


def device_of(gpu: object) -> Any:
    """What `gpu` of `stage` and `step` means, as a `torch.device`: `True` is the calling thread's current device, which need not be
    the one that it used first; anything else names it. None where no device is timed yet. Raises what torch does for what
    is no device."""
    if not timing.is_by_device:
        return None
    torch: Any = sys.modules["torch"]
    if gpu is not True:
        return torch.device(gpu)
    kind = "cuda" if torch.cuda.is_initialized() else "xpu"
    return torch.device(kind, getattr(torch, kind).current_device())
