"""Propagates the current request to jobs of pools: ProcessPoolExecutor, multiprocessing.Pool and ThreadPool.

submit, apply_async, map … ─▶ `pool wait` ─▶ the function, in a process of the pool ─▶ stages of the request
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from otel_infer.instrumentation.hooks.context_hooks import compile_thread_work
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.thread_context import ThreadContext
from otel_infer.instrumentation.multiprocessing._instrumentor import instrumentor
from otel_infer.instrumentation.multiprocessing.process_call import make_process_call
from otel_infer.instrumentation.waits import PooledCall
from otel_infer.tracing import start

FUTURES, POOLS = "futures", "pools"


@instrumentor.patch_hot_path("concurrent.futures.process:ProcessPoolExecutor.submit", part=FUTURES)
def _patch_submit(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def submit(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if hook.alive:
            try:
                request = start.current_request()
                if request is not None:
                    fn = make_process_call(fn, request, _read_size(self, "_max_workers"))
            except Exception as exc:
                hook.mark_failed(exc)
        return original(self, fn, *args, **kwargs)

    return compile_thread_work(original, hook, submit)


def _patch_pool(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Returns a method of multiprocessing's pools, whose first argument is a function."""

    def call_in_pool(self: Any, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if hook.alive:
            try:
                func = _carry_request(self, func)
            except Exception as exc:
                hook.mark_failed(exc)
        return original(self, func, *args, **kwargs)

    return compile_thread_work(original, hook, call_in_pool)


def _carry_request(pool: Any, func: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function for a job of this pool that is called as a part of the current request, if there is one."""
    size = _read_size(pool, "_processes")
    if _runs_in_threads(pool):
        found = start.find_request()
        return func if found is None else PooledCall(found, size, _bind_context(func))
    request = start.current_request()
    return func if request is None else make_process_call(func, request, size)


def _bind_context(func: Callable[..., Any]) -> Callable[..., Any]:
    run = ThreadContext(None).run

    def call_in_context(*args: Any, **kwargs: Any) -> Any:
        return run(func, *args, **kwargs)

    return call_in_context


def _runs_in_threads(pool: Any) -> bool:
    return any(base.__name__ == "ThreadPool" for base in type(pool).__mro__)


def _read_size(pool: Any, attribute: str) -> int:
    """Returns the number of workers of a pool; 0 = unknown."""
    size = getattr(pool, attribute, 0)
    return size if isinstance(size, int) else 0


for _method in ("apply_async", "_map_async", "imap", "imap_unordered"):
    instrumentor.patch_hot_path(f"multiprocessing.pool:Pool.{_method}", reads=("func",), part=POOLS)(
        _patch_pool
    )
