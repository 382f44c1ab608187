"""How we hold somebody else's function.

Two holds. A `Patch` runs a *probe* around a call: a generator with one `yield`; above it is before the call,
below it is after the work: a coroutine has been awaited, a stream has ended. This module makes the call, not
the probe, so a probe cannot forget it, repeat it, change its result or swallow its exception. A `StepHook` is
for the step path, where a probe is too dear: a plain closure that makes the call itself and guards its own
work with its `Hook`.

Whatever of ours raises is logged once, disabled and counted; the call goes on. Nothing here imports a module
of others, and no log line carries an exception's message, since that may quote a prompt.

A probe's first part runs in the context of the caller, its second where the work ended; for a coroutine or a
stream these may be different tasks, so a probe must not carry a context token across its `yield`.

Longer than a module should be: running a probe and taking its place are one promise, kept or broken together.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import os
import sys
import traceback
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

import wrapt

from otel_infer.instrumentation.hooks.target import Parameters

log = logging.getLogger(__name__)

_failures: list[str] = []  # append is atomic where an addition is not; short, since what fails is disabled
# What failed before a fork is counted by the parent, and stays disabled in the child.
os.register_at_fork(after_in_child=_failures.clear)


class ProbeShapeError(Exception):
    """A probe returned before the call, or yielded again after it."""


def count_errors() -> int:
    """How often code of ours has raised around somebody else's function, in this process."""
    return len(_failures)


class Hook:
    """Whether what sits on one target still works: a step hook asks `alive`, gives `fail` what it caught."""

    __slots__ = ("_logged", "alive", "target")

    def __init__(self, target: str) -> None:
        self.target = target
        self.alive = True
        self._logged = False

    def mark_failed(self, exc: BaseException) -> None:
        """Disable, count, log the first time. What a signal raised inside our code is raised on."""
        if isinstance(exc, (KeyboardInterrupt, SystemExit)):
            raise exc
        self.alive = False
        _failures.append(self.target)
        if self._logged:
            return
        self._logged = True
        with contextlib.suppress(Exception):  # logging itself raises when the user's stack is nearly full
            frames = list(traceback.walk_tb(exc.__traceback__))[-3:]
            where = ", ".join(f"{frame.f_code.co_filename}:{line}" for frame, line in frames)
            log.error("hook on %s raised %s and is disabled (%s)", self.target, type(exc).__name__, where)


_UNKNOWN = (sys.maxsize, None)


class Call:
    """One call: `call["name"]` is an argument however it was passed, else its declared default, else None."""

    __slots__ = ("_parameters", "args", "instance", "kwargs")

    def __init__(
        self, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any], parameters: Parameters
    ) -> None:
        self.instance = instance
        self.args = args
        self.kwargs = kwargs
        self._parameters = parameters

    def __getitem__(self, name: str) -> Any:
        position, default = self._parameters.get(name, _UNKNOWN)
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)


Probe = Callable[[Call], Generator[None, Any, None]]
WrapperFactory = Callable[[Callable[..., Any], Hook], Callable[..., Any]]


class _ProbeRun:
    """A probe that has seen the call begin. It sees the end once; work dropped unbegun was closed early."""

    __slots__ = ("_ended", "_generator", "_hook")

    def __init__(self, hook: Hook, steps: Generator[None, Any, None]) -> None:
        self._hook = hook
        self._generator = steps
        self._ended = False

    def send_result(self, result: Any) -> None:
        self._ended = True
        try:
            self._generator.send(result)
        except StopIteration:
            pass
        except BaseException as exc:
            self._hook.mark_failed(exc)
        else:
            self._reject_second_yield()

    def throw(self, exc: BaseException) -> None:
        """Show the probe the user's exception, and leave no trace of that on the exception."""
        self._ended = True
        trace = exc.__traceback__
        chain = {name: getattr(exc, name) for name in ("__cause__", "__context__", "__suppress_context__")}
        try:
            self._generator.throw(exc)
        except StopIteration:
            pass
        except BaseException as seen:
            # A StopIteration that leaves a generator arrives as a RuntimeError (PEP 479).
            if seen is not exc and not (isinstance(exc, StopIteration) and seen.__cause__ is exc):
                self._hook.mark_failed(seen)
        else:
            self._reject_second_yield()
        finally:
            exc.with_traceback(trace)
            for name, value in chain.items():
                object.__setattr__(exc, name, value)  # a frozen dataclass refuses setattr

    def _reject_second_yield(self) -> None:
        self._hook.mark_failed(ProbeShapeError())
        try:
            self._generator.close()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            pass  # counted already

    def __del__(self) -> None:
        if not self._ended:
            self.throw(GeneratorExit())


