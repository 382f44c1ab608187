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
import functools
import inspect
import logging
import os
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

import wrapt

log = logging.getLogger(__name__)

_failures: list[str] = []  # append is atomic where an addition is not; short, since what fails is disabled
# What failed before a fork is counted by the parent, and stays disabled in the child.
os.register_at_fork(after_in_child=_failures.clear)


class Drift(Exception):
    """The library no longer looks the way its integration was written for."""

    def __init__(self, target: str, reason: str) -> None:
        super().__init__(target, reason)  # both, so that it pickles
        self.target = target
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.target}: {self.reason}"


class ProbeShapeError(Exception):
    """A probe returned before the call, or yielded again after it."""


def errors() -> int:
    """How often code of ours has raised around somebody else's function, in this process."""
    return len(_failures)


class Hook:
    """Whether what sits on one target still works: a step hook asks `alive`, gives `fail` what it caught."""

    __slots__ = ("_said", "alive", "target")

    def __init__(self, target: str) -> None:
        self.target = target
        self.alive = True
        self._said = False

    def fail(self, exc: BaseException) -> None:
        """Disable, count, log the first time. What a signal raised inside our code is raised on."""
        if isinstance(exc, (KeyboardInterrupt, SystemExit)):
            raise exc
        self.alive = False
        _failures.append(self.target)
        if self._said:
            return
        self._said = True
        with contextlib.suppress(Exception):  # logging itself raises when the user's stack is nearly full
            frames = list(traceback.walk_tb(exc.__traceback__))[-3:]
            where = ", ".join(f"{frame.f_code.co_filename}:{line}" for frame, line in frames)
            log.error("hook on %s raised %s and is disabled (%s)", self.target, type(exc).__name__, where)


Parameters = dict[str, tuple[int, Any]]
"""By name: the position (sys.maxsize if it has none) and the default (None if it has none)."""
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
Make = Callable[[Callable[..., Any], Hook], Callable[..., Any]]


class _Run:
    """A probe that has seen the call begin. It sees the end once; work dropped unbegun was closed early."""

    __slots__ = ("_ended", "_hook", "_steps")

    def __init__(self, hook: Hook, steps: Generator[None, Any, None]) -> None:
        self._hook = hook
        self._steps = steps
        self._ended = False

    def end(self, result: Any) -> None:
        self._ended = True
        try:
            self._steps.send(result)
        except StopIteration:
            pass
        except BaseException as exc:
            self._hook.fail(exc)
        else:
            self._yielded_again()

    def throw(self, exc: BaseException) -> None:
        """Show the probe the user's exception, and leave no trace of that on the exception."""
        self._ended = True
        trace = exc.__traceback__
        chain = {name: getattr(exc, name) for name in ("__cause__", "__context__", "__suppress_context__")}
        try:
            self._steps.throw(exc)
        except StopIteration:
            pass
        except BaseException as seen:
            # A StopIteration that leaves a generator arrives as a RuntimeError (PEP 479).
            if seen is not exc and not (isinstance(exc, StopIteration) and seen.__cause__ is exc):
                self._hook.fail(seen)
        else:
            self._yielded_again()
        finally:
            exc.with_traceback(trace)
            for name, value in chain.items():
                object.__setattr__(exc, name, value)  # a frozen dataclass refuses setattr

    def _yielded_again(self) -> None:
        self._hook.fail(ProbeShapeError())
        try:
            self._steps.close()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            pass  # counted already

    def __del__(self) -> None:
        if not self._ended:
            self.throw(GeneratorExit())


def _begin(hook: Hook, probe: Probe, call: Call) -> _Run | None:
    try:
        steps = probe(call)
        next(steps)
        return _Run(hook, steps)
    except StopIteration:
        hook.fail(ProbeShapeError())
    except BaseException as exc:
        hook.fail(exc)
    return None


