"""Records what a request waited for before its first token: a thread of a pool, a semaphore, a lock, a condition.

    anyio.to_thread.run_sync, ThreadPoolExecutor.submit ──▶ `pool wait`, until a thread begins the call
    asyncio's Lock, Semaphore, Condition                ──▶ `lock wait`, if it could not be had at once
    threading's Semaphore, Condition                    ──▶ `lock wait`, likewise; a `threading.Lock` is C

Waits under 5 ms are not recorded. A wait of the standard library's or a server's own, inside of a queue or a future, is
none of these: what it waits for is another function's work (`libraries`).
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.hooks.context_hooks import compile_thread_work
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook, WrapperFactory
from otel_infer.instrumentation.libraries import is_of_library
from otel_infer.ringbuffer import events
from otel_infer.tracing import start
from otel_infer.tracing.deferred_request import CurrentRequest

MIN_WAIT_NS = 5_000_000
_STANDARD_MODULES = ("threading", "queue")

instrumentor = Instrumentor("waits", "python", ("threading",))


def find_waiting_request() -> CurrentRequest | None:
    """Returns the current request if it has no token yet; None otherwise."""
    request = start.find_request()
    return request if request is not None and _has_no_token(request) else None


def _has_no_token(request: CurrentRequest) -> bool:
    return not (request.tokens_reached or request.responding)


class PooledCall:
    """A call of a request in a thread of a pool. `size`: the pool's threads. The start of the call ends a wait for one."""

    __slots__ = ("_call", "_request", "_size", "_submitted_at")

    def __init__(self, request: CurrentRequest, size: int, call: Callable[..., Any]) -> None:
        self._request, self._size, self._call = request, size, call
        self._submitted_at = _clock.now() if _has_no_token(request) else 0

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if self._submitted_at:
            record_wait(self._request, events.POOL_WAIT, self._submitted_at, self._size)
        return self._request.call_in_thread(self._call, *args, **kwargs)


def record_wait(request: CurrentRequest, stage: str, began_at: int, items: int) -> None:
    """Records that the request has waited since `began_at` (monotonic ns). `items`: the pool's size, or the kind of wait."""
    now = _clock.now()
    if now - began_at >= MIN_WAIT_NS and not request.ended:
        request.record_event(events.StageEnded(now, began_at, stage, items))


@instrumentor.patch_hot_path("anyio.to_thread:run_sync", optional=True, part="anyio")
def _patch_run_sync(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def run_sync(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if hook.alive:
            try:
                request = start.find_request()
                if request is not None:
                    func = PooledCall(request, _count_tokens(kwargs.get("limiter")), func)
            except Exception as exc:
                hook.mark_failed(exc)
        return original(func, *args, **kwargs)

    return compile_thread_work(original, hook, run_sync)


def _count_tokens(limiter: Any) -> int:
    """Returns the number of threads that anyio's limiter allows; 0 if it has no limit."""
    from anyio.to_thread import current_default_thread_limiter

    total = (limiter or current_default_thread_limiter()).total_tokens
    return int(total) if total < events.MAX_COUNT else 0


# ── locks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _patch_coroutine(kind: str, is_free: Callable[[Any], bool]) -> WrapperFactory:
    """Returns a factory for `acquire` or `wait` of asyncio. `is_free`: whether an object can be had at once."""
    number = events.WAIT_KINDS.index(kind) + 1

    def make_wrapper(original: Callable[..., Awaitable[Any]], hook: Hook) -> Callable[..., Awaitable[Any]]:
        async def wait_and_record(self: Any, request: CurrentRequest) -> Any:
            began_at = _clock.now()
            try:
                return await original(self)
            finally:
                record_wait(request, events.LOCK_WAIT, began_at, number)

        def acquire(self: Any) -> Awaitable[Any]:
            request = _find_request_that_waits(self, is_free, hook)
            return original(self) if request is None else wait_and_record(self, request)

        return acquire

    return make_wrapper


def _patch_blocking(kind: str, is_free: Callable[[Any], bool]) -> WrapperFactory:
    """Returns a factory for `acquire` or `wait` of threading."""
    number = events.WAIT_KINDS.index(kind) + 1

    def make_wrapper(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        def acquire(self: Any, *args: Any, **kwargs: Any) -> Any:
            request = _find_request_that_waits(self, is_free, hook)
            if request is None or _is_called_by_library(sys._getframe(1)):
                return original(self, *args, **kwargs)
            began_at = _clock.now()
            try:
                return original(self, *args, **kwargs)
            finally:
                record_wait(request, events.LOCK_WAIT, began_at, number)

        return compile_thread_work(original, hook, acquire)

    return make_wrapper


def _find_request_that_waits(lock: Any, is_free: Callable[[Any], bool], hook: Hook) -> CurrentRequest | None:
    """Returns the current request if it has to wait for the lock; None otherwise. Never raises, whatever the lock is."""
    try:
        return find_waiting_request() if hook.alive and not is_free(lock) else None
    except Exception as exc:  # a subclass may have no such attribute
        hook.mark_failed(exc)
        return None


def _is_called_by_library(frame: Any) -> bool:
    """Returns whether the caller is a library's code, such as a queue, a future or a server. `with` calls it by `__enter__`."""
    if frame.f_code.co_name in ("__enter__", "wait_for"):
        frame = frame.f_back
    return frame is None or frame.f_globals.get("__name__") in _STANDARD_MODULES or is_of_library(frame)


def _never(_: Any) -> bool:
    return False


for _target, _wrap in (
    ("asyncio.locks:Lock.acquire", _patch_coroutine("asyncio.Lock", lambda lock: not lock.locked())),
    (
        "asyncio.locks:Semaphore.acquire",
        _patch_coroutine("asyncio.Semaphore", lambda free: not free.locked()),
    ),
    ("asyncio.locks:Condition.wait", _patch_coroutine("asyncio.Condition", _never)),
):
    instrumentor.patch_hot_path(_target, optional=True, part="asyncio")(_wrap)
for _target, _wrap in (
    ("threading:Semaphore.acquire", _patch_blocking("threading.Semaphore", lambda free: free._value > 0)),
    ("threading:Semaphore.__enter__", _patch_blocking("threading.Semaphore", lambda free: free._value > 0)),
    ("threading:Condition.wait", _patch_blocking("threading.Condition", _never)),
):
    instrumentor.patch_hot_path(_target, optional=True, part="threads")(_wrap)
