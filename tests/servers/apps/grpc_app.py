"""gRPC without generated code: `python -m tests.servers.apps.grpc_app PORT`, `… PORT aio` for the asyncio server.

`… PORT aio_threads`: an asyncio server, whose functions run in threads. `… crowded`: it accepts one call at a time.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry import trace

from tests.servers.apps.scorer import CHUNKS, PAUSE_S, score

SERVICE = "toy.Scorer"


def classify(request: bytes, context: grpc.ServicerContext) -> bytes:
    return str(score()).encode()


def stream(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
    for number in range(CHUNKS):
        score(1)
        yield str(number).encode()


def stream_slowly(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
    for number in range(CHUNKS):
        score(1)
        time.sleep(PAUSE_S)
        yield str(number).encode()


def gather(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
    return str(score(len(list(requests)))).encode()


def chat(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    for request in requests:
        score(1)
        yield request


def fail(request: bytes, context: grpc.ServicerContext) -> bytes:
    raise RuntimeError("canary")


def refuse_later(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
    score(1)
    yield request
    context.abort(grpc.StatusCode.UNAVAILABLE, "canary")


def give_up(request: bytes, context: grpc.ServicerContext) -> bytes:
    score(1)
    context.abort(grpc.StatusCode.UNAVAILABLE, "canary")


def answer_nothing(request: bytes, context: grpc.ServicerContext) -> None:
    score(1)


def set_code(request: bytes, context: Any) -> bytes:
    score(1)
    context.set_code(grpc.StatusCode.NOT_FOUND)
    return b"-"


def wait(request: bytes, context: grpc.ServicerContext) -> bytes:
    score(1)
    time.sleep(float(request))
    score(1)
    return b"-"


def span_steps(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
    with trace.get_tracer("app").start_as_current_span("steps"):
        for number in range(CHUNKS):
            with trace.get_tracer("app").start_as_current_span(f"step {number}"):
                score(1)
            yield str(number).encode()


def watch(request: bytes, context: Any, send_response: Callable[[bytes], None]) -> None:
    """A stream that holds no thread, as that of gRPC's health service."""
    send_response(b"threadless")


watch.experimental_non_blocking = True  # type: ignore[attr-defined]


def break_message(message: bytes) -> bytes:
    if message == b"broken":
        raise ValueError("canary")
    return message


def refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
    context.abort(grpc.StatusCode.INVALID_ARGUMENT, "canary")


async def classify_async(request: bytes, context: Any) -> bytes:
    return str(await asyncio.to_thread(score)).encode()


async def stream_async(request: bytes, context: Any) -> AsyncIterator[bytes]:
    for number in range(CHUNKS):
        score(1)
        yield str(number).encode()


async def stream_slowly_async(request: bytes, context: Any) -> AsyncIterator[bytes]:
    for number in range(CHUNKS):
        score(1)
        await asyncio.sleep(PAUSE_S)
        yield str(number).encode()


async def gather_async(requests: AsyncIterator[bytes], context: Any) -> bytes:
    return str(score(len([request async for request in requests]))).encode()


async def fail_async(request: bytes, context: Any) -> bytes:
    raise RuntimeError("canary")


async def chat_async(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        score(1)
        yield request


async def write_async(request: bytes, context: Any) -> None:
    for number in range(CHUNKS):
        score(1)
        await context.write(str(number).encode())


async def refuse_later_async(request: bytes, context: Any) -> AsyncIterator[bytes]:
    score(1)
    yield request
    await context.abort(grpc.StatusCode.UNAVAILABLE, "canary")


async def give_up_async(request: bytes, context: Any) -> None:
    score(1)
    await context.abort(grpc.StatusCode.UNAVAILABLE, "canary")


async def answer_nothing_async(request: bytes, context: Any) -> None:
    score(1)


async def set_code_async(request: bytes, context: Any) -> bytes:
    return set_code(request, context)


async def wait_async(request: bytes, context: Any) -> bytes:
    score(1)
    await asyncio.sleep(float(request))
    score(1)
    return b"-"


async def block_async(request: bytes, context: Any) -> bytes:
    time.sleep(float(request))
    score(1)
    return b"-"


async def span_steps_async(request: bytes, context: Any) -> AsyncIterator[bytes]:
    for message in span_steps(request, context):
        yield message


async def refuse_async(request: bytes, context: Any) -> bytes:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "canary")
    return b""


