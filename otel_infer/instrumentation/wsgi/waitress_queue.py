"""Knows since when a request of waitress has waited for one of its threads.

a request is read, in waitress's main thread ─ add_task ─▶ `pool wait` ─▶ a thread calls the application
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from otel_infer import _clock
from otel_infer.instrumentation.hooks.probe import Hook

PUT_AT_ATTRIBUTE = "otel_infer_put_at"
CHANNEL_KEY = "waitress.client_disconnected"
"""Key of the environ whose value is a method of the connection."""


class QueuedTask(NamedTuple):
    """A request in waitress's queue. `put_at`: monotonic ns; 0 = it is not waitress's. `threads`: that serve the queue."""

    put_at: int = 0
    threads: int = 0
    socket: Any = None


NOT_QUEUED = QueuedTask()


def patch_add_task(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """Returns an `add_task` that notes when the connection of a request was put into the queue."""

    def add_task(self: Any, task: Any, *args: Any, **kwargs: Any) -> Any:
        if hook.alive:
            try:
                setattr(task, PUT_AT_ATTRIBUTE, _clock.now())
            except Exception as exc:
                hook.count_failure(exc)
        return original(self, task, *args, **kwargs)

    return add_task


def find_task(environ: Mapping[str, Any]) -> QueuedTask:
    """Returns when the request of this environ was put into the queue."""
    channel = getattr(environ.get(CHANNEL_KEY), "__self__", None)
    if channel is None:
        return NOT_QUEUED
    put_at = channel.__dict__.pop(
        PUT_AT_ATTRIBUTE, 0
    )  # further requests of the connection are served at once
    threads = getattr(getattr(channel.server, "adj", None), "threads", 0)
    return QueuedTask(put_at, threads if isinstance(threads, int) else 0, channel.socket)
