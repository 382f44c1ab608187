"""Follows the items of requests through multiprocessing's queues, into the process that takes them.

    a request puts an item ─▶ its pickle, and a trailer that names the request ─▶ `queue wait` ─▶ a worker takes it

`pickle.loads` ignores what follows a pickle, so the trailer changes no item: a process without these hooks reads the same.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from otel_infer import _clock
from otel_infer.instrumentation.hooks.context_hooks import compile_thread_work
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.libraries import is_of_library
from otel_infer.instrumentation.multiprocessing._instrumentor import instrumentor
from otel_infer.instrumentation.multiprocessing.process_call import Headers, join_requests, list_headers
from otel_infer.instrumentation.queues import take_for_worker
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.forks import call_in_child
from otel_infer.tracing import context, start
from otel_infer.tracing.deferred_request import DeferredRequest
from otel_infer.tracing.propagation import JOINED
from otel_infer.tracing.request_span import REQUEST_KEY, RequestSpan
from otel_infer.tracing.work import Work

QUEUES = "queues"
MAX_NOTED = 10_000
"""Items that have been put and not pickled yet; beyond it, further ones are not followed."""
_MAGIC, _LENGTH_SIZE = b"otel-infer-item", 4


class Trailer(NamedTuple):
    """The bytes after the pickle of an item. `pid`: of the process that put it. `put_at`: monotonic ns."""

    pid: int
    put_at: int
    headers: list[Headers]

    def pack(self) -> bytes:
        """Returns the trailer as bytes."""
        body = json.dumps(self).encode()
        return body + len(body).to_bytes(_LENGTH_SIZE, "little") + _MAGIC


def parse_trailer(data: bytes) -> Trailer:
    """Returns the trailer of the pickle of an item, which has one."""
    end = len(data) - len(_MAGIC) - _LENGTH_SIZE
    length = int.from_bytes(data[end : end + _LENGTH_SIZE], "little")
    return Trailer(*json.loads(data[end - length : end]))


_noted: dict[int, list[Trailer]] = {}
"""By id of an item that is in a buffer of this process: who has put it."""
call_in_child(_noted.clear)


# ── put ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _patch_put(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def put(self: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        is_noted = False
        if hook.alive:
            try:
                is_noted = not is_of_library(sys._getframe(1)) and _note_put(obj)
            except Exception as exc:
                hook.count_failure(exc)
        try:
            return original(self, obj, *args, **kwargs)
        except BaseException:  # the queue is full
            if is_noted:
                _pop_note(obj)
            raise

    return compile_thread_work(original, hook, put)


def _note_put(item: Any) -> bool:
    """Notes that the current request puts an item. Returns whether it does."""
    trailer = describe_put(item) if len(_noted) <= MAX_NOTED else None
    if trailer is not None:
        _noted.setdefault(id(item), []).append(trailer)
    return trailer is not None


def describe_put(item: Any) -> Trailer | None:
    """Returns the trailer of an item that is put here; None if no request puts it. A result of a worker has none."""
    found = context.current_context().get(REQUEST_KEY)
    if type(found) is Work:
        found = found.hand_over(item)
    elif isinstance(found, DeferredRequest):
        found = start.current_request()
    if not isinstance(found, RequestSpan) or found.ended or found.owner == JOINED:
        return None
    return Trailer(os.getpid(), _clock.now(), list_headers(found))


def _pop_note(item: Any) -> Trailer | None:
    """Returns who has put an item, once; None if no request has."""
    notes = _noted.get(id(item))
    if not notes:
        return None
    trailer = notes.pop(0)
    if not notes:
        _noted.pop(id(item), None)
    return trailer


@instrumentor.patch_hot_path("multiprocessing.reduction:ForkingPickler.dumps", part=QUEUES)
def _patch_dumps(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def dumps(cls: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        trailer = _pop_note(obj) if _noted else None
        data = original(cls, obj, *args, **kwargs)
        return data if trailer is None or not hook.alive else b"".join((data, trailer.pack()))

    return dumps


# ── take ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@instrumentor.patch_hot_path("multiprocessing.reduction:ForkingPickler.loads", part=QUEUES)
def _patch_loads(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def loads(data: Any, *args: Any, **kwargs: Any) -> Any:
        item = original(data, *args, **kwargs)
        if hook.alive and type(data) is bytes and data.endswith(_MAGIC):
            try:
                take_item(parse_trailer(data))
            except Exception as exc:
                hook.count_failure(exc)
        return item

    return loads


def take_item(trailer: Trailer) -> None:
    """Ends the wait of an item that was taken here, and makes its request the worker's work."""
    if trailer.pid == os.getpid():
        return  # a thread of the same process, which has no part of the request to record
    current = context.current_context().get(REQUEST_KEY)
    for request in join_requests(trailer.headers):
        request.record_event(events.StageEnded(_clock.now(), trailer.put_at, events.QUEUE_WAIT, 0))
        take_for_worker(current if type(current) is Work else None, request)
        current = context.current_context().get(REQUEST_KEY)


def _patch_get(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def get(self: Any, *args: Any, **kwargs: Any) -> Any:
        if hook.alive:
            close_joined(hook)
        try:
            return original(self, *args, **kwargs)
        except BaseException:
            if hook.alive:
                note_wait(hook)
            raise

    return compile_thread_work(original, hook, get)


def close_joined(hook: Hook) -> None:
    """Ends the part of requests of other processes here, before the worker asks for its next item."""
    try:
        work = context.current_context().get(REQUEST_KEY)
        if type(work) is Work:
            work.close_joined()
    except Exception as exc:
        hook.count_failure(exc)


def note_wait(hook: Hook) -> None:
    """Notes that a worker got no further item: the queue was empty, or it has waited long enough."""
    try:
        work = context.current_context().get(REQUEST_KEY)
        if type(work) is Work and work.continues():
            work.worker.waited_until = _clock.now()
    except Exception as exc:
        hook.count_failure(exc)


for _name, _make in (
    ("Queue.put", _patch_put), ("JoinableQueue.put", _patch_put), ("SimpleQueue.put", _patch_put),
    ("Queue.get", _patch_get), ("SimpleQueue.get", _patch_get),
):  # fmt: skip
    instrumentor.patch_hot_path(f"multiprocessing.queues:{_name}", part=QUEUES)(_make)
