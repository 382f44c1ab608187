"""gRPC servers. The library logs the exceptions of a handler, which is how they are seen."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.servers.entrances.handlers import TEXT, Handlers


class _Catch(logging.Handler):
    def __init__(self, handlers: Handlers) -> None:
        super().__init__()
        self.handlers = handlers

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.handlers.errors.append(record.exc_info[1])


def make_service(grpc: Any, work: Any, fail: Any) -> Any:
    methods = {"Work": work, "Fail": fail}
    return grpc.method_handlers_generic_handler(
        "toy.Toy", {name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()}
    )


def call_both(handlers: Handlers, port: int) -> None:
    import grpc

    for method in ("Work", "Fail"):
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                answer = channel.unary_unary(f"/toy.Toy/{method}")(TEXT.encode(), timeout=10).decode()
            except grpc.RpcError as error:
                answer = f"{error.code().name} {error.details()}"
        handlers.answers.append(answer)


def drive_threads(handlers: Handlers) -> None:
    import grpc

    log, catch = logging.getLogger("grpc"), _Catch(handlers)
    log.addHandler(catch)
    log.propagate = False

    def work(request: bytes, context: Any) -> bytes:
        return handlers.work(request.decode()).encode()

    def fail(request: bytes, context: Any) -> bytes:
        return handlers.fail().encode()

    server = grpc.server(ThreadPoolExecutor(2), handlers=(make_service(grpc, work, fail),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    call_both(handlers, port)
    server.stop(None).wait()
    log.removeHandler(catch)


def drive_asyncio(handlers: Handlers) -> None:
    import grpc

    log, catch = logging.getLogger("grpc"), _Catch(handlers)
    log.addHandler(catch)
    log.propagate = False

    async def work(request: bytes, context: Any) -> bytes:
        return handlers.work(request.decode()).encode()

    async def fail(request: bytes, context: Any) -> bytes:
        return handlers.fail().encode()

    async def serve() -> None:
        server = grpc.aio.server(handlers=(make_service(grpc, work, fail),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        await asyncio.to_thread(call_both, handlers, port)
        await server.stop(None)

    asyncio.run(serve())
    log.removeHandler(catch)
