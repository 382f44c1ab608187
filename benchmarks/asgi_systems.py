"""A FastAPI application: uninstrumented, with otel_infer, and with opentelemetry-instrumentation-fastapi.

All of them run in one process. otel_infer hooks classes, and is switched on and off around each block. Contrib
instruments an application of its own, once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

from benchmarks.stock import Stock

CHUNKS = 20
JSON, STREAM = "/answers", "/streams"
"""Both routes are POST, because otel_infer skips requests that change nothing."""
SERVER_SPAN_ONLY = ("receive", "send")
MISSING = "pip install opentelemetry-instrumentation-fastapi fastapi uvicorn"

App = Callable[..., Any]


class System(NamedTuple):
    """An application with its instrumentation. `flush`: exports what the server still holds."""

    name: str
    app: App
    switch_on: Callable[[], None]
    switch_off: Callable[[], None]
    flush: Callable[[], None]


def do_nothing() -> None:
    """Replaces a function that a system does not need."""


def make_application() -> Any:
    """Returns an application with a route that answers with JSON, and one that streams."""
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
        return StreamingResponse(_stream_chunks(), media_type="text/event-stream")

    return app


async def _stream_chunks() -> AsyncIterator[bytes]:
    for number in range(CHUNKS):
        yield b'data: {"token": %d}\n\n' % number


def make_bare(name: str) -> System:
    """Returns the uninstrumented application."""
    return System(name, make_application(), do_nothing, do_nothing, do_nothing)


def make_ours(name: str) -> System:
    """Returns the application with otel_infer, whose events the sidecar exports."""
    from otel_infer.instrumentation import asgi

    def install_hooks() -> None:
        asgi.instrumentor.install()
        if asgi.instrumentor.status.drift:
            raise RuntimeError(f"not instrumented: {asgi.instrumentor.status.drift}")

    app = asgi.wrap(make_application())
    return System(name, app, install_hooks, asgi.instrumentor.remove, do_nothing)


def make_contrib(name: str, stock: Stock, server_span_only: bool) -> System:
    """Returns the application with contrib and the stock SDK. By default each ASGI message has a span."""
    try:
        from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
    except ModuleNotFoundError as reason:
        raise SystemExit(f"{reason}: {MISSING}") from None

    app = make_application()
    excluded = list(SERVER_SPAN_ONLY) if server_span_only else None
    FastAPIInstrumentor.instrument_app(app, tracer_provider=stock.provider, exclude_spans=excluded)
    return System(name, app, do_nothing, do_nothing, stock.flush)