def _start_probe(hook: Hook, probe: Probe, call: Call) -> _ProbeRun | None:
    try:
        steps = probe(call)
        next(steps)
        return _ProbeRun(hook, steps)
    except StopIteration:
        hook.mark_failed(ProbeShapeError())
    except BaseException as exc:
        hook.mark_failed(exc)
    return None


async def _wrap_coroutine(run: _ProbeRun, coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        result = await coroutine
    except BaseException as exc:
        run.throw(exc)
        raise
    run.send_result(result)
    return result


def _wrap_generator(
    run: _ProbeRun, stream: Generator[Any, Any, Any], begun: bool
) -> Generator[Any, Any, Any]:
    """`yield from`, seeing the items. Throws on outside of `except`, which would add a context of ours."""
    item = None
    try:
        if not begun:
            item = stream.send(None)
        while True:
            try:
                value = yield item
            except BaseException as exc:
                thrown = exc
            else:
                item = stream.send(value)
                continue
            try:
                item = stream.throw(thrown)
            finally:
                del thrown  # or it would hold its own traceback
    except StopIteration as stop:
        run.send_result(item)
        return stop.value
    except BaseException as exc:
        run.throw(exc)
        raise


async def _wrap_async_generator(run: _ProbeRun, stream: AsyncGenerator[Any, Any]) -> AsyncGenerator[Any, Any]:
    item = None
    try:
        item = await stream.asend(None)
        while True:
            try:
                value = yield item
            except BaseException as exc:
                thrown = exc
            else:
                item = await stream.asend(value)
                continue
            try:
                item = await stream.athrow(thrown)
            finally:
                del thrown
    except StopAsyncIteration:
        run.send_result(item)
    except BaseException as exc:
        run.throw(exc)
        raise


_LAZY_TYPES = frozenset((CoroutineType, GeneratorType, AsyncGeneratorType))


def _wrap_work(run: _ProbeRun, work: Any) -> Any:
    """The same kind of thing as `work`, under its name; ends the probe when the work ends."""
    carrier: Any
    if type(work) is CoroutineType:
        carrier = _wrap_coroutine(run, work)
    elif type(work) is AsyncGeneratorType:
        carrier = _wrap_async_generator(run, work)
    elif work.gi_code.co_flags & inspect.CO_ITERABLE_COROUTINE:  # ours could not be awaited
        run.send_result(work)
        return work
    else:
        begun = inspect.getgeneratorstate(work) != inspect.GEN_CREATED
        carrier = _wrap_generator(run, work, begun)
        if begun:  # it takes a `send` at once, and so must ours
            next(carrier)
    carrier.__name__, carrier.__qualname__ = work.__name__, work.__qualname__
    return carrier


def _make_wrapper(probe: Probe, hook: Hook, parameters: Parameters, method: bool) -> Callable[..., Any]:
    def run_with_probe(
        wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not hook.alive:
            return wrapped(*args, **kwargs)
        if method and instance is None and args:
            # Called through the class, on something that only looks like an instance.
            call = Call(args[0], args[1:], kwargs, parameters)
        else:
            call = Call(instance, args, kwargs, parameters)
        run = _start_probe(hook, probe, call)
        if run is None:
            return wrapped(*args, **kwargs)
        try:
            result = wrapped(*args, **kwargs)
        except BaseException as exc:
            run.throw(exc)
            raise
        if type(result) in _LAZY_TYPES:
            return _wrap_work(run, result)
        run.send_result(result)
        return result

    return run_with_probe


class _BoundWrapper(wrapt.BoundFunctionWrapper):  # type: ignore[type-arg]
    """Pickles and copies as the bound method it stands for."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        owner = getattr(self.__wrapped__, "__self__", None)
        return getattr, (self._self_parent._self_home if owner is None else owner, self.__name__)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        read, (owner, name) = self.__reduce_ex__(4)
        return read(copy.deepcopy(owner, memo), name)


class _Wrapper(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """Ours, so that nobody else's is taken off. Pickles by name and copies as itself, as functions do."""

    __bound_function_wrapper__ = _BoundWrapper
    _self_home: Any = None  # the class or module it sits on

    def __reduce_ex__(self, protocol: Any) -> str:
        return str(self.__qualname__)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self
