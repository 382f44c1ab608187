"""Runs probes around functions of other libraries. A failing probe never affects the call.

There are two kinds of patch. A `FunctionPatch` runs a *probe* around a call: a generator with one `yield`.
The code above the `yield` runs before the call. The code below it runs after the work: a coroutine has been
awaited, a stream has ended. This module makes the call, not the probe. So a probe cannot omit or repeat the
call, change its result or swallow its exception. A `HotPathPatch` is for the step path, where a probe costs
too much. It installs a plain closure, which makes the call itself and guards its own work with its `Hook`.

Our code that raises is logged once, counted and disabled; the call continues. This module imports no patched
library. Log lines never contain an exception's message, because it may quote a prompt.

The first part of a probe runs in the caller's context, the second one where the work ended. For a coroutine
or a stream these may be different tasks. A probe must therefore not keep a context token across its `yield`.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import sys
import traceback
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any

import wrapt

from otel_infer.instrumentation.hooks.target import Parameters
from otel_infer.ringbuffer.forks import call_in_child
from otel_infer.ringbuffer.native import native

log = logging.getLogger(__name__)

# A list, because append is atomic and an addition is not.
_failures: list[str] = []
MAX_FAILURES = 100_000
"""Failures that are counted: a hook that stays may fail on every request."""
# The parent process counts failures from before the fork. Failed hooks stay disabled in the child.
call_in_child(_failures.clear)


class ProbeShapeError(Exception):
    """Raised for a probe that returned before the call, or yielded again after it."""


def count_errors() -> int:
    """Returns how often a probe or hook has failed in this process."""
    return len(_failures)


class PythonHookState:
    """The state of a hook that compiled code reads as well."""

    __slots__ = ("alive",)

    alive: bool


if TYPE_CHECKING:
    HookState = PythonHookState
else:
    HookState = PythonHookState if native is None else native.HookState


class Hook(HookState):
    """The state of the hook on one target.

    A hot-path hook reads `alive` and passes the exceptions of our code to `mark_failed`, or to
    `count_failure` where a request can cause them: one odd request must not end the recording of all others.
    """

    __slots__ = ("_logged", "target")

    def __init__(self, target: str) -> None:
        self.target = target
        self.alive = True
        self._logged = False

    def mark_failed(self, exc: BaseException) -> None:
        """Disables the hook, counts the failure and logs the first one.

        Re-raises KeyboardInterrupt and SystemExit, because a signal handler raised them inside our code.
        """
        self._count(exc, "is disabled")
        self.alive = False

    def count_failure(self, exc: BaseException) -> None:
        """Counts the failure and logs the first one. The hook stays; re-raises like `mark_failed`."""
        self._count(exc, "did not record a request")

    def _count(self, exc: BaseException, consequence: str) -> None:
        if isinstance(exc, (KeyboardInterrupt, SystemExit)):
            raise exc
        if len(_failures) < MAX_FAILURES:
            _failures.append(self.target)
        if self._logged:
            return
        self._logged = True
        with contextlib.suppress(Exception):  # logging raises too when the call stack is nearly full
            frames = list(traceback.walk_tb(exc.__traceback__))[-3:]
            where = ", ".join(f"{frame.f_code.co_filename}:{line}" for frame, line in frames)
            log.error("hook on %s raised %s and %s (%s)", self.target, type(exc).__name__, consequence, where)


_UNKNOWN = (sys.maxsize, None)


class Call:
    """The arguments of one call. `call["name"]` is an argument, else its declared default, else None."""

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
    """A probe that is waiting at its `yield` for the end of the call. It receives the end once.

    Work that is dropped before it ended, e.g. a coroutine that is never awaited, ends with GeneratorExit.
    """

    __slots__ = ("_ended", "_generator", "_hook")

    def __init__(self, hook: Hook, generator: Generator[None, Any, None]) -> None:
        self._hook = hook
        self._generator = generator
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
        """Raises the application's exception in the probe, then restores its traceback and context."""
        self._ended = True
        trace = exc.__traceback__
        chain = {name: getattr(exc, name) for name in ("__cause__", "__context__", "__suppress_context__")}
        try:
            self._generator.throw(exc)
        except StopIteration:
            pass
        except BaseException as raised:
            # A StopIteration that leaves a generator arrives as a RuntimeError (PEP 479).
            if raised is not exc and not (isinstance(exc, StopIteration) and raised.__cause__ is exc):
                self._hook.mark_failed(raised)
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
            pass  # the failure is counted already

    def __del__(self) -> None:
        if not self._ended:
            self.throw(GeneratorExit())


def _start_probe(hook: Hook, probe: Probe, call: Call) -> _ProbeRun | None:
    try:
        generator = probe(call)
        next(generator)
        return _ProbeRun(hook, generator)
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
    run: _ProbeRun, stream: Generator[Any, Any, Any], is_started: bool
) -> Generator[Any, Any, Any]:
    """Yields the items of `stream` as `yield from` does, and passes the last item to the probe.

    Exceptions are thrown into `stream` outside of the `except` block, which would set their `__context__`.
    """
    item = None
    try:
        if not is_started:
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
                del thrown  # breaks the reference cycle with its traceback
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
    """Returns a wrapper of the same type and name as `work`, which ends the probe when the work ends."""
    wrapper: Any
    if type(work) is CoroutineType:
        wrapper = _wrap_coroutine(run, work)
    elif type(work) is AsyncGeneratorType:
        wrapper = _wrap_async_generator(run, work)
    elif work.gi_code.co_flags & inspect.CO_ITERABLE_COROUTINE:  # a generator of ours could not be awaited
        run.send_result(work)
        return work
    else:
        is_started = inspect.getgeneratorstate(work) != inspect.GEN_CREATED
        wrapper = _wrap_generator(run, work, is_started)
        if is_started:  # `work` accepts a `send` immediately, so the wrapper must accept it too
            next(wrapper)
    wrapper.__name__, wrapper.__qualname__ = work.__name__, work.__qualname__
    return wrapper


def make_wrapper(probe: Probe, hook: Hook, parameters: Parameters, method: bool) -> Callable[..., Any]:
    def run_with_probe(
        wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not hook.alive:
            return wrapped(*args, **kwargs)
        if method and instance is None and args:
            # Called through the class with an object that wrapt does not recognise as an instance.
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
    """A bound wrapper that pickles and copies as the bound method it wraps."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        owner = getattr(self.__wrapped__, "__self__", None)
        return getattr, (self._self_parent._self_home if owner is None else owner, self.__name__)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        getter, (owner, name) = self.__reduce_ex__(4)
        return getter(copy.deepcopy(owner, memo), name)


class ProbeWrapper(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """A function wrapper that pickles by its qualified name and copies as itself, as functions do."""

    __bound_function_wrapper__ = _BoundWrapper
    _self_home: Any = None  # the class or module that holds it

    def __reduce_ex__(self, protocol: Any) -> str:
        return str(self.__qualname__)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self
