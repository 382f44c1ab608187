"""Clients of the stack's servers: streams of all lengths, some aborted early, some refused."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
from collections.abc import Callable
from typing import Any


class Load:
    """A number of threads that send requests to a server until `stop`."""

    def __init__(self, send: Callable[[random.Random], None], threads: int, pause_s: float = 0.0) -> None:
        self._send, self._pause_s = send, pause_s
        self._stopping = threading.Event()
        self.sent = self.failed = 0
        self._threads = [
            threading.Thread(target=self._run, args=(seed,), daemon=True) for seed in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._stopping.wait(self._pause_s * rng.random()):
            try:
                self._send(rng)
                self.sent += 1
            except (OSError, http.client.HTTPException):
                self.failed += 1

    def stop(self) -> None:
        """Stops sending, and waits for requests in flight."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)


def post(port: int, path: str, body: dict[str, Any], abort_after: int = 0) -> int:
    """Sends a request and returns its status. The client aborts after `abort_after` chunks; 0 reads the whole response."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if abort_after:
            for _ in range(abort_after):
                response.read1(64)
            if connection.sock is not None:
                connection.sock.shutdown(socket.SHUT_RDWR)
        else:
            response.read()
        return response.status
    finally:
        connection.close()


def loop_client(port: int) -> Callable[[random.Random], None]:
    """Returns a client of the hand-written loop: mostly short prompts, some too long. One in twelve aborts."""

    def send(rng: random.Random) -> None:
        prompt = rng.choice((20, 30, 40, 50, 60, 70, 80, 90, 100, 600, 2500, 4000))
        abort_after = 3 if rng.random() < 1 / 12 else 0
        post(port, "/", {"prompt": prompt, "tokens": rng.randint(5, 40)}, abort_after)

    return send


def classify_client(port: int) -> Callable[[random.Random], None]:
    """Returns a client of a classifier."""

    def send(rng: random.Random) -> None:
        post(port, "/classify/a", {})

    return send


def chat_client(port: int, model: str) -> Callable[[random.Random], None]:
    """Returns a client of an OpenAI server: chats, of which some abort and some name an unknown model."""

    def send(rng: random.Random) -> None:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "time and again " * rng.randint(2, 40)}],
            "max_tokens": rng.randint(8, 60),
            "stream": True,
            "temperature": rng.choice((0.0, 1.0)),
        }
        kind = rng.random()
        if kind < 0.05:
            post(port, "/v1/chat/completions", {**body, "model": "unknown-model"})
        else:
            post(port, "/v1/chat/completions", body, 2 if kind < 0.12 else 0)

    return send
