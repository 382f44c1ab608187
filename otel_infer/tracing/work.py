"""The work of a worker: the requests whose items it has taken from a queue since its last call of a model.

    request A ─ put ─▶ queue ─ take ─┐
    request B ─ put ─▶ queue ─ take ─┴─▶ a worker's work: A and B ─ call of a model ─▶ a stage of both, their batch

It takes the place of a request in the context of the worker, which is a thread or a task that serves many requests.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import NamedTuple

from opentelemetry.context import Context

from otel_infer import _clock
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.events import make_tuple
from otel_infer.ringbuffer.native import native
from otel_infer.tracing import context
from otel_infer.tracing.batch_request import BatchRequest
from otel_infer.tracing.deferred_request import CurrentRequest, DeferredRequest
from otel_infer.tracing.propagation import JOINED
from otel_infer.tracing.request_span import REQUEST_KEY, RequestSpan

MAX_MEMBERS = 1024


class TakenItem(NamedTuple):
    """An item of a request, and when it was taken (monotonic ns). `item_id`: `id` of the object; 0 = unknown.

    `put_at`: when it was put, if a model had been called for its request before. It is the next stage's input, and has
    waited since, if a model is called for it; else it is a result. 0 for other items.
    """

    request: CurrentRequest
    taken_at: int
    item_id: int = 0
    put_at: int = 0


class Worker:
    """A thread or task that takes items. `key`: of `find_worker`.

    `waited_until`: when it last waited for more items. `starts_children`: it starts a task or thread for each item, which
    was seen when one of them called a model for an item after which others had been taken.
    """

    __slots__ = ("key", "starts_children", "waited_until")

    def __init__(self, key: int) -> None:
        self.key, self.waited_until, self.starts_children = key, 0, False


class Work:
    """The work of a worker and its children: the last item that it took, and the other items of the same batch.

    `single`: the request whose span is current in the worker; None while it works for none, or for several.
    """

    __slots__ = ("_current", "_has_successor", "_is_called", "_items", "single", "worker")

    ended = False

    def __init__(self, worker: Worker, items: tuple[TakenItem, ...] = ()) -> None:
        self.worker, self._items = worker, items
        self._is_called = self._has_successor = False
        self._current: RequestSpan | None = None
        self.single: RequestSpan | None = None

    def take(self, request: CurrentRequest | None, item_id: int = 0, put_at: int = 0) -> None:
        """Adds the request of an item that was just taken; None if the item is of no request that is recorded.

        A call of a model ends a batch, so items that are taken afterwards are of the next one.
        """
        self._items = self._add_item(request, item_id, put_at)
        self._is_called, self._current = False, None

    def take_next(self, request: CurrentRequest | None, item_id: int = 0, put_at: int = 0) -> Work:
        """Returns the work after a further item. Children that began before keep this one."""
        if self.continues():
            self._has_successor = True
        return Work(self.worker, self._add_item(request, item_id, put_at))

    def _add_item(self, request: CurrentRequest | None, item_id: int, put_at: int) -> tuple[TakenItem, ...]:
        """Returns the items of the batch after a further one."""
        items = self._items
        if self._is_called or self.worker.starts_children:  # as `continues`, without its call for each item
            items = ()
        if request is None:
            return items
        kept = []
        for item in items[-MAX_MEMBERS:]:  # not a comprehension, which is one more call
            if not item.request.ended:
                kept.append(item)  # noqa: PERF401
        kept.append(make_tuple(TakenItem, (request, _clock.now(), item_id, put_at)))
        return tuple(kept)

    def has_taken(self, request: CurrentRequest) -> bool:
        """Returns whether an item of the request is in the batch that is being taken."""
        if self.continues():
            for item in self._items:
                if item.request is request:
                    return True
        return False

    def continues(self) -> bool:
        """Returns whether items that are taken now are of the same batch."""
        return bool(self._items) and not self._is_called and not self.worker.starts_children

    @property
    def _own_items(self) -> tuple[TakenItem, ...]:
        """The items that are worked for: of a worker that starts a child for each, the last one only."""
        return self._items[-1:] if self.worker.starts_children else self._items

    def open(self) -> RequestSpan | None:
        """Returns the request that is worked for, or the batch; None if there is none."""
        current = self._current
        if current is None or current.ended:
            members: dict[RequestSpan, None] = {}
            for item in self._own_items:
                request: CurrentRequest | None = item.request
                if type(request) is RequestSpan and not request.ended:
                    members[request] = None
                else:
                    opened = request.open() if isinstance(request, DeferredRequest) else request
                    members.update(dict.fromkeys(_list_members(opened)))
            current = BatchRequest(tuple(members)) if len(members) > 1 else next(iter(members), None)
            self._current = current
        return current

    def find_single(self) -> CurrentRequest | None:
        """Returns the only request that is worked for, which may be deferred; None if there is none, or several."""
        items = self._own_items
        if len(items) == 1:
            return None if items[0].request.ended else items[0].request
        alive = [item.request for item in items if not item.request.ended]
        return alive[0] if len(alive) == 1 else None

    def hand_over(self, item: object) -> CurrentRequest | None:
        """Returns whose item the worker puts into another queue. An item that it has taken is no part of its batch then."""
        for taken in self._items:
            if taken.item_id == id(item):
                self._items = tuple(other for other in self._items if other is not taken)
                self._current = None
                return taken.request
        return self.find_single()

    def close_joined(self) -> None:
        """Closes the requests of other processes whose items the worker has worked off: their ends are not seen here."""
        for item in self._items if self._is_called else ():
            if isinstance(item.request, RequestSpan) and item.request.owner == JOINED:
                item.request.close()

    def begin_call(self) -> RequestSpan | None:
        """Returns what a model is called for, and records how long its requests waited for the batch to be complete."""
        if self._has_successor and not self.worker.starts_children and find_worker() != self.worker.key:
            self.worker.starts_children, self._current = True, None
        current = self.open()
        if self._is_called or current is None:
            return current
        self._is_called = True
        self._record_waits(self._own_items)
        if isinstance(current, BatchRequest):
            current.link_members()
        return current

    def _record_waits(self, items: tuple[TakenItem, ...]) -> None:
        """Records what the requests of a batch waited for, of the first item of each."""
        complete_at, waited = max(self.worker.waited_until, items[-1].taken_at), set()
        for item in items:
            request = item.request.opened if isinstance(item.request, DeferredRequest) else item.request
            if request is None or request in waited:
                continue
            waited.add(request)
            if item.put_at:
                request.record_stage_at(item.taken_at, events.QUEUE_WAIT, item.put_at, 0)
            if item.taken_at < complete_at:
                request.record_stage_at(complete_at, events.BATCH_WAIT, item.taken_at, len(items))


def take_over() -> list[RequestSpan]:
    """Returns the requests of the items that the worker here has taken. They are no longer its work: the caller closes them.

    For a worker that starts a task for each item, and whose hooks know which items the task is for.
    """
    work = context.current_context().get(REQUEST_KEY)
    current = work.open() if type(work) is Work else None
    if type(work) is not Work or current is None:
        return []
    attach_work(Work(work.worker))
    return _list_members(current)


def _list_members(request: RequestSpan | None) -> list[RequestSpan]:
    """Returns the requests of a batch, or the request itself; ended requests are left out."""
    members = request.members if isinstance(request, BatchRequest) else (request,)
    return [member for member in members if member is not None and not member.ended]


def find_worker() -> int:
    """Returns the key of what runs here: a positive one of the task, else a negative one of the thread."""
    if asyncio._get_running_loop() is not None:
        task = asyncio.current_task()
        if task is not None:
            return id(task)
    return -threading.get_ident()


def attach_work(work: Work) -> None:
    """Makes this the work of the worker that runs here, until it takes another item. A span of the application stays."""
    _attach(work, work.find_single())


def _attach_plain(work: Work, single: CurrentRequest | None) -> None:
    around = dict(context.current_context())
    previous, span = around.get(REQUEST_KEY), around.get(context.SPAN_KEY)
    owner = previous.single if type(previous) is Work else previous
    if span is not None and isinstance(owner, RequestSpan) and span is owner.current_span:
        del around[context.SPAN_KEY]
    if isinstance(single, RequestSpan):
        work.single = single
        around.setdefault(context.SPAN_KEY, single.current_span)
    around[REQUEST_KEY] = work
    context.attach(Context(around))


def _make_attach() -> Callable[[Work, CurrentRequest | None], None]:
    """Returns what does the work of `_attach_plain`, in compiled code where that is built."""
    if native is None or context.variable is None:
        return _attach_plain
    types = Context, RequestSpan, Work
    native.connect_work(context.variable, *types, REQUEST_KEY, context.SPAN_KEY, asyncio.current_task)
    return native.attach_work  # type: ignore[no-any-return]


_attach = _make_attach()
