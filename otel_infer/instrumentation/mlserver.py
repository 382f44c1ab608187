"""Records the batches of MLServer's adaptive batching, and what its parallel workers do for a request.

    AdaptiveBatcher.predict ─ `queue wait`, `batch wait` ─▶ _batch_requests ─ the model's `predict`, once for a batch
    Dispatcher ─ a queue of multiprocessing, which is followed ─▶ Worker._process_request ─ a task, for its requests

The task that puts batches together is started by a request, and ends once its queue is empty.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

from opentelemetry.context import Context

from otel_infer import _clock
from otel_infer.instrumentation.batches import WaitingItem, begin_batch, describe_item
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.target import check_is_coroutine
from otel_infer.instrumentation.multiprocessing.process_call import close_requests
from otel_infer.instrumentation.queue_states import leave_alone
from otel_infer.tracing import context, start
from otel_infer.tracing.batch_request import combine_requests
from otel_infer.tracing.request_span import RequestSpan
from otel_infer.tracing.work import take_over

BATCHER = "mlserver.batching.adaptive:AdaptiveBatcher"
WORKER = "mlserver.parallel.worker:Worker"
ITEMS_ATTRIBUTE = "otel_infer_items"

instrumentor = Instrumentor("mlserver", "mlserver", ("mlserver",))


# ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@instrumentor.patch_hot_path(f"{BATCHER}.predict", reads=("req",), part="batches")
def _patch_predict(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    check_is_coroutine(original)

    async def predict(self: Any, req: Any) -> Any:
        item = _put_item(self, req, hook) if hook.alive else None
        if item is None:
            return await original(self, req)
        try:
            return await original(self, req)
        finally:
            _list_items(self).pop(id(req), None)

    return predict


def _put_item(batcher: Any, payload: Any, hook: Hook) -> WaitingItem | None:
    """Notes that the current request's payload waits for its batch. Returns None if there is no request."""
    try:
        item = describe_item()
        if item is not None:
            leave_alone(batcher._requests)
            _list_items(batcher)[id(payload)] = item
        return item
    except Exception as exc:
        hook.count_failure(exc)
        return None


def _list_items(batcher: Any) -> dict[int, WaitingItem]:
    """Returns what waits in a batcher, by id of the payload, which the batcher keeps alive."""
    items: dict[int, WaitingItem] = batcher.__dict__.setdefault(ITEMS_ATTRIBUTE, {})
    return items


@instrumentor.patch_hot_path(f"{BATCHER}._start_batcher_if_needed", part="batches")
def _patch_start(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def start_batcher_if_needed(self: Any) -> Any:
        """Starts the task outside of the request, because it also puts together the batches of others."""
        if not hook.alive or start.find_request() is None:
            return original(self)
        token = context.attach(Context())
        try:
            return original(self)
        finally:
            context.detach(token)

    return start_batcher_if_needed


@instrumentor.patch_hot_path(f"{BATCHER}._batch_requests", part="batches")
def _patch_batches(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    async def batch_requests(self: Any) -> AsyncIterator[Any]:
        """Yields each batch while its requests are current, so that the task that is started for it is theirs."""
        free_at = _clock.now()
        async with aclosing(original(self)) as batches:
            async for batch in batches:
                token = _begin_batch(self, batch, free_at, hook) if hook.alive else None
                try:
                    yield batch
                finally:
                    if token is not None:
                        context.detach(token)
                free_at = _clock.now()

    return batch_requests


def _begin_batch(batcher: Any, batch: Any, free_at: int, hook: Hook) -> Any:
    """Makes the requests of a batch current. Returns the token for `detach`, or None. `free_at`: since when it was filled."""
    try:
        items = _list_items(batcher)
        return begin_batch(
            [items.pop(id(payload), None) for payload in batch.inference_requests.values()], free_at
        )
    except Exception as exc:
        hook.count_failure(exc)
        return None


# ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _patch_process(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    check_is_coroutine(original)

    def process(self: Any, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        """Takes over the item that the worker has just taken, before it waits for the next one."""
        requests = _take_over(hook) if hook.alive else ()
        coroutine = original(self, *args, **kwargs)
        return _process_for(requests, coroutine) if requests else coroutine

    return process


def _take_over(hook: Hook) -> Sequence[RequestSpan]:
    try:
        return take_over()
    except Exception as exc:
        hook.count_failure(exc)
        return ()


async def _process_for(requests: Sequence[RequestSpan], coroutine: Awaitable[Any]) -> Any:
    """Awaits what a worker does for the requests of one item, and ends their part in this process."""
    token = combine_requests(requests).attach()
    try:
        return await coroutine
    finally:
        context.detach(token)
        close_requests(requests)


for _method in ("_process_request", "_process_model_update"):
    instrumentor.patch_hot_path(f"{WORKER}.{_method}", part="workers")(_patch_process)