async def _await(run: _Run, coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        result = await coroutine
    except BaseException as exc:
        run.throw(exc)
        raise
    run.end(result)
    return result


def _stream(run: _Run, stream: Generator[Any, Any, Any], begun: bool) -> Generator[Any, Any, Any]:
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
        run.end(item)
        return stop.value
    except BaseException as exc:
        run.throw(exc)
        raise


async def _async_stream(run: _Run, stream: AsyncGenerator[Any, Any]) -> AsyncGenerator[Any, Any]:
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
        run.end(item)
    except BaseException as exc:
        run.throw(exc)
        raise


_WORK = frozenset((CoroutineType, GeneratorType, AsyncGeneratorType))


def _carry(run: _Run, work: Any) -> Any:
    """The same kind of thing as `work`, under its name; ends the probe when the work ends."""
    carrier: Any
    if type(work) is CoroutineType:
        carrier = _await(run, work)
    elif type(work) is AsyncGeneratorType:
        carrier = _async_stream(run, work)
    elif work.gi_code.co_flags & inspect.CO_ITERABLE_COROUTINE:  # ours could not be awaited
        run.end(work)
        return work
    else:
        begun = inspect.getgeneratorstate(work) != inspect.GEN_CREATED
        carrier = _stream(run, work, begun)
        if begun:  # it takes a `send` at once, and so must ours
            next(carrier)
    carrier.__name__, carrier.__qualname__ = work.__name__, work.__qualname__
    return carrier


def _around(probe: Probe, hook: Hook, parameters: Parameters, method: bool) -> Callable[..., Any]:
    def around(
        wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not hook.alive:
            return wrapped(*args, **kwargs)
        if method and instance is None and args:
            # Called through the class, on something that only looks like an instance.
            call = Call(args[0], args[1:], kwargs, parameters)
        else:
            call = Call(instance, args, kwargs, parameters)
        run = _begin(hook, probe, call)
        if run is None:
            return wrapped(*args, **kwargs)
        try:
            result = wrapped(*args, **kwargs)
        except BaseException as exc:
            run.throw(exc)
            raise
        if type(result) in _WORK:
            return _carry(run, result)
        run.end(result)
        return result

    return around


class _Bound(wrapt.BoundFunctionWrapper):  # type: ignore[type-arg]
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

    __bound_function_wrapper__ = _Bound
    _self_home: Any = None  # the class or module it sits on

    def __reduce_ex__(self, protocol: Any) -> str:
        return str(self.__qualname__)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


class _Place(ABC):
    """One attribute of a module or class, which is ours while installed."""

    def __init__(self, target: str, reads: Sequence[str], optional: bool, part: str) -> None:
        self.module, _, self.path = target.partition(":")
        if not self.module or not self.path:
            raise ValueError(f"{target!r} is not like 'package.module:Class.method'")
        self.target = target
        self.reads = tuple(reads)
        self.optional = optional
        self.part = part
        self.hook = Hook(target)
        self.installed = False
        self._taken: tuple[Any, str, Any, Any, bool] | None = None  # owner, name, original, ours, inherited

    @property
    def active(self) -> bool:
        """Installed, and nothing of ours has raised there."""
        return self.installed and self.hook.alive

    def check(self) -> bool:
        """Whether there is a target to install on; False only for an optional one. Raises `Drift`."""
        return self._find() is not None

    def install(self) -> bool:
        """Take the place, once. False if an optional target is missing. Raises `Drift`, nothing changed."""
        if self.installed:
            return True
        found = self._find()
        if found is None:
            return False
        owner, name, current, parameters = found
        if self._taken is not None and _lies_within(current, self._taken[3]):
            self.hook.alive = True
        else:
            self.hook = Hook(
                self.target
            )  # what an earlier install left beneath somebody's wrapper stays dead
            ours = self._replacement(owner, current, parameters)
            inherited = name not in vars(owner)
            try:
                setattr(owner, name, ours)
            except (AttributeError, TypeError):
                raise Drift(self.target, "cannot be replaced") from None
            self._taken = owner, name, current, ours, inherited
        self.installed = True
        return True

    def remove(self) -> None:
        """Give the place back if it is still ours; what others have wrapped stays, and does nothing."""
        if not self.installed or self._taken is None:
            return
        self.installed = self.hook.alive = False
        owner, name, original, ours, inherited = self._taken
        if vars(owner).get(name) is not ours:
            log.warning(
                "%s was wrapped or replaced by others; ours stays in place and does nothing", self.target
            )
            return
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
        self._taken = None

    def _find(self) -> tuple[Any, str, Any, Parameters] | None:
        try:
            owner, name, current = resolve(self.module, self.path)
        except LookupError as exc:
            if self.optional:
                return None
            raise Drift(self.target, f"there is no {exc.args[0]}") from None
        if isinstance(current, type):  # a replaced class could not be unpickled to
            raise Drift(self.target, "is a class, not a function")
        if not callable(current) and not isinstance(current, (classmethod, staticmethod)):
            raise Drift(self.target, "is not a function")
        parameters = _parameters(owner, current)
        missing = [name for name in self.reads if name not in parameters]
        if missing:
            raise Drift(self.target, f"declares no parameter {', '.join(missing)}")
        return owner, name, current, parameters

    @abstractmethod
    def _replacement(self, owner: Any, current: Any, parameters: Parameters) -> Any: ...


class Patch(_Place):
    """A probe around every call of `target`; `reads` are the arguments the probe asks its `Call` for."""

    def __init__(
        self, target: str, probe: Probe, reads: Sequence[str] = (), optional: bool = False, part: str = ""
    ) -> None:
        super().__init__(target, reads, optional, part)
        self.probe = probe

    def _replacement(self, owner: Any, current: Any, parameters: Parameters) -> Any:
        method = isinstance(owner, type) and not isinstance(current, (classmethod, staticmethod))
        ours = _Wrapper(current, _around(self.probe, self.hook, parameters, method))
        ours._self_home = owner
        return ours


class StepHook(_Place):
    """`make(original, hook)` in the place of `target`: a function of its kind, calling `original` once."""

    def __init__(
        self, target: str, make: Make, reads: Sequence[str] = (), optional: bool = False, part: str = ""
    ) -> None:
        super().__init__(target, reads, optional, part)
        self.make = make

    def _replacement(self, owner: Any, current: Any, parameters: Parameters) -> Any:
        kind = type(current)
        if kind in (classmethod, staticmethod):
            return kind(self._made(current.__func__))
        if isinstance(owner, type) and hasattr(
            current, "__get__"
        ):  # a wrapper of others must know that it is bound
            current = current.__get__(None, owner)
        return self._made(current)

    def _made(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(original)(self.make(original, self.hook))


def resolve(module: str, path: str) -> tuple[Any, str, Any]:
    """Owner, name, what it holds; runs nobody's code. Raises LookupError with what is missing."""
    owner = sys.modules.get(module)
    if owner is None:
        raise LookupError(f"module {module} imported")
    *outer, name = path.split(".")
    for step in outer:
        owner = _held(owner, step)
    return owner, name, _held(owner, name)


def _held(owner: Any, name: str) -> Any:
    for home in owner.__mro__ if isinstance(owner, type) else (owner,):
        if name in getattr(home, "__dict__", ()):
            return home.__dict__[name]
    raise LookupError(name)


def _parameters(owner: Any, current: Any) -> Parameters:
    """What a caller may name, without `self` or `cls`; empty if the signature cannot be read."""
    function = current.__func__ if isinstance(current, (classmethod, staticmethod)) else current
    try:
        declared = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return {}
    bound = isinstance(owner, type) and not isinstance(current, staticmethod)
    if bound and declared and declared[0].kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD:
        del declared[0]
    parameters: Parameters = {}
    for position, parameter in enumerate(declared):
        if parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            named_only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
            default = None if parameter.default is inspect.Parameter.empty else parameter.default
            parameters[parameter.name] = (sys.maxsize if named_only else position, default)
    return parameters


def _lies_within(outer: Any, ours: Any) -> bool:
    """Whether calling `outer` still comes through `ours`, as far as wrappers tell."""
    for _ in range(100):  # a wrapper may say that it wraps itself
        if outer is ours or getattr(outer, "_self_parent", None) is ours:
            return True
        outer = getattr(outer, "__wrapped__", None)
    return False
