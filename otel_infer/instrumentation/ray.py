"""Follows the requests of Ray Serve into replicas, and through the batches of `@serve.batch`.

    HTTPProxy, or a deployment ─ assign_request: headers in the request's metadata ─▶ `queue wait` ─▶ a replica's _wrap_request
    _BatchQueue.put ─ wait_for_batch: `batch wait` ─ `queue wait`, while earlier batches run ─▶ _process_batch_inner

The proxy and each replica are processes that Ray's raylet starts. A replica's part of a request is recorded there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any, NamedTuple

from opentelemetry.context import Context

from otel_infer import _clock
from otel_infer.instrumentation.asgi.exchange import SCOPE_KEY
from otel_infer.instrumentation.asgi.route import RouteTemplate
from otel_infer.instrumentation.batches import begin_batch, describe_item
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.hooks.target import check_is_coroutine
from otel_infer.instrumentation.multiprocessing import process
from otel_infer.instrumentation.multiprocessing.process_call import Headers, join_requests, list_headers
from otel_infer.ringbuffer import events
from otel_infer.ringbuffer.arena import FileArena
from otel_infer.ringbuffer.recorder import recorder
from otel_infer.tracing import context, start
from otel_infer.tracing.batch_request import combine_requests
from otel_infer.tracing.outcome import classify_exception
from otel_infer.tracing.request_span import REQUEST_KEY, RequestSpan

CARRIED_ATTRIBUTE, ITEM_ATTRIBUTE = "otel_infer_carried", "otel_infer_item"
COMPLETE_AT_ATTRIBUTE = "otel_infer_complete_at"
RAYLET = "raylet"
OWNER = "ray"

instrumentor = Instrumentor(
    "ray",
    "ray",
    ("ray.serve",),
    helpers=(
        "ray.dashboard.agent", "ray.dashboard.dashboard", "ray._private.log_monitor", "ray.autoscaler._private.monitor",
        "ray._private.runtime_env.agent.main",
    ),
)  # fmt: skip

_served: ContextVar[RequestSpan | None] = ContextVar("otel_infer-ray-served", default=None)
"""What a replica works for."""


# ── requests on their way to a replica ───────────────────────────────────────────────────────────────────────────────


class CarriedRequest(NamedTuple):
    """A request, or each of a batch, as its metadata carry it to a replica.

    `rings`: folder of the rings of its process; the events of another folder are read by another reader. `put_at`: when a
    replica was asked for, monotonic ns; 0 = the wait is not recorded.
    """

    rings: str
    put_at: int
    headers: list[Headers]


def _describe_rings() -> str:
    arena = recorder.arena
    return str(arena.directory) if isinstance(arena, FileArena) else ""


def _find_request() -> RequestSpan | None:
    """Returns the current request, or the one of this replica, if FastAPI's own tracing has replaced the context."""
    request = start.current_request() or _served.get()
    return None if request is None or request.ended else request


