"""Wraps the handler of a method so that its function runs as a request, of each kind that gRPC's servers accept."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import wrapt

from otel_infer.instrumentation.grpc.exchange import RpcExchange
from otel_infer.ringbuffer.events import make_tuple

_END = object()
"""After the last message of a stream."""
_KINDS = "unary_unary", "unary_stream", "stream_unary", "stream_stream"
"""The attribute of a handler that holds its function, by twice whether requests are a stream, plus whether responses are."""


def is_non_blocking(handler: Any) -> bool:
    """Returns whether the function gets a callback for its messages, and no thread waits for it (health's `Watch`)."""
    if handler is None or not handler.response_streaming:
        return False
    function = handler.stream_stream if handler.request_streaming else handler.unary_stream
    return bool(getattr(function, "experimental_non_blocking", False))


def wrap_handler(handler: Any, exchange: RpcExchange) -> Any:
    """Returns the handler of a method that runs its function as this request."""
    takes_stream, is_stream = bool(handler.request_streaming), bool(handler.response_streaming)
    kind = 2 * takes_stream + is_stream
    function = getattr(handler, _KINDS[kind])
    is_coroutine = exchange.server.is_asyncio and inspect.iscoroutinefunction(function)
    if is_coroutine:
        wrapped: Callable[..., Any] = _follow_coroutine(function, exchange, is_stream)
    elif exchange.server.is_asyncio and inspect.isasyncgenfunction(function):
        wrapped = _follow_async_stream(function, exchange)
    else:
        wrapped = (_follow_stream if is_stream else _follow_call)(function, exchange)
    attributes = getattr(function, "__dict__", None)
    if attributes:
        wrapped.__dict__.update(attributes)  # gRPC reads attributes of the function
    deserialize = _watch_deserializer(handler.request_deserializer, exchange, takes_stream)
    serialize = _watch_serializer(
        handler.response_serializer, exchange, is_stream, is_stream and is_coroutine
    )
    functions: list[Any] = [None] * len(_KINDS)
    functions[kind] = wrapped
    made = make_tuple(_get_watched_type(), (takes_stream, is_stream, deserialize, serialize, *functions))
    made._exchange = exchange
    return made


@functools.cache
def _get_watched_type() -> type:
    """Returns gRPC's type of handlers, which notes that it is looked at: a server that has too many calls does not."""
    plain = type(sys.modules["grpc"].unary_unary_rpc_method_handler(None))

    def is_request_streaming(self: Any) -> Any:
        seen = self.__dict__.get("_exchange")
        if seen is not None:
            seen.is_accepted = True
        return plain.request_streaming.__get__(self)

    body = {"request_streaming": property(is_request_streaming)}
    return types.new_class(plain.__name__, (plain,), {}, lambda namespace: namespace.update(body))


# ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _watch_deserializer(
    deserialize: Callable[[bytes], Any] | None, exchange: RpcExchange, is_stream: bool
) -> Callable[[bytes], Any] | None:
    """Returns the function that ends the call if it fails. With a stream of requests the handler goes on."""
    if deserialize is None:
        return None
    end: Callable[[BaseException | None], None] = (
        exchange.note_failure if is_stream else exchange.fail_request
    )

    def read_request(data: bytes) -> Any:
        try:
            request = deserialize(data)
        except BaseException as exc:
            end(exc)
            raise
        if request is None and not exchange.server.is_asyncio:
            end(None)
        return request

    return read_request


def _watch_serializer(
    serialize: Callable[[Any], Any] | None, exchange: RpcExchange, is_stream: bool, is_written: bool
) -> Callable[[Any], Any]:
    """Returns the function that records each message of the response. `is_written`: the handler gets its exceptions."""
    record = exchange.record_message if is_stream else exchange.record_response

    def write_response(message: Any) -> Any:
        try:
            data = message if serialize is None else serialize(message)
        except BaseException as exc:
            if not is_written:
                exchange.fail_message(exc)
            raise
        if data is None and not is_written:
            exchange.fail_message(None)
        record()
        return data

    return write_response


class _NotedContext(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """The context of a function that an asyncio server runs in a thread. It notes the code, which that does not show."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._self_noted_code = [None]

    def set_code(self, code: Any) -> Any:
        self._self_noted_code[0] = code
        return self.__wrapped__.set_code(code)

    def abort(self, code: Any, *args: Any, **kwargs: Any) -> Any:
        self._self_noted_code[0] = code
        return self.__wrapped__.abort(code, *args, **kwargs)


def _note_code(context: Any, exchange: RpcExchange) -> Any:
    """Returns the context for the function of the user."""
    if exchange.server.is_asyncio and not hasattr(context, "code"):
        return _NotedContext(context)
    return context


# ── functions ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _follow_call(function: Callable[..., Any], exchange: RpcExchange) -> Callable[..., Any]:
    def call(request: Any, context: Any) -> Any:
        context = _note_code(context, exchange)
        exchange.begin_handler(context, True)
        response = exchange.call(function, request, context)
        exchange.finish_handler()
        return response

    return call


def _follow_stream(function: Callable[..., Any], exchange: RpcExchange) -> Callable[..., Iterator[Any]]:
    exchange.is_entered_again = True

    def stream(request: Any, context: Any) -> Iterator[Any]:
        context = _note_code(context, exchange)
        if not exchange.server.is_asyncio:
            exchange.begin_handler(context, True)
        with exchange:
            messages = function(request, context)
        return _iterate(messages, context, exchange)

    return stream


def _iterate(messages: Any, context: Any, exchange: RpcExchange) -> Iterator[Any]:
    """Yields the messages. Between two of them the request is not current in the server's thread."""
    if exchange.server.is_asyncio:  # its thread begins here
        exchange.begin_handler(context, True)
        with exchange:
            messages = iter(messages)
    while True:
        exchange.is_running = True
        try:
            with exchange:
                message = next(messages, _END)
        finally:
            exchange.is_running = False
        if exchange.is_over:
            exchange.end(GeneratorExit())
        if message is _END:
            break
        try:
            yield message
        except BaseException as exc:  # the server stops reading: its client has left
            exchange.end(exc)
            raise
    exchange.finish()


def _follow_coroutine(
    function: Callable[..., Any], exchange: RpcExchange, is_stream: bool
) -> Callable[..., Any]:
    async def call(request: Any, context: Any) -> Any:
        exchange.begin_handler(context, False)
        with exchange:
            response = await function(request, context)
        if is_stream:
            exchange.finish()
        else:
            exchange.finish_handler()
        return response

    return call


def _follow_async_stream(function: Callable[..., Any], exchange: RpcExchange) -> Callable[..., Any]:
    async def stream(request: Any, context: Any) -> Any:
        exchange.begin_handler(context, False)
        with exchange:
            async for message in function(request, context):
                yield message
        exchange.finish()

    return stream
