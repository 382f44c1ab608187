"""Clients of a server, in a process of their own. They measure tokens, gaps between tokens, and times to first tokens.

python -m benchmarks.whole.client PORT KIND NUMBER OPTIONS

`streams`: NUMBER closed loops read streamed completions. `requests`: NUMBER requests per second, each at a random
time of its turn, whether or not earlier ones were answered; `calls`: the same by gRPC. Each line on standard input is a file, to which the measurements since the
last line are written, or `drop`. Each is answered by a line. The process ends with its standard input.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import sys
import threading
import time
from array import array
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

HEAD = (
    "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: {kept}\r\n"
    "content-length: {length}\r\n\r\n"
)
CONTENT = re.compile(rb'"content": ?"[^"]')
COUNT = re.compile(rb'"completion_tokens": ?(\d+)')
WORDS = "tell me of the weather "
COLUMNS = ("gaps", "firsts", "lengths")
"""Seconds between events with tokens, to the first token or answer, and from request to end."""


class Measurements:
    """The measurements since the last `take`."""

    def __init__(self) -> None:
        self.take()

    def take(self) -> dict[str, Any]:
        """Returns the measurements, and begins anew."""
        taken = dict(vars(self))
        self.columns = {name: array("d") for name in COLUMNS}
        self.tokens = self.errors = 0
        return taken


async def read_stream(port: int, path: str, request: dict[str, Any], measured: Measurements) -> None:
    """Sends one request and measures each event with tokens of its answer. vLLM may send several tokens at once, and then
    sends how many there were until now."""
    body = json.dumps(request).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    began = last = time.perf_counter()
    writer.write(HEAD.format(path=path, kept="close", length=len(body)).encode() + body)
    tokens = 0
    while line := await reader.readline():
        if not is_token(line):
            continue
        now, before = time.perf_counter(), tokens
        counted = COUNT.search(line)
        tokens = int(counted[1]) if counted else tokens + 1
        measured.columns["gaps" if before else "firsts"].append(now - last)
        measured.tokens += tokens - before
        last = now
    measured.columns["lengths"].append(time.perf_counter() - began)
    measured.errors += tokens < 0.8 * request["max_tokens"]
    writer.close()


def is_token(line: bytes) -> bool:
    """Returns whether a line of server-sent events has a token."""
    if line.startswith(b"data: {"):
        return b'"token"' in line or CONTENT.search(line) is not None
    return False


async def run_streams(port: int, number: int, options: dict[str, Any], measured: Measurements) -> None:
    """Reads `number` streams at all times. Each asks for half to one and a half of `tokens`."""
    chance = random.Random(1)

    async def repeat(delay: float) -> None:
        await asyncio.sleep(delay)
        while True:
            request = make_completion(chance, options)
            try:
                await read_stream(port, options["path"], request, measured)
            except OSError:
                measured.errors += 1
                await asyncio.sleep(0.1)

    await asyncio.gather(*(repeat(i * 0.01) for i in range(number)))


def make_completion(chance: random.Random, options: dict[str, Any]) -> dict[str, Any]:
    """Returns a request for a streamed completion. No two prompts begin alike, so no prefix is cached."""
    text = f"{chance.getrandbits(32):08x} {WORDS * 6}"
    return {
        "model": options["model"],
        "stream": True,
        "max_tokens": options["tokens"] // 2 + chance.randrange(options["tokens"]),
        "messages": [{"role": "user", "content": text}],
        **options.get("extra", {}),
    }


class KeptConnections:
    """Connections of which each has one request at a time."""

    def __init__(self, port: int, path: str) -> None:
        self._port, self._path = port, path
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send(self, request: dict[str, Any]) -> bool:
        """Sends a request on an idle connection or a new one. Returns whether the answer is a success."""
        while self._idle and self._idle[-1][0].at_eof():  # the server closes what is idle for some seconds
            self._idle.pop()[1].close()
        connection = (
            self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self._port)
        )
        reader, writer = connection
        body = json.dumps(request).encode()
        writer.write(HEAD.format(path=self._path, kept="keep-alive", length=len(body)).encode() + body)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        await reader.readexactly(length)
        if b"connection: close" in head.lower():
            writer.close()
        else:
            self._idle.append(connection)
        return b" 200 " in head[:16]


async def run_requests(port: int, number: int, options: dict[str, Any], measured: Measurements) -> None:
    """Sends `number` requests per second, however late the answers are."""
    await send_at_rate(KeptConnections(port, options["path"]).send, number, measured)


async def run_calls(port: int, number: int, options: dict[str, Any], measured: Measurements) -> None:
    """Makes `number` gRPC calls per second, as `run_requests`."""
    import grpc

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(options["path"])

        async def send(request: dict[str, Any]) -> bool:
            try:
                return bool(await call(json.dumps(request).encode()))
            except grpc.RpcError:
                return False

        await send_at_rate(send, number, measured)


async def send_at_rate(
    send_request: Callable[[dict[str, Any]], Awaitable[bool]], number: int, measured: Measurements
) -> None:
    """Sends `number` requests per second. `send_request`: returns whether the answer is a success."""
    sending: set[asyncio.Task[None]] = set()

    async def send(text: str, due: float) -> None:
        try:
            measured.errors += not await send_request({"text": text})
        except (OSError, asyncio.IncompleteReadError):
            measured.errors += 1
        measured.columns["firsts"].append(time.perf_counter() - due)

    chance, began = random.Random(1), time.perf_counter()
    for turn in itertools.count():
        due = began + (turn + chance.random()) / number
        await asyncio.sleep(max(due - time.perf_counter(), 0))
        task = asyncio.create_task(send(f"{chance.getrandbits(32):08x} {WORDS * 4}", due))
        sending.add(task)
        task.add_done_callback(sending.discard)


KINDS = {"streams": run_streams, "requests": run_requests, "calls": run_calls}


def main(port: int, kind: str, number: int, options: dict[str, Any]) -> None:
    """Runs the load in a thread, and answers commands."""
    measured = Measurements()
    loop = asyncio.new_event_loop()
    load = KINDS[kind](port, number, options, measured)
    threading.Thread(target=loop.run_until_complete, args=(load,), daemon=True).start()
    for line in sys.stdin:
        taken = measured.take()
        if line.strip() != "drop":
            np.savez(line.strip(), tokens=taken["tokens"], errors=taken["errors"], **taken["columns"])
        print("done", flush=True)
    os._exit(0)  # the loop runs in a thread and would complain of its tasks


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]))
