"""Propagates the current request to threads and thread-pool jobs, e.g. `Thread(target=model.generate)`.

    Thread.start ─ run in our part of the caller's context        ThreadPoolExecutor.submit ─ likewise
                 └ listed among the threads that Python started (`ringbuffer.python_threads`)

Calls pass through unchanged unless a request of ours is current or torch spans are suppressed. Pool worker
threads are also left unchanged, because they outlive the request that started them; each pool job carries its
own context. A request that is opened in a thread after the thread's request ended is not part of that
request. It gets a link to it. Python 3.14 can propagate contexts to threads itself (`-X
thread_inherit_context`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from otel_infer.instrumentation.hooks.context_hooks import compile_thread_work
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.suppression import torch_suppressed
from otel_infer.instrumentation.hooks.thread_context import ThreadContext
from otel_infer.instrumentation.waits import PooledCall
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import start
from otel_infer.tracing.request_span import RequestSpan

POOL_MODULES = ("concurrent.futures.thread", "anyio._backends._asyncio", "multiprocessing.pool")
"""Modules that define the class or the target function of pool worker threads."""

instrumentor = Instrumentor("threading", "python", ("threading",))


@instrumentor.patch_hot_path("threading:Thread.start")
def start_with_context(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def start_with_context(self: Any) -> Any:
        if hook.alive:
            try:
                request = start.find_request()
                target = getattr(self, "_target", None)
                is_pool_worker = (
                    type(self).__module__ in POOL_MODULES
                    or getattr(target, "__module__", None) in POOL_MODULES
                )
                if not is_pool_worker and (request is not None or torch_suppressed.get()):
                    opened = request if isinstance(request, RequestSpan) else None
                    thread_context, has_own_run = ThreadContext(opened, starts=True), "run" in vars(self)
                    self.run = partial(_run_in_context, self, has_own_run, self.run, thread_context)
            except Exception as exc:
                hook.mark_failed(exc)
        return original(self)

    start_thread = compile_thread_work(original, hook, start_with_context)

    def start_and_list(self: Any) -> Any:
        result = start_thread(self)
        writer = recorder.requests
        if writer is not None and hook.alive:
            try:
                writer.python_threads.add(self.native_id or 0)
            except Exception as exc:
                hook.mark_failed(exc)
        return result

    return start_and_list


def _run_in_context(
    thread: Any, has_own_run: bool, run: Callable[[], Any], thread_context: ThreadContext
) -> None:
    """Restores the thread's `run`, then calls it in the context.

    It is restored first, because `run` may call itself, and because our partial would keep the thread alive.
    """
    if has_own_run:
        thread.run = run
    else:
        vars(thread).pop("run", None)
    thread_context.run(run)


def _is_interpreter_pool(pool: Any) -> bool:
    """Returns whether the pool pickles its jobs (subinterpreters); a `ThreadContext` cannot be pickled."""
    if type(pool).__module__ == "concurrent.futures.thread":  # the usual one
        return False
    return any(base.__module__ == "concurrent.futures.interpreter" for base in type(pool).__mro__)


@instrumentor.patch_hot_path("concurrent.futures.thread:ThreadPoolExecutor.submit", part="pools")
def submit_with_context(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def submit_with_context(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        request = start.find_request() if hook.alive else None
        propagates = request is not None or (hook.alive and torch_suppressed.get())
        if propagates and not _is_interpreter_pool(self):
            run: Callable[..., Any] = ThreadContext(None).run
            if request is not None:
                run = PooledCall(request, getattr(self, "_max_workers", 0), run)
            return original(self, run, fn, *args, **kwargs)
        return original(self, fn, *args, **kwargs)

    return compile_thread_work(original, hook, submit_with_context)
