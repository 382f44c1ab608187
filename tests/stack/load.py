"""Who asks the servers of the stack: streams of all lengths, some that leave early, some that are refused."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
from collections.abc import Callable
from typing import Any


class Load:
    """So many threads ask one server again and again until it is over."""

    def __init__(self, ask: Callable[[random.Random], None], threads: int, pause_s: float = 0.0) -> None:
        self._ask, self._pause = ask, pause_s
        self._over = threading.Event()
        self.asked = self.failed = 0
        self._threads = [
            threading.Thread(target=self._run, args=(seed,), daemon=True) for seed in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self._over.wait(self._pause * draw.random()):
            try:
                self._ask(draw)
                self.asked += 1
            except (OSError, http.client.HTTPException):
                self.failed += 1

    def stop(self) -> None:
        """No more; what was asked is waited for."""
        self._over.set()
        for thread in self._threads:
            thread.join(60)


def post(port: int, path: str, body: dict[str, Any], leave_after: int = 0) -> int:
    """One request: its status. Its client leaves after so many pieces of the answer, where that is said."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        if leave_after:
            for _ in range(leave_after):
                answer.read1(64)
            if connection.sock is not None:
                connection.sock.shutdown(socket.SHUT_RDWR)
        else:
            answer.read()
        return answer.status
    finally:
        connection.close()


def loop(port: int) -> Callable[[random.Random], None]:
    """Of the hand-written loop: mostly short prompts, some long ones, some too long; one in twelve leaves."""

    def ask(draw: random.Random) -> None:
        prompt = draw.choice((20, 30, 40, 50, 60, 70, 80, 90, 100, 600, 2500, 4000))
        leaves = 3 if draw.random() < 1 / 12 else 0
        post(port, "/", {"prompt": prompt, "tokens": draw.randint(5, 40)}, leaves)

    return ask


def chats(port: int, model: str) -> Callable[[random.Random], None]:
    """Of an OpenAI server: chats, some that leave, some for a model that there is not."""

    def ask(draw: random.Random) -> None:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "time and again " * draw.randint(2, 40)}],
            "max_tokens": draw.randint(8, 60),
            "stream": True,
            "temperature": draw.choice((0.0, 1.0)),
        }
        kind = draw.random()
        if kind < 0.05:
            post(port, "/v1/chat/completions", {**body, "model": "nobody"})
        else:
            post(port, "/v1/chat/completions", body, 2 if kind < 0.12 else 0)

    return ask
