"""Records the batches of BentoML's dispatcher, and follows requests from service to service.

    inbound_call ─ a request's data is put ─▶ `queue wait`, `batch wait` ─▶ outbound_call ─ one call for the batch
    a client's _build_payload ─ headers of the request ─▶ the server of another service

The dispatcher calls for one batch after the other. BentoML runs each service in processes of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from otel_infer import _clock
from otel_infer.instrumentation.batches import WaitingItem, begin_batch, describe_item
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.target import check_is_coroutine
from otel_infer.instrumentation.multiprocessing import process
from otel_infer.tracing import context, start

STATE_ATTRIBUTE = "otel_infer_state"

instrumentor = Instrumentor("bentoml", "bentoml", ("bentoml",))


class DispatcherState:
    """What waits in a dispatcher: items by id of their data. `free_at`: end of its last batch, monotonic ns."""

    __slots__ = ("free_at", "items")

    def __init__(self) -> None:
        self.items: dict[int, list[WaitingItem]] = {}
        self.free_at = 0

    def put(self, data: Any, item: WaitingItem) -> None:
        """Notes whose data waits. Notes of ended requests under the same id, whose data is gone, are dropped."""
        waiting = [other for other in self.items.get(id(data), ()) if not other.request.ended]
        self.items[id(data)] = [*waiting, item]

    def pop(self, data: Any, wanted: WaitingItem | None = None) -> WaitingItem | None:
        """Returns whose data this is, once; None if it is unknown. `wanted`: only this item."""
        items = self.items.pop(id(data), [])
        alive = [item for item in items if not item.request.ended]
        found = next((item for item in alive if wanted is None or item is wanted), None)
        left = [item for item in alive if item is not found]
        if left:
            self.items[id(data)] = left
        return found


def _find_state(dispatcher: Any) -> DispatcherState:
    state: DispatcherState = dispatcher.__dict__.setdefault(STATE_ATTRIBUTE, DispatcherState())
    return state


# ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@instrumentor.patch_hot_path(
    "bentoml._internal.marshal.dispatcher:CorkDispatcher.inbound_call", reads=("data",), part="batches"
)
def _patch_inbound(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    check_is_coroutine(original)

    async def inbound_call(self: Any, data: Any) -> Any:
        item = _put_item(self, data, hook) if hook.alive else None
        if item is None:
            return await original(self, data)
        try:
            return await original(self, data)
        finally:  # it may have been answered without a call: the server is overloaded
            _take_item(self, data, hook, item)

    return inbound_call


def _put_item(dispatcher: Any, data: Any, hook: Hook) -> WaitingItem | None:
    try:
        item = describe_item()
        if item is not None:
            _find_state(dispatcher).put(data, item)
        return item
    except Exception as exc:
        hook.count_failure(exc)
        return None


def _take_item(dispatcher: Any, data: Any, hook: Hook, item: WaitingItem | None = None) -> WaitingItem | None:
    try:
        return _find_state(dispatcher).pop(data, item)
    except Exception as exc:
        hook.count_failure(exc)
        return None


@instrumentor.patch_hot_path(
    "bentoml._internal.marshal.dispatcher:CorkDispatcher.outbound_call",
    reads=("inputs_info",),
    part="batches",
)
def _patch_outbound(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    check_is_coroutine(original)

    async def outbound_call(self: Any, inputs_info: Any, *args: Any, **kwargs: Any) -> Any:
        token = _begin_batch(self, inputs_info, hook) if hook.alive else None
        try:
            return await original(self, inputs_info, *args, **kwargs)
        finally:
            if token is not None:
                context.detach(token)
            if hook.alive:
                _find_state(self).free_at = _clock.now()

    return outbound_call


def _begin_batch(dispatcher: Any, jobs: Iterable[Any], hook: Hook) -> Any:
    try:
        state = _find_state(dispatcher)
        return begin_batch([state.pop(job.data) for job in jobs], state.free_at)
    except Exception as exc:
        hook.count_failure(exc)
        return None


@instrumentor.patch_hot_path(
    "bentoml._internal.marshal.dispatcher:CorkDispatcher.split_job",
    reads=("job",),
    optional=True,
    part="batches",
)
def _patch_split(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def split_job(self: Any, job: Any, *args: Any, **kwargs: Any) -> Any:
        parts = original(self, job, *args, **kwargs)
        item = _take_item(self, job.data, hook) if hook.alive else None
        if item is not None:
            for part in parts:
                _find_state(self).put(part.data, item)
        return parts

    return split_job


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _patch_client(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = _attach_exported(hook) if hook.alive else None
        try:
            return original(self, *args, **kwargs)
        finally:
            if token is not None:
                context.detach(token)

    return build


for _name in ("http:HTTPClient._build_request", "proxy2:AsyncClient._build_payload"):
    instrumentor.patch_hot_path(
        f"_bentoml_impl.client.{_name}", reads=("headers",), part=_name.partition(":")[0]
    )(_patch_client)


def _attach_exported(hook: Hook) -> Any:
    """Makes the request current where BentoML's own span is exported nowhere, as by default. Returns a token, or None.

    BentoML has a span for each request even then. Its id in the headers would be a parent that no backend knows.
    """
    try:
        span: Any = context.current_span()
        processor = getattr(span, "_span_processor", None)
        if processor is None or getattr(processor, "_span_processors", None) != ():
            return None
        request = start.current_request()
        return None if request is None else request.attach()
    except Exception as exc:
        hook.count_failure(exc)
        return None


@instrumentor.patch_hot_path("bentoml.serving:create_watcher", part="processes")
def _patch_watcher(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def create_watcher(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as prepared:
            if hook.alive:
                try:
                    prepared.enter_context(process.prepare_child())
                except Exception as exc:
                    hook.mark_failed(exc)
            return original(*args, **kwargs)

    return create_watcher
