"""Sends requests at given times, and reads the answers as clients do: fast, slowly, or with a deadline and retries."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

WORDS = "tell me of the weather in the north and of the roads to it "
GIVE_UP_S = 40.0
MIN_REQUESTS = 20
NO_FIELDS: Mapping[str, Any] = MappingProxyType({})
TEXTS = 6
"""Texts of a request for embeddings."""


@dataclass(frozen=True)
class TimedRequest:
    """A request at this time (s) with a prompt of so many words and so many output tokens.

    `deadline_s`: the client gives up then, and sends the request again, `retries` times at most; 0 = it waits.
    `reads_kb_s`: the client reads so slowly; 0 = as fast as it can. `padding`: bytes that the server adds to each token.
    """

    at: float
    words: int
    tokens: int
    deadline_s: float = 0.0
    retries: int = 0
    reads_kb_s: float = 0.0
    padding: int = 0


@dataclass(frozen=True)
class Answer:
    """The measurements of a client, s; `first` is nan without an answer. `tries`: requests that it sent."""

    first: float
    total: float
    tries: int
    status: int


class Load:
    """The requests of a draw. `kind`: `chat`, `chat-stream` or `embeddings`. `fields`: added to each body."""

    def __init__(
        self,
        port: int,
        kind: str,
        model: str,
        requests: list[TimedRequest],
        fields: Mapping[str, Any] = NO_FIELDS,
    ) -> None:
        self.port, self.kind, self.model, self.requests, self.fields = port, kind, model, requests, fields

    def run(self) -> list[Answer]:
        """Sends all requests and returns the answers, in the order of the requests."""
        return asyncio.run(self._run())

    async def _run(self) -> list[Answer]:
        began = time.monotonic()
        return list(await asyncio.gather(*(self._send_on_time(request, began) for request in self.requests)))

    async def _send_on_time(self, request: TimedRequest, began: float) -> Answer:
        await asyncio.sleep(max(began + request.at - time.monotonic(), 0))
        sent_at, tries = time.monotonic(), 0
        while True:
            tries += 1
            limit = request.deadline_s if request.deadline_s and tries <= request.retries else GIVE_UP_S
            try:
                first, status = await asyncio.wait_for(self._exchange(request), limit)
            except (TimeoutError, OSError, asyncio.IncompleteReadError):
                if tries <= request.retries:
                    continue
                first, status = float("nan"), 0
            return Answer(first - sent_at, time.monotonic() - sent_at, tries, status)

    async def _exchange(self, request: TimedRequest) -> tuple[float, int]:
        """Returns when the first byte of the answer's body came, and the status."""
        connection = await self._connect(request)
        reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 14)
        try:
            body = json.dumps(self.make_body(request)).encode()
            head = (
                f"POST {PATHS[self.kind]} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            head_read = await reader.readuntil(b"\r\n\r\n")
            first = 0.0
            while data := await reader.read(1 << 14):
                first = first or time.monotonic()
                if request.reads_kb_s:
                    await asyncio.sleep(len(data) / 1024 / request.reads_kb_s)
            return first or time.monotonic(), int(head_read.split(b" ", 2)[1])
        finally:
            writer.close()

    async def _connect(self, request: TimedRequest) -> socket.socket:
        connection = socket.socket()
        if request.reads_kb_s:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.port))
        return connection

    def make_body(self, request: TimedRequest) -> dict[str, Any]:
        """Returns the body of a request."""
        text = f"{random.getrandbits(32):08x} " + (WORDS * (request.words // 12 + 1))
        text = " ".join(text.split()[: request.words])
        if self.kind == "embeddings":
            return {"model": self.model, "input": [text] * TEXTS}
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": request.tokens,
            "stream": self.kind == "chat-stream",
            **self.fields,
        }
        return {**body, "padding": request.padding} if request.padding else body


PATHS = {
    "chat": "/v1/chat/completions",
    "chat-stream": "/v1/chat/completions",
    "embeddings": "/v1/embeddings",
}


def draw_requests(
    rng: random.Random,
    seconds: float,
    rate: float,
    tokens: tuple[int, int],
    words: tuple[int, int] = (12, 48),
) -> list[TimedRequest]:
    """Returns requests at random times, `rate` per second for `seconds`, or until there are enough for a verdict."""
    at, requests = 0.2, list[TimedRequest]()
    while at < seconds or len(requests) < MIN_REQUESTS:
        requests.append(TimedRequest(at, rng.randint(*words), rng.randint(*tokens)))
        at += rng.expovariate(rate)
    return requests


def change_some(
    rng: random.Random, requests: list[TimedRequest], share: float, **changes: Any
) -> list[TimedRequest]:
    """Returns the requests, of which a random share has these changes."""
    chosen = set(rng.sample(range(len(requests)), max(round(share * len(requests)), 1)))
    return [replace(request, **changes) if i in chosen else request for i, request in enumerate(requests)]
