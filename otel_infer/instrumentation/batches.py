"""Follows items that wait in a framework's batcher: it calls a function once for the items of several requests.

a request puts an item ─ `queue wait`, until the batcher is free ─ `batch wait`, until the batch is complete ─▶ the call
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from otel_infer import _clock
from otel_infer.ringbuffer import events
from otel_infer.tracing import start
from otel_infer.tracing.batch_request import BatchRequest, attach_members
from otel_infer.tracing.deferred_request import CurrentRequest, DeferredRequest
from otel_infer.tracing.request_span import RequestSpan

MIN_TURN_NS = 1_000_000
"""A shorter wait of a complete batch for its turn is a part of `batch wait`."""
ALL_IN_QUEUE = 1 << 62
"""As `free_at`: the whole wait is `queue wait`."""


class WaitingItem(NamedTuple):
    """An item of a request, and when it was put (monotonic ns)."""

    request: CurrentRequest
    put_at: int


def describe_item() -> WaitingItem | None:
    """Returns the item that the current request puts; None if there is no request."""
    request = start.find_request()
    return None if request is None else WaitingItem(request, _clock.now())


def begin_batch(items: Iterable[WaitingItem | None], free_at: int = 0, complete_at: int = 0) -> Any:
    """Ends the waits of the items of a batch, and makes their requests current. Returns the token for `detach`, or None.

    `free_at`: when the batcher had ended its previous batch; 0 = it does not wait for that. `complete_at`: when the
    batch was complete, after which it waited for its turn; 0 = now. Both in monotonic ns.
    """
    waiting = [item for item in items if item is not None and not item.request.ended]
    now = _clock.now()
    if not complete_at or now - complete_at < MIN_TURN_NS:
        complete_at = now
    members: dict[RequestSpan, None] = {}
    for item in waiting:
        request = item.request.open() if isinstance(item.request, DeferredRequest) else item.request
        if request is None or request.ended:
            continue
        begun_at = min(max(item.put_at, free_at), complete_at)
        _record_wait(request, events.QUEUE_WAIT, item.put_at, begun_at)
        _record_wait(request, events.BATCH_WAIT, begun_at, complete_at, len(waiting))
        _record_wait(request, events.QUEUE_WAIT, complete_at, now)
        members.update(dict.fromkeys(request.members if isinstance(request, BatchRequest) else (request,)))
    return attach_members(list(members))


def _record_wait(request: RequestSpan, stage: str, began_at: int, ended_at: int, items: int = 0) -> None:
    if began_at < ended_at:
        request.record_event(events.StageEnded(ended_at, began_at, stage, items))
