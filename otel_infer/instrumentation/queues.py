"""Follows the items of requests through the application's queues: asyncio.Queue, queue.Queue and their subclasses.

    a request puts an item ─▶ `queue wait` ─▶ a worker takes it, and works for this request (`tracing.work`)

An item stays the object that it is: who put it is noted beside the queue. A queue whose items come back to their own
request after a model was called, such as a streamer's, is left alone. So is an item that a request takes while it is
served itself: the queue is a pool of connections, for example. `queue.SimpleQueue` is compiled, so it is not followed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.batch_windows import is_getter, note_wait
from otel_infer.instrumentation.hooks.context_hooks import compile_queue_put, compile_queue_take
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.libraries import is_of_library
from otel_infer.instrumentation.queue_states import (
    LeftAlone,
    PutItem,
    QueueState,
    add_state,
    find_state,
    has_model,
    leave_alone,
    states,
)
from otel_infer.ringbuffer import events
from otel_infer.tracing import context
from otel_infer.tracing.deferred_request import CurrentRequest
from otel_infer.tracing.request_span import REQUEST_KEY, RequestSpan
from otel_infer.tracing.work import Work, Worker, attach_work, find_worker

instrumentor = Instrumentor("queues", "python", ("asyncio.queues", "queue"))


def note_put(queue: Any, item: Any, frame: Any) -> QueueState | None:
    """Notes that the current request, if there is one, puts an item in this frame. Returns where that is noted."""
    found = context.current_context().get(REQUEST_KEY)
    if found is None:
        return None
    state = find_state(queue)
    if state is None and is_put_by_library(frame):
        leave_alone(queue)
        return None
    if type(state) is LeftAlone:
        return None
    by_worker = type(found) is Work
    if type(found) is Work:
        found = found.hand_over(item)
    if found is None or found.ended:
        return None
    if type(state) is not QueueState:
        state = add_state(queue)
    if state.result_of is not None:
        if state.result_of is found:
            return None
        state.result_of = None
    state.note_put(item, found, by_worker)
    return state


def note_take(state: QueueState, item: Any) -> None:
    """Ends the wait of the item that was taken here, and makes its request the worker's work."""
    if state.result_of is not None:
        return
    current = context.current_context().get(REQUEST_KEY)
    entry = state.pop_entry(item)
    if entry is not None and entry.request.ended:
        entry = None
    request = None if entry is None else entry.request
    is_worker = type(current) is Work
    if current is not None and not is_worker and not current.ended:
        if request is None or request is not current or state.comes_back(request):
            return  # it is served itself, and takes what another request has put back
    elif entry is not None and is_worker and _is_result(entry, current) and state.comes_back(entry.request):
        return
    is_further = is_worker and request is not None and current.has_taken(request)
    is_past = entry is not None and _is_past_queue(entry)
    if entry is not None and not is_further and not is_past:
        _record_wait(entry.request, entry.put_at)
    if request is None and not is_worker:
        return
    put_at = entry.put_at if entry is not None and is_past and not is_further else 0
    take_for_worker(current if is_worker else None, request, id(item), put_at)


def _record_wait(request: CurrentRequest, put_at: int) -> None:
    if type(request) is RequestSpan:
        request.record_stage(events.QUEUE_WAIT, put_at)
    else:
        request.record_event(events.StageEnded(_clock.now(), put_at, events.QUEUE_WAIT, 0))


def _is_result(entry: PutItem, work: Work) -> bool:
    """Returns whether a worker takes what was put in its own work. A request may put several items of itself."""
    return entry.by_worker and entry.request is work.find_single()


def _is_past_queue(entry: PutItem) -> bool:
    """Returns whether the wait of an item may be none of its request: an engine's own queue, or a result on its way."""
    request = entry.request
    return (isinstance(request, RequestSpan) and bool(request.engine)) or (
        entry.by_worker and has_model(request)
    )


def is_put_by_library(frame: Any) -> bool:
    """Returns whether a library that other hooks follow, or that serves no request, puts an item in this frame."""
    while frame is not None and frame.f_globals.get("__name__") in ("asyncio.queues", "queue"):
        frame = frame.f_back
    return is_of_library(frame)


def take_for_worker(
    work: Work | None, request: CurrentRequest | None, item_id: int = 0, put_at: int = 0
) -> None:
    """Makes the request what the worker works for, perhaps with others in a batch.

    `put_at`: of an item that has waited only if the worker calls a model for it (monotonic ns); 0 for others. A task that
    does nothing but take an item, such as that of `asyncio.wait_for`, takes it for the task that has begun it.
    """
    key = find_worker()
    if work is None or (work.worker.key != key and not is_getter(key)):
        work = Work(Worker(key))
    elif work.worker.key != key:
        work.take(request, item_id, put_at)
        return
    attach_work(work.take_next(request, item_id, put_at))


# ── hooks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _patch_put(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def put(self: Any, item: Any, *args: Any, **kwargs: Any) -> Any:
        state = None
        if hook.alive:
            try:
                state = note_put(self, item, sys._getframe(1))
            except Exception as exc:
                hook.count_failure(exc)
        if state is None:
            return original(self, item, *args, **kwargs)
        try:
            return original(self, item, *args, **kwargs)
        except BaseException:  # the queue is full
            state.pop_entry(item)
            raise

    return compile_queue_put(original, hook, put, (states, QueueState))


def _patch_take(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def end_take(state: QueueState, item: Any, is_taken: bool) -> None:
        try:
            if is_taken:
                note_take(state, item)
            else:
                note_wait()
        except Exception as exc:
            hook.count_failure(exc)

    def take(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            item = original(self, *args, **kwargs)
        except BaseException:
            if hook.alive and type(state := find_state(self)) is QueueState:
                end_take(state, None, False)
            raise
        if hook.alive and type(state := find_state(self)) is QueueState:
            end_take(state, item, True)
        return item

    return compile_queue_take(original, hook, take, (states, QueueState, end_take, take_for_worker))


for _target, _wrap in (
    ("asyncio.queues:Queue.put_nowait", _patch_put),
    ("asyncio.queues:Queue.get_nowait", _patch_take),
):
    instrumentor.patch_hot_path(_target, part="asyncio")(_wrap)
for _target, _wrap in (("queue:Queue.put", _patch_put), ("queue:Queue.get", _patch_take)):
    instrumentor.patch_hot_path(_target, part="threads")(_wrap)