@instrumentor.patch_hot_path(
    "ray.serve._private.router:AsyncioRouter.assign_request", reads=("request_meta",), part="router"
)
def _patch_assign(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    check_is_coroutine(original)

    async def assign_request(self: Any, request_meta: Any, *args: Any, **kwargs: Any) -> Any:
        if hook.alive:
            try:
                request = _find_request()
                if request is not None:
                    has_no_token = not (request.tokens_reached or request.responding)
                    put_at = _clock.now() if has_no_token else 0
                    carried = CarriedRequest(_describe_rings(), put_at, list_headers(request))
                    setattr(request_meta, CARRIED_ATTRIBUTE, tuple(carried))
            except Exception as exc:
                hook.count_failure(exc)
        return await original(self, request_meta, *args, **kwargs)

    return assign_request


@instrumentor.patch_hot_path(
    "ray.serve._private.proxy:HTTPProxy.setup_request_context_and_handle",
    reads=("route", "proxy_request"),
    optional=True,
    part="proxy",
)
def _patch_route(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def setup_request_context_and_handle(self: Any, *args: Any, **kwargs: Any) -> Any:
        if hook.alive:
            try:
                route, proxied = kwargs.get("route"), kwargs.get("proxy_request")
                exchange = None if proxied is None else proxied.scope.get(SCOPE_KEY)
                if exchange is not None and isinstance(route, str):
                    exchange.route, exchange.root_path = RouteTemplate(route), ""
            except Exception as exc:
                hook.count_failure(exc)
        return original(self, *args, **kwargs)

    return setup_request_context_and_handle


@instrumentor.patch_hot_path(
    "ray.serve._private.proxy_request_response:ASGIProxyRequest.populate_tracing_context",
    optional=True,
    part="tracing",
)
def _patch_tracing(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    """With its own tracing on, Ray attaches what the headers hold. Its spans are then below the request again."""

    def populate_tracing_context(self: Any) -> Any:
        request = start.find_request() if hook.alive else None
        result = original(self)
        try:
            if isinstance(request, RequestSpan) and start.find_request() is not request:
                request.attach()
        except Exception as exc:
            hook.count_failure(exc)
        return result

    return populate_tracing_context


# ── in a replica ─────────────────────────────────────────────────────────────────────────────────────────────────────


@instrumentor.patch_hot_path(
    "ray.serve._private.replica:Replica._wrap_request", reads=("request_metadata",), part="replica"
)
def _patch_replica(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    @contextlib.contextmanager
    def wrap_request(self: Any, request_metadata: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with original(self, request_metadata, *args, **kwargs) as callback:
            parts = _begin_parts(request_metadata, hook) if hook.alive else []
            token = _attach_parts(parts, hook)
            error: BaseException | None = None
            try:
                yield callback
            except BaseException as exc:
                error = exc
                raise
            finally:
                if token is not None:
                    context.detach(token)
                _end_parts(parts, error, hook)

    return wrap_request


def _end_parts(parts: list[RequestSpan], error: BaseException | None, hook: Hook) -> None:
    """Ends what this process has recorded. The proxy records the end of a request that it has opened."""
    try:
        for part in parts:
            part.close(*(classify_exception(error) if part.owner == OWNER else ()))
    except Exception as exc:
        hook.count_failure(exc)


def _begin_parts(metadata: Any, hook: Hook) -> list[RequestSpan]:
    """Returns the requests that a replica works for now, which have waited for it."""
    try:
        values = getattr(metadata, CARRIED_ATTRIBUTE, None)
        if values is None:
            return []
        carried = CarriedRequest(*values)
        recorder.ensure_rings()
        if not carried.rings or carried.rings != _describe_rings():
            return _open_below(carried)
        parts = join_requests(carried.headers)
        if carried.put_at:
            for part in parts:
                part.record_event(events.StageEnded(_clock.now(), carried.put_at, events.QUEUE_WAIT, 0))
        return parts
    except Exception as exc:
        hook.count_failure(exc)
        return []


def _open_below(carried: CarriedRequest) -> list[RequestSpan]:
    """Opens requests of this process below those of another machine, whose events this process's reader does not get."""
    opened = [
        start.open_request("inference", owner=OWNER, around=context.extract(each, Context()))
        for each in carried.headers
    ]
    return [request for request in opened if request is not None]


def _attach_parts(parts: list[RequestSpan], hook: Hook) -> Any:
    try:
        token = combine_requests(parts).attach() if parts else None
        _served.set(start.current_request() if parts else None)
        return token
    except Exception as exc:
        hook.count_failure(exc)
        return None


# ── batches ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@instrumentor.patch_hot_path("ray.serve.batching:_BatchQueue.put", reads=("request",), part="batches")
def _patch_put(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def put(self: Any, request: Any) -> Any:
        if hook.alive:
            try:
                setattr(request, ITEM_ATTRIBUTE, describe_item())
            except Exception as exc:
                hook.count_failure(exc)
        return original(self, request)

    return put


@instrumentor.patch_hot_path("ray.serve.batching:_BatchQueue.wait_for_batch", part="batches")
def _patch_wait(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    check_is_coroutine(original)

    async def wait_for_batch(self: Any) -> Any:
        found = await original(self)
        if hook.alive:
            try:
                if len(self.tasks) >= self.max_concurrent_batches:  # it waits until an earlier batch ends
                    now = _clock.now()
                    for request in found[0]:
                        setattr(request, COMPLETE_AT_ATTRIBUTE, now)
            except Exception as exc:
                hook.count_failure(exc)
        return found

    return wait_for_batch


@instrumentor.patch_hot_path(
    "ray.serve.batching:_BatchQueue._process_batch_inner", reads=("batch",), part="batches"
)
def _patch_process(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    check_is_coroutine(original)

    async def process_batch(self: Any, func: Any, batch: Any) -> Any:
        token = _begin_batch(batch, hook) if hook.alive else None
        try:
            return await original(self, func, batch)
        finally:
            if token is not None:
                context.detach(token)

    return process_batch


def _begin_batch(batch: Any, hook: Hook) -> Any:
    try:
        waiting = [request for request in batch if not request.future.cancelled()]
        if not waiting:
            return None
        items = [getattr(request, ITEM_ATTRIBUTE, None) for request in waiting]
        token = begin_batch(items, complete_at=getattr(waiting[0], COMPLETE_AT_ATTRIBUTE, 0))
        around = waiting[0].trace_context  # Ray's own tracing attaches it, if that is on
        if token is not None and isinstance(around, Context):
            members = context.current_context()[REQUEST_KEY]
            waiting[0].trace_context = Context({**around, REQUEST_KEY: members})
        return token
    except Exception as exc:
        hook.count_failure(exc)
        return None


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────────


@instrumentor.patch_hot_path(
    "ray._private.services:start_ray_process", reads=("process_type",), part="processes"
)
def _patch_start(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def start_ray_process(command: Any, process_type: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as prepared:
            if hook.alive and process_type == RAYLET:
                try:
                    prepared.enter_context(process.prepare_child())
                except Exception as exc:
                    hook.mark_failed(exc)
            return original(command, process_type, *args, **kwargs)

    return start_ray_process
