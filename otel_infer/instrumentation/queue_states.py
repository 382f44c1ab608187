"""Who has put the items of the application's queues, noted beside each queue: queues and items stay what they are."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from otel_infer import _clock
from otel_infer.ringbuffer.events import make_tuple
from otel_infer.ringbuffer.native import native
from otel_infer.tracing.deferred_request import CurrentRequest
from otel_infer.tracing.request_span import RequestSpan

MAX_FORGOTTEN = 64
"""Items that may have left a queue unseen before all notes about it are dropped."""


class PutItem(NamedTuple):
    """An item that was put for a request, and when (monotonic ns). `by_worker`: a worker has put it, perhaps as a result."""

    request: CurrentRequest
    put_at: int
    by_worker: bool


class QueueState:
    """The items of a queue that requests have put, by id.

    `entries`: by id of an item, what `PutItem` holds. `result_of`: the request to which its items come back. `had_own_item`: a request has taken an item of its own.
    """

    __slots__ = ("entries", "had_own_item", "queue", "result_of")

    def __init__(self, queue: weakref.ref[Any]) -> None:
        self.queue = queue
        self.entries: dict[int, list[tuple[Any, ...]]] = {}
        self.result_of: CurrentRequest | None = None
        self.had_own_item = False

    def comes_back(self, request: CurrentRequest) -> bool:
        """Returns whether an item that a request takes back shows that the queue is one of results."""
        if has_model(request) or self.had_own_item:
            self.result_of = request
            for key in [key for key, items in self.entries.items() if items[0][0] is request]:
                del self.entries[key]
            if isinstance(request, RequestSpan):
                request.queued_at = 0
            return True
        self.had_own_item = True  # or it has just started the worker that takes it
        return False

    def note_put(self, item: Any, request: CurrentRequest, by_worker: bool) -> None:
        """Notes who put an item into the queue. `_context_hooks.c` does the same for the usual case."""
        if len(self.entries) > MAX_FORGOTTEN:
            queue = self.queue()
            if queue is not None and len(self.entries) > queue.qsize() + MAX_FORGOTTEN:
                self.entries.clear()
        at = _clock.now()
        self.entries.setdefault(id(item), []).append((request, at, by_worker))
        if type(request) is RequestSpan:
            request.queued_at = at

    def pop_entry(self, item: Any) -> PutItem | None:
        """Returns who put an item, and when; None if that is unknown."""
        entries = self.entries.get(id(item))
        if not entries:
            return None
        entry = entries.pop(0)
        if not entries:
            del self.entries[id(item)]
        if type(entry[0]) is RequestSpan:
            entry[0].queued_at = 0
        return make_tuple(PutItem, entry)  # type: ignore[no-any-return]


class LeftAlone:
    """In place of a state: no item of this queue is followed."""

    __slots__ = ("queue",)

    def __init__(self, queue: weakref.ref[Any]) -> None:
        self.queue = queue


states: dict[int, QueueState | LeftAlone] = {}
"""By id of a queue. A queue is here from the first item that a request puts until it is freed."""
count_state: Callable[[int, int], None] = (
    native.count_state if native is not None else lambda queue_id, change: None
)
"""Tells compiled hooks which queues may have a state, before and after it is in `states`."""


def find_state(queue: Any) -> QueueState | LeftAlone | None:
    """Returns the state of a queue; None before a request has put an item."""
    return states.get(id(queue))


def add_state(queue: Any) -> QueueState:
    """Follows the items of this queue."""
    state = QueueState(_refer_to(queue))
    _set_state(id(queue), state)
    return state


def leave_alone(queue: Any) -> None:
    """Follows no item of this queue: other hooks know what its worker does."""
    _set_state(id(queue), LeftAlone(_refer_to(queue)))


def _set_state(key: int, state: QueueState | LeftAlone) -> None:
    """Counts a queue before it is in `states`. Two threads may both count it, which costs later lookups and misses nothing."""
    if key not in states:
        count_state(key, 1)
    states[key] = state


def _drop_state(key: int) -> None:
    if states.pop(key, None) is not None:
        count_state(key, -1)


def _refer_to(queue: Any) -> weakref.ref[Any]:
    """Returns a reference that drops the queue's state once the queue is freed, before its id is another object's."""
    key = id(queue)
    return weakref.ref(queue, lambda freed: _drop_state(key))


def has_model(request: CurrentRequest) -> bool:
    """Returns whether a model was called for this request."""
    return isinstance(request, RequestSpan) and bool(
        request.engine or request.is_named or request.has_forward_name
    )
