"""A FastAPI application, and who may watch it: nobody, otel_infer, or opentelemetry-instrumentation-fastapi.

All of them live in one process, so that what is compared shares one memory and one processor. Ours hooks classes and is
put on and taken off around each block; theirs is put on an application of its own, once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

from benchmarks.stock import Stock

CHUNKS = 20
JSON, STREAM = "/answers", "/streams"
"""Both are asked with POST: requests that change nothing are left alone by us, and so would cost nothing."""
SERVER_SPAN_ONLY = ("receive", "send")
MISSING = "pip install opentelemetry-instrumentation-fastapi fastapi uvicorn"

App = Callable[..., Any]


class System(NamedTuple):
    """An application and who watches it. `flush`: has what it holds back exported, which is work of the server."""

    name: str
    app: App
    put_on: Callable[[], None]
    take_off: Callable[[], None]
    flush: Callable[[], None]


def nothing() -> None:
    """Of a system that has nothing to do there."""


def application() -> Any:
    """One route that answers with JSON, and one that streams."""
    try:
        from fastapi import FastAPI
        from fastapi.responses import StreamingResponse
    except ModuleNotFoundError as reason:
        raise SystemExit(f"{reason}: {MISSING}") from None

    app = FastAPI()

    @app.post(JSON)
    async def answers(question: dict[str, Any]) -> dict[str, Any]:
        return {"id": question["id"], "text": "Because of the air."}

    @app.post(STREAM)
    async def streams() -> StreamingResponse:
        return StreamingResponse(_chunks(), media_type="text/event-stream")

    return app


async def _chunks() -> AsyncIterator[bytes]:
    for number in range(CHUNKS):
        yield b'data: {"token": %d}\n\n' % number


def bare(name: str) -> System:
    """The application as it came."""
    return System(name, application(), nothing, nothing, nothing)


def ours() -> System:
    """otel_infer; what is stated needs no flushing, since that is the sidecar's work."""
    from otel_infer.instrumentation import asgi

    def put_on() -> None:
        asgi.instrumentor.install()
        if asgi.instrumentor.status.drift:
            raise RuntimeError(f"not instrumented: {asgi.instrumentor.status.drift}")

    app = asgi.wrap(application())
    return System("ours", app, put_on, asgi.instrumentor.remove, nothing)


def contrib(name: str, stock: Stock, server_span_only: bool) -> System:
    """opentelemetry-instrumentation-fastapi with the stock SDK; as it comes, each message is a span as well."""
    try:
        from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
    except ModuleNotFoundError as reason:
        raise SystemExit(f"{reason}: {MISSING}") from None

    app = application()
    without = list(SERVER_SPAN_ONLY) if server_span_only else None
    FastAPIInstrumentor.instrument_app(app, tracer_provider=stock.provider, exclude_spans=without)
    return System(name, app, nothing, nothing, stock.flush)
