"""Threads that work for a request: `Thread(target=model.generate)` and pools carry the current request along.

    Thread.start ─ run with what is ours of the caller's context        ThreadPoolExecutor.submit ─ likewise

Only while a request of ours is current or somebody runs a step; everything else is passed through untouched, and so are the
threads of pools, which outlive whom they were started for: their jobs bring their own. What is opened in another thread that does
so is no part of the request that it was started in, and links to it. Newer Pythons may be told to carry contexts along
(`-X thread_inherit_context`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.suppression import torch_suppressed
from otel_infer.instrumentation.hooks.thread_context import ThreadContext
from otel_infer.tracing import start as ingress

POOL_MODULES = ("concurrent.futures.thread", "anyio._backends._asyncio", "multiprocessing.pool")
"""Modules whose threads, or what these run, take jobs."""

instrumentor = Instrumentor("threading", "python", ("threading",))


@instrumentor.patch_hot_path("threading:Thread.start")
def start_with_context(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def start_with_context(self: Any) -> Any:
        if hook.alive and (torch_suppressed.get() or ingress.current_request() is not None):
            try:
                if not _is_pool_worker(self):
                    _propagate_context(self)
            except Exception as exc:
                hook.mark_failed(exc)
        return original(self)

    return start_with_context


def _propagate_context(thread: Any) -> None:
    """What is ours here goes along with a thread that is about to start."""
    carried = ThreadContext(starts=True)
    thread.run = functools.partial(_run_in_context, thread, "run" in vars(thread), thread.run, carried)


def _run_in_context(thread: Any, is_own: bool, run: Callable[[], Any], carried: ThreadContext) -> None:
    """The thread's `run` has its place again first: it may call itself, and ours would keep the thread alive."""
    if is_own:
        thread.run = run
    else:
        vars(thread).pop("run", None)
    carried.run(run)


def _is_interpreter_pool(pool: Any) -> bool:
    """Whether its jobs are pickled for other interpreters, which what is carried cannot be."""
    return any(one.__module__ == "concurrent.futures.interpreter" for one in type(pool).__mro__)


def _is_pool_worker(thread: Any) -> bool:
    target = getattr(thread, "_target", None)
    return type(thread).__module__ in POOL_MODULES or getattr(target, "__module__", None) in POOL_MODULES


@instrumentor.patch_hot_path("concurrent.futures.thread:ThreadPoolExecutor.submit", part="pools")
def submit_with_context(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def submit_with_context(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        wanted = hook.alive and (torch_suppressed.get() or ingress.current_request() is not None)
        if wanted and not _is_interpreter_pool(self):
            return original(self, ThreadContext().run, fn, *args, **kwargs)
        return original(self, fn, *args, **kwargs)

    return submit_with_context
