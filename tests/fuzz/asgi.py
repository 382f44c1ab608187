"""ASGI scopes and messages that break the specification: the application sees them unchanged, and is not disturbed."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from otel_infer.instrumentation.asgi import wrap
from otel_infer.testing import capture
from tests.fuzz.odd_values import TEXTS, draw_value

MESSAGES_PER_RUN = 12
TYPES = (
    "http.response.start",
    "http.response.body",
    "http.response.trailers",
    "http.response.pathsend",
    "x",
    5,
    None,
)


TRACE = "c" * 32
ORDINARY_INPUTS = [{"type": "http.request", "body": b"{}", "more_body": False}]
ORDINARY_MESSAGES = [
    {"type": "http.response.start", "status": 200, "headers": []},
    {"type": "http.response.body", "body": b"ok", "more_body": False},
]


class AppError(Exception):
    """What the application raises; it must arrive."""


def run_once(draw: random.Random) -> int:
    """Runs one request with odd messages through the instrumentation. Returns the number of messages."""
    scope, messages = (
        _draw_scope(draw),
        [_draw_message(draw) for _ in range(draw.randint(1, MESSAGES_PER_RUN))],
    )
    inputs = [_draw_input(draw) for _ in range(3)]
    raises, seen = draw.random() < 0.2, []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        received = [await receive() for _ in inputs]
        assert received == inputs
        for message in messages:
            await send(message)
        if raises:
            raise AppError

    async def send(message: Any) -> None:
        seen.append(message)

    traced_app = wrap(app)

    async def run(scope: dict[str, Any]) -> None:
        waiting = iter(inputs)

        async def receive() -> Any:
            return next(waiting)

        await traced_app(scope, receive, send)

    with capture("asgi") as captured:
        try:
            asyncio.run(run(scope))
        except AppError:
            assert raises
        assert len(seen) == len(messages)
        messages[:], inputs[:], raises = ORDINARY_MESSAGES, ORDINARY_INPUTS, False
        asyncio.run(run(_ordinary_scope()))
        traces = {record.trace_id.hex() for record in captured.requests()}
    assert TRACE in traces, "the request after the odd one was not recorded"
    return len(seen)


def _ordinary_scope() -> dict[str, Any]:
    return {
        "type": "http", "method": "POST", "path": "/v1/x", "raw_path": b"/v1/x", "query_string": b"", "scheme": "http",
        "headers": [(b"host", b"a"), (b"traceparent", f"00-{TRACE}-{'b' * 16}-01".encode())],
        "server": ("a", 80), "client": ("b", 1), "http_version": "1.1",
    }  # fmt: skip


def _draw_scope(draw: random.Random) -> dict[str, Any]:
    scope = _ordinary_scope()
    scope["headers"] = [(b"host", b"a"), (b"traceparent", b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01")]
    for _ in range(draw.randrange(4)):
        key = draw.choice(sorted(scope))
        if draw.random() < 0.3:
            del scope[key]
        else:
            scope[key] = draw_value(draw)
    scope["type"] = "http"
    if draw.random() < 0.5 and isinstance(scope.get("headers"), list):
        scope["headers"] = [*scope["headers"], (draw.randbytes(5), draw.randbytes(20)), draw_value(draw)]
    return scope


def _draw_message(draw: random.Random) -> Any:
    message: dict[str, Any] = {
        "type": draw.choice(TYPES),
        "status": draw.choice((200, 500, "200", None, 99999, -1)),
        "headers": draw.choice(([], [(b"a", b"b")], None, draw_value(draw))),
        "body": draw.choice((b"", b"data: {}\n\n", "text", None, 5)),
        "more_body": draw.choice((True, False, None, "yes")),
    }
    for key in draw.sample(sorted(message), draw.randrange(3)):
        del message[key]
    return message if draw.random() < 0.9 else draw_value(draw)


def _draw_input(draw: random.Random) -> Any:
    body = draw.choice((b'{"model": "m"}', b"\xff", b"", None, draw.choice(TEXTS)))
    return {
        "type": draw.choice(("http.request", "http.disconnect", "x")),
        "body": body,
        "more_body": draw_value(draw),
    }
