"""Notes how long an asynchronous worker waits for further items of a batch, whichever way it limits its wait.

    await asyncio.wait_for(queue.get(), left)              the call of `get` is cancelled
    async with asyncio.timeout(window): await queue.get()  likewise
    await asyncio.wait({getter, timer})                    `wait` returns, and the getter goes on
    await asyncio.sleep(0.002), until items are there      `sleep` returns

The wait of the batch ends then, unless an item is taken later (`tracing.work.Work.begin_call`).
"""

from __future__ import annotations

import asyncio
import inspect
from asyncio import coroutines
from collections.abc import Awaitable, Callable
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.context_hooks import compile_queue_get, compile_sleep
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.tracing import context
from otel_infer.tracing.request_span import REQUEST_KEY
from otel_infer.tracing.work import Work, Worker, attach_work, find_worker

instrumentor = Instrumentor("batch_windows", "python", ("asyncio.queues",))

_getter_codes = {asyncio.Queue.get.__code__}
"""Code of coroutines that take one item."""


def is_getter(key: int) -> bool:
    """Returns whether what runs here is a task that takes one item and does nothing else. `key`: of `find_worker`."""
    task = asyncio.current_task() if key > 0 else None
    return task is not None and getattr(task.get_coro(), "cr_code", None) in _getter_codes


def find_waiting_work() -> Work | None:
    """Returns the work of a worker that has taken an item and may take further ones; None if there is none."""
    work = context.current_context().get(REQUEST_KEY)
    return work if type(work) is Work and work.continues() else None


def note_wait() -> None:
    """Notes that a worker got no further item: the queue was empty, or it has waited long enough."""
    work = find_waiting_work()
    if work is not None:
        work.worker.waited_until = _clock.now()


def _prepare_worker() -> Work | None:
    """Returns the work of the worker here, if it takes further items of a batch.

    A worker without any gets its work before it takes the first item: a task that takes one for it shares this work.
    """
    current = context.current_context().get(REQUEST_KEY)
    if type(current) is Work:
        return current if current.worker.key == find_worker() and current.continues() else None
    if current is None or current.ended:
        attach_work(Work(Worker(find_worker())))
    return None


# ── hooks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@instrumentor.patch_hot_path("asyncio.queues:Queue.get", part="asyncio")
def _patch_get(original: Callable[..., Awaitable[Any]], hook: Hook) -> Callable[..., Awaitable[Any]]:
    async def follow(queue: Any, work: Work) -> Any:
        try:
            return await original(queue)
        except BaseException:
            if hook.alive:
                work.worker.waited_until = _clock.now()
            raise

    def get(self: Any) -> Awaitable[Any]:
        work = None
        if hook.alive:
            try:
                work = _prepare_worker()
            except Exception as exc:
                hook.count_failure(exc)
        return original(self) if work is None else follow(self, work)

    _getter_codes.update((getattr(original, "__code__", follow.__code__), follow.__code__))
    return _mark_coroutine_function(compile_queue_get(original, hook, get, follow), follow)


def _mark_coroutine_function(function: Any, awaited: Any) -> Callable[..., Awaitable[Any]]:
    """Lets `inspect`, or `asyncio` before Python 3.12, see that a call of the function is awaited. Returns the function.

    `awaited`: a coroutine function, whose code a compiled function shows.
    """
    if hasattr(inspect, "markcoroutinefunction"):
        inspect.markcoroutinefunction(function)
    else:
        function._is_coroutine = coroutines._is_coroutine  # type: ignore[attr-defined]
    if not inspect.isfunction(function):
        function.__code__ = awaited.__code__
    return function  # type: ignore[no-any-return]


def _patch_wait(original: Callable[..., Awaitable[Any]], hook: Hook) -> Callable[..., Awaitable[Any]]:
    async def wait(fs: Any, *args: Any, **kwargs: Any) -> Any:
        result = await original(fs, *args, **kwargs)
        if hook.alive and find_waiting_work() is not None and _has_getter(fs):
            note_wait()
        return result

    return wait


def _has_getter(tasks: Any) -> bool:
    """Returns whether one of these tasks takes an item. An iterator, which was consumed, is not read."""
    found = tasks if isinstance(tasks, (set, frozenset, list, tuple)) else ()
    return any(
        isinstance(task, asyncio.Task) and getattr(task.get_coro(), "cr_code", None) in _getter_codes
        for task in found
    )


def _patch_sleep(original: Callable[..., Awaitable[Any]], hook: Hook) -> Callable[..., Awaitable[Any]]:
    async def follow(*args: Any, **kwargs: Any) -> Any:
        result = await original(*args, **kwargs)
        if hook.alive:
            note_wait()
        return result

    def sleep(*args: Any, **kwargs: Any) -> Awaitable[Any]:
        is_worker = hook.alive and type(context.current_context().get(REQUEST_KEY)) is Work
        return follow(*args, **kwargs) if is_worker else original(*args, **kwargs)

    return _mark_coroutine_function(compile_sleep(original, hook, sleep), follow)


for _target, _wrap in (
    ("asyncio.tasks:wait", _patch_wait),
    ("asyncio:wait", _patch_wait),
    ("asyncio.tasks:sleep", _patch_sleep),
    ("asyncio:sleep", _patch_sleep),
):
    instrumentor.patch_hot_path(_target, part="asyncio")(_wrap)
