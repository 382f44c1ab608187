"""A breach of an objective: a real engine serves for a minute, stops, and its sidecar writes a tape.

All text sent is marked, so that tests can search for it on the tape and in everything made from it.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from otel_infer.ringbuffer import directory
from tests.support.served import Server, transformers_serve

OBJECTIVES = "itl=1500ms"
STANDSTILL_S = 3.0
STREAMS = 8
STREAM_TOKENS = 150
ORDINARY_TOKENS = 6
PAUSE_S = 0.6
"""Seconds between two ordinary requests."""


class Breach(NamedTuple):
    """The tape, the trace ids of ordinary and of frozen requests, and the marked words that must not be on the tape."""

    tape: Path
    ordinary: list[str]
    frozen: list[str]
    canaries: dict[str, str]


class _Client:
    """Sends marked requests; a stream counts its lines as they arrive."""

    def __init__(self, port: int, model: Path) -> None:
        self._port, self._model = port, str(model)
        kinds = ("prompt", "user", "header", "query", "error")
        self.canaries = {kind: f"canary{kind}{secrets.token_hex(6)}" for kind in kinds}

    def chat(self, tokens: int, lines: list[float] | None = None, **more: object) -> tuple[str, int]:
        """Sends one streamed completion; returns trace id and status. Arrival times (s) go to `lines`."""
        trace_id = secrets.token_hex(16)
        words = self.canaries
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": f"{words['prompt']} once upon a time"}],
            "max_tokens": tokens,
            "stream": True,
            "user": words["user"],
            **more,
        }
        headers = {
            "content-type": "application/json",
            "authorization": f"Bearer {words['header']}",
            "traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01",
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        with contextlib.closing(connection):
            path = f"/v1/chat/completions?key={words['query']}"
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            while response.readline():
                if lines is not None:
                    lines.append(time.monotonic())
        return trace_id, response.status

    def refused(self) -> int:
        """Sends a request whose error repeats what was sent; returns its status."""
        return self.chat(1, messages=self.canaries["error"])[1]


def cause_breach(folder: Path, model: Path, ordinary_s: float) -> Breach:
    """Runs ordinary load for `ordinary_s`, then a standstill of all requests in flight, which misses `OBJECTIVES`."""
    tapes = folder / "tapes"
    environ = {"OTEL_INFER_SLO": OBJECTIVES, "OTEL_INFER_DUMP_ON_SLO": str(tapes)}
    with transformers_serve(model, folder / "server.log", environ, batching=True) as server:
        client = _Client(server.port, model)
        assert client.refused() >= 400
        ordinary: list[str] = []
        until = time.monotonic() + ordinary_s
        while time.monotonic() < until or not ordinary:
            ordinary.append(client.chat(ORDINARY_TOKENS)[0])
            time.sleep(PAUSE_S)
        frozen = _stop_during_streams(client, server)
        tape = _wait_for_tape(tapes)
    return Breach(tape, ordinary, frozen, client.canaries)


def _stop_during_streams(client: _Client, server: Server) -> list[str]:
    """Runs streams across a standstill of the server; returns the trace ids of the delayed ones."""
    seen: list[list[float]] = [[] for _ in range(STREAMS)]
    ids: dict[int, str] = {}

    def read(number: int) -> None:
        ids[number] = client.chat(STREAM_TOKENS, seen[number])[0]

    readers = [threading.Thread(target=read, args=(number,)) for number in range(STREAMS)]
    for reader in readers:
        reader.start()
    deadline = time.monotonic() + 30
    while not all(len(lines) > 3 for lines in seen):
        assert time.monotonic() < deadline, "the streams did not begin"
        time.sleep(0.002)
    with _stop_server(server):
        time.sleep(STANDSTILL_S)
    for reader in readers:
        reader.join(60)
    longest_gap = 0.9 * STANDSTILL_S
    return [
        ids[i] for i, at in enumerate(seen) if max(b - a for a, b in itertools.pairwise(at)) > longest_gap
    ]


@contextlib.contextmanager
def _stop_server(server: Server) -> Iterator[None]:
    assert server.process is not None
    (rings,) = Path(f"/dev/shm/otel_infer-{os.getuid()}").glob(f"{server.process.pid}-*")
    pids = directory.list_writer_pids(rings)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def _wait_for_tape(folder: Path, timeout: float = 20.0) -> Path:
    deadline = time.monotonic() + timeout
    while not (found := sorted(folder.glob("*.tape"))):
        assert time.monotonic() < deadline, "no tape was written"
        time.sleep(0.1)
    return found[0]
