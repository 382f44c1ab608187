"""Follows the items of requests through the queues of a manager, `multiprocessing.Manager().Queue()`.

    a request puts an item, wrapped ─▶ the manager's process keeps it wrapped ─▶ a worker gets the item itself

The wrapper unwraps itself where it is unpickled outside of the manager's process, so a process without hooks gets the item too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.multiprocessing._instrumentor import instrumentor
from otel_infer.instrumentation.multiprocessing.queues import (
    Trailer,
    close_joined,
    describe_put,
    note_wait,
    take_item,
)

PUTS = ("put", "put_nowait")
FOLLOWED = frozenset((*PUTS, "get", "get_nowait"))
QUEUE_PROXY = "Queue]"
"""The name of a proxy's class ends with it: `AutoProxy[Queue]`, `AutoProxy[JoinableQueue]`."""


class CarriedItem:
    """An item on its way through a manager, with the fields of the `Trailer` of who has put it."""

    __slots__ = ("fields", "item")

    def __init__(self, item: Any, fields: tuple[Any, ...]) -> None:
        self.item, self.fields = item, fields

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return restore_item, (self.item, self.fields)


def restore_item(item: Any, fields: tuple[Any, ...]) -> Any:
    """Returns the item in the process that takes it, which works for its request from now on; else the wrapper."""
    if _is_manager():
        return CarriedItem(item, fields)
    if _hooks and _hooks[-1].alive:
        try:
            take_item(Trailer(*fields))
        except Exception as exc:
            _hooks[-1].count_failure(exc)
    return item


_hooks: list[Hook] = []
"""The hook on proxies, once it is installed in this process."""


def _is_manager() -> bool:
    """Returns whether this process serves a manager's objects, whatever the class of the manager."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and getattr(process.current_process(), "_manager_server", None) is not None


@instrumentor.patch_hot_path(
    "multiprocessing.managers:BaseProxy._callmethod", reads=("methodname", "args"), part="managers"
)
def _patch_call(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    _hooks.append(hook)

    def call_method(self: Any, methodname: str, args: Any = (), kwds: Any = {}) -> Any:  # noqa: B006 (as the original)
        if methodname not in FOLLOWED or not hook.alive or not _is_local_queue(self):
            return original(self, methodname, args, kwds)
        if methodname in PUTS:
            return original(self, methodname, _wrap_item(args, hook), kwds)
        close_joined(hook)
        try:
            return original(self, methodname, args, kwds)
        except BaseException:
            note_wait(hook)
            raise

    return call_method


def _is_local_queue(proxy: Any) -> bool:
    """Returns whether a proxy is a queue's of this machine: its address is a path. Elsewhere our wrapper may be unknown."""
    is_queue = type(proxy).__name__.endswith(QUEUE_PROXY)
    return is_queue and isinstance(getattr(getattr(proxy, "_token", None), "address", None), str)


def _wrap_item(args: Any, hook: Hook) -> Any:
    """Returns the arguments of a put, with the item of a request wrapped."""
    try:
        trailer = describe_put(args[0]) if args else None
        return args if trailer is None else (CarriedItem(args[0], tuple(trailer)), *args[1:])
    except Exception as exc:
        hook.count_failure(exc)
        return args