def make_handlers(suffix: str) -> grpc.GenericRpcHandler:
    here = globals()
    unary, checks = grpc.unary_unary_rpc_method_handler, (break_message, break_message)
    methods = {
        "Classify": unary(here[f"classify{suffix}"]),
        "Fail": unary(here[f"fail{suffix}"]),
        "Refuse": unary(here[f"refuse{suffix}"]),
        "GiveUp": unary(here[f"give_up{suffix}"]),
        "SetCode": unary(here[f"set_code{suffix}"]),
        "Wait": unary(here[f"wait{suffix}"]),
        "Block": unary(block_async),
        "Nothing": unary(here[f"answer_nothing{suffix}"], None, bytes),
        "Checked": unary(here[f"classify{suffix}"], break_message),
        "Unsendable": unary(here[f"classify{suffix}"], None, lambda message: break_message(b"broken")),
        "Stream": grpc.unary_stream_rpc_method_handler(here[f"stream{suffix}"]),
        "Slow": grpc.unary_stream_rpc_method_handler(here[f"stream_slowly{suffix}"]),
        "RefuseLater": grpc.unary_stream_rpc_method_handler(here[f"refuse_later{suffix}"]),
        "Steps": grpc.unary_stream_rpc_method_handler(here[f"span_steps{suffix}"]),
        "Watch": grpc.unary_stream_rpc_method_handler(watch),
        "Write": grpc.unary_stream_rpc_method_handler(write_async),
        "Gather": grpc.stream_unary_rpc_method_handler(here[f"gather{suffix}"], break_message),
        "Chat": grpc.stream_stream_rpc_method_handler(here[f"chat{suffix}"], *checks),
    }
    return grpc.method_handlers_generic_handler(SERVICE, methods)


def cut(handler: Any, details: grpc.HandlerCallDetails) -> Any:
    """Returns the handler; with `cut` in the metadata, one that ends its stream after one message."""
    if "cut" not in dict(details.invocation_metadata):
        return handler

    def cut_stream(request: bytes, context: Any) -> Iterator[bytes]:
        return itertools.islice(handler.unary_stream(request, context), 1)

    async def cut_async_stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        async for message in handler.unary_stream(request, context):
            yield message
            return

    is_async = inspect.isasyncgenfunction(handler.unary_stream)
    return grpc.unary_stream_rpc_method_handler(cut_async_stream if is_async else cut_stream)


def check(details: grpc.HandlerCallDetails) -> None:
    if "fail" in dict(details.invocation_metadata):
        raise RuntimeError("canary")


class Cutter(grpc.ServerInterceptor):
    """An interceptor of the user."""

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        check(details)
        return cut(continuation(details), details)


class AsyncCutter(grpc.aio.ServerInterceptor):
    """An interceptor of the user for an asyncio server."""

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        check(details)
        return cut(await continuation(details), details)


def serve(port: int, limit: int | None, threads: int) -> None:
    server = grpc.server(
        ThreadPoolExecutor(threads),
        handlers=(make_handlers(""),),
        interceptors=(Cutter(),),
        maximum_concurrent_rpcs=limit,
    )
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    signal.signal(signal.SIGTERM, lambda *_: server.stop(0.2))
    server.wait_for_termination()


async def serve_async(port: int, suffix: str, limit: int | None) -> None:
    server = grpc.aio.server(
        ThreadPoolExecutor(4),
        handlers=(make_handlers(suffix),),
        interceptors=(AsyncCutter(),),
        maximum_concurrent_rpcs=limit,
    )
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, lambda: asyncio.ensure_future(server.stop(0.2)))
    # gRPC's `abort` in a thread creates a task from there, which does not wake a loop that sleeps.
    while await server.wait_for_termination(0.05):
        pass


if __name__ == "__main__":
    kinds = sys.argv[2:]
    most = 1 if "crowded" in kinds else None
    if "aio" in kinds or "aio_threads" in kinds:
        asyncio.run(serve_async(int(sys.argv[1]), "_async" if "aio" in kinds else "", most))
    else:
        serve(int(sys.argv[1]), most, 1 if "one_thread" in kinds else 4)
