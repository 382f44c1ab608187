"""Records remote procedure calls of grpcio's servers, threaded and asyncio: unary and streams.

    a server is made ─▶ an interceptor ─▶ the method's handler, wrapped ─▶ its response, or each message

A call arrives in gRPC's core, where it may wait (`accept_wait`). The server accepts it when it looks up its method. On a threaded
server it then waits for a thread of the pool. It ends when its response is serialized, or its last message was taken, or
when the server has left it. Calls of gRPC's own services (health, reflection) have no span. Where another
instrumentation starts the SERVER span, the interceptor is placed below it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import otel_infer.tracing  # noqa: F401  (loads OpenTelemetry's API, see `config.propagators`)
from otel_infer import _clock
from otel_infer.instrumentation.grpc.accept_wait import UNKNOWN_CALL, AcceptedCall, watch_server
from otel_infer.instrumentation.grpc.channelz import list_servers
from otel_infer.instrumentation.grpc.exchange import RpcExchange, Server
from otel_infer.instrumentation.grpc.handlers import is_non_blocking, wrap_handler
from otel_infer.instrumentation.hooks.instrumentor import Instrumentor
from otel_infer.instrumentation.hooks.probe import Hook
from otel_infer.instrumentation.http_server.server_exchange import can_record

instrumentor = Instrumentor("grpc", "grpcio", ("grpc",))


class RpcInterceptor:
    """The interceptor of a threaded server. `pool_size`: the threads of its pool; 0 = unknown."""

    is_asyncio = False

    def __init__(self, hook: Hook, others: Sequence[Any], pool_size: int) -> None:
        self.hook = hook
        self.server = Server(hook, pool_size, _find_place(others) > 0, self.is_asyncio)

    def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        """Returns the handler of the method, which runs as a request; as gRPC's interceptors do."""
        arrived_at = _clock.now()
        accepted = self.note_accepted(arrived_at)
        try:
            handler = continuation(handler_call_details)
        except BaseException as exc:
            self.follow_failure(exc, handler_call_details, arrived_at, accepted)
            raise
        return self.follow_call(handler, handler_call_details, arrived_at, accepted)

    def note_accepted(self, now: int) -> AcceptedCall:
        """Returns the call that the server accepts `now` (monotonic ns)."""
        try:
            waits = self.server.waits
            return UNKNOWN_CALL if waits is None else waits.note_accepted(now)
        except BaseException as exc:
            self.hook.count_failure(exc)
            return UNKNOWN_CALL

    def follow_call(self, handler: Any, details: Any, arrived_at: int, accepted: AcceptedCall) -> Any:
        """Returns the handler that runs as the request, which was accepted at `arrived_at` (monotonic ns)."""
        try:
            if not can_record(self.hook) or is_non_blocking(handler):
                self.server.note_end(accepted)
                return handler
            exchange = RpcExchange(details, self.server, handler is not None, arrived_at, accepted)
        except BaseException as exc:
            self.hook.count_failure(exc)
            return handler
        if handler is None:
            exchange.end()
            return None
        try:
            if self.is_asyncio:
                _watch_task(exchange)
            return wrap_handler(handler, exchange)
        except BaseException as exc:
            exchange.end()
            self.hook.count_failure(exc)
            return handler

    def follow_failure(
        self, exc: BaseException, details: Any, arrived_at: int, accepted: AcceptedCall
    ) -> None:
        """Records a call of which another interceptor, or the lookup of the method, has raised `exc`."""
        try:
            if can_record(self.hook):
                RpcExchange(details, self.server, False, arrived_at, accepted).end(exc)
            else:
                self.server.note_end(accepted)
        except BaseException as own_exc:
            self.hook.count_failure(own_exc)


class AsyncRpcInterceptor(RpcInterceptor):
    """The interceptor of an asyncio server."""

    is_asyncio = True

    async def intercept_service(self, continuation: Callable[[Any], Any], handler_call_details: Any) -> Any:
        """Returns the handler of the method, which runs as a request; as gRPC's interceptors do."""
        arrived_at = _clock.now()
        accepted = self.note_accepted(arrived_at)
        try:
            handler = await continuation(handler_call_details)
        except BaseException as exc:
            self.follow_failure(exc, handler_call_details, arrived_at, accepted)
            raise
        return self.follow_call(handler, handler_call_details, arrived_at, accepted)

    def note_accepted(self, now: int) -> AcceptedCall:
        """Returns the call that the server accepts `now` (monotonic ns). It ends with its task at the latest."""
        accepted, task = super().note_accepted(now), asyncio.current_task()
        if accepted.number and task is not None:
            task.add_done_callback(partial(self.server.note_end, accepted))
        return accepted


def _watch_task(exchange: RpcExchange) -> None:
    """Ends the exchange with its call, which is one task. A threaded server releases the handler then (`RpcExchange.__del__`)."""
    task = asyncio.current_task()
    if task is not None:
        task.add_done_callback(exchange.end_unfinished)


def _find_place(others: Sequence[Any]) -> int:
    """Returns the index of our interceptor: after those of OpenTelemetry, whose span is current in the calls below them."""
    places = [
        place for place, other in enumerate(others, 1) if type(other).__module__.startswith("opentelemetry.")
    ]
    return places[-1] if places else 0


def _add_interceptor(own: RpcInterceptor, others: Sequence[Any]) -> tuple[Any, ...]:
    place = _find_place(others)
    return (*others[:place], own, *others[place:])


def _count_threads(pool: Any) -> int:
    """Returns the number of threads of a pool; 0 if it is unknown."""
    size = getattr(pool, "_max_workers", 0)
    return size if isinstance(size, int) else 0


# ── where servers are made: below `grpc.server`, which other instrumentations replace ────────────────────────────────


@instrumentor.patch_hot_path("grpc._server:create_server", reads=("thread_pool", "interceptors"))
def _patch_server(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def create_server(
        thread_pool: Any, generic_rpc_handlers: Any, interceptors: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if hook.alive:
            others = tuple(interceptors or ())
            own = RpcInterceptor(hook, others, _count_threads(thread_pool))
            interceptors, earlier = _add_interceptor(own, others), list_servers()
            server = original(thread_pool, generic_rpc_handlers, interceptors, *args, **kwargs)
            own.server.waits = watch_server(earlier, sees_ends=False)
            return server
        return original(thread_pool, generic_rpc_handlers, interceptors, *args, **kwargs)

    return create_server


@instrumentor.patch_hot_path(
    "grpc.aio._server:Server.__init__", reads=("thread_pool", "interceptors"), part="aio"
)
def _patch_async_server(original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    def init(
        self: Any, thread_pool: Any, generic_handlers: Any, interceptors: Any, *args: Any, **kwargs: Any
    ) -> None:
        if not hook.alive:
            original(self, thread_pool, generic_handlers, interceptors, *args, **kwargs)
            return
        sys.modules["grpc.aio"].ServerInterceptor.register(AsyncRpcInterceptor)
        others = tuple(interceptors or ())
        own = AsyncRpcInterceptor(hook, others, _count_threads(thread_pool))
        interceptors, earlier = _add_interceptor(own, others), list_servers()
        original(self, thread_pool, generic_handlers, interceptors, *args, **kwargs)
        own.server.waits = watch_server(earlier, sees_ends=True)

    return init
