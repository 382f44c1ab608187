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

from otel_infer.instrumentation.hooks.instrumentor import Integration
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.suppression import claimed
from otel_infer.instrumentation.hooks.thread_context import Carried
from otel_infer.tracing import start as ingress

POOLS = ("concurrent.futures.thread", "anyio._backends._asyncio", "multiprocessing.pool")
"""Modules whose threads, or what these run, take jobs."""

integration = Integration("threads", "python", ("threading",))


@integration.step_hook("threading:Thread.start")
def start(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def start(self: Any) -> Any:
        if hook.alive and (claimed.get() or ingress.current() is not None):
            try:
                if not _takes_jobs(self):
                    _lend(self)
            except Exception as exc:
                hook.fail(exc)
        return original(self)

    return start


def _lend(thread: Any) -> None:
    """What is ours here goes along with a thread that is about to start."""
    carried = Carried(starts=True)
    thread.run = functools.partial(_run, thread, "run" in vars(thread), thread.run, carried)


def _run(thread: Any, is_own: bool, run: Callable[[], Any], carried: Carried) -> None:
    """The thread's `run` has its place again first: it may call itself, and ours would keep the thread alive."""
    if is_own:
        thread.run = run
    else:
        vars(thread).pop("run", None)
    carried.run(run)


def _is_elsewhere(pool: Any) -> bool:
    """Whether its jobs are pickled for other interpreters, which what is carried cannot be."""
    return any(one.__module__ == "concurrent.futures.interpreter" for one in type(pool).__mro__)


def _takes_jobs(thread: Any) -> bool:
    target = getattr(thread, "_target", None)
    return type(thread).__module__ in POOLS or getattr(target, "__module__", None) in POOLS


@integration.step_hook("concurrent.futures.thread:ThreadPoolExecutor.submit", part="pools")
def submit(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def submit(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        wanted = hook.alive and (claimed.get() or ingress.current() is not None)
        if wanted and not _is_elsewhere(self):
            return original(self, Carried().run, fn, *args, **kwargs)
        return original(self, fn, *args, **kwargs)

    return submit
