"""Event streams of servers, cut anywhere: the client's chunks pass unchanged."""

from __future__ import annotations

import random
from collections.abc import Iterator

import httpx
from opentelemetry.sdk.trace import TracerProvider

from otel_infer.instrumentation.httpx import instrument_client
from tests.fuzz.odd_values import mutate_bytes

STREAM = (
    b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n'
    b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n: comment\nevent: x\r\n\r\ndata: [DONE]\n\n'
)
PROVIDER = TracerProvider()


def run_once(draw: random.Random) -> int:
    """Reads one mutated stream through a traced client. Returns 1."""
    body = mutate_bytes(draw, STREAM * draw.randint(1, 3))
    chunks, at = [], 0
    while at < len(body):
        size = draw.randint(1, 40)
        chunks.append(body[at : at + size])
        at += size
    headers = {"content-type": draw.choice(("text/event-stream", "application/json", "", "text"))}
    if draw.random() < 0.5:
        headers["server-timing"] = draw.choice(
            ("infer;dur=3.5", "infer;dur=x", ";;;", "infer", "infer;dur=1e999")
        )

    class Body(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield from chunks

    transport = httpx.MockTransport(lambda request: httpx.Response(200, headers=headers, stream=Body()))
    with instrument_client(httpx.Client(transport=transport), PROVIDER) as client:
        with client.stream("POST", "http://a/v1/chat/completions", json={}) as response:
            assert b"".join(response.iter_raw()) == body
    return 1
