"""Parlor, an invented model server: lines of JSON on a TCP socket, a thread per connection, batches of its own."""

from __future__ import annotations

import collections
import json
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

Model = Callable[[Sequence[Any]], Sequence[Any]]


class Call:
    """One call of a client. `headers`: as the client sent them."""

    def __init__(self, method: str, payload: Any, headers: dict[str, str]) -> None:
        self.method, self.payload, self.headers = method, payload, headers
        self.done = threading.Event()
        self.answer: Any = None
        self.error: Exception | None = None


class Batcher:
    """Collects calls and lets a model work on several at once, in a thread of its own."""

    def __init__(self, model: Model, max_size: int, window_s: float) -> None:
        self.model, self.max_size, self.window_s = model, max_size, window_s
        self.waiting: collections.deque[Call] = collections.deque()
        self.changed = threading.Condition()
        threading.Thread(target=self.run, daemon=True).start()

    def put(self, call: Call) -> None:
        with self.changed:
            self.waiting.append(call)
            self.changed.notify()

    def run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: bool(self.waiting))
                self.changed.wait_for(lambda: len(self.waiting) >= self.max_size, self.window_s)
                calls = [self.waiting.popleft() for _ in range(min(self.max_size, len(self.waiting)))]
            self.run_batch(calls)

    def run_batch(self, calls: list[Call]) -> None:
        try:
            for call, answer in zip(calls, self.model([call.payload for call in calls]), strict=True):
                call.answer = answer
        except Exception as error:
            for call in calls:
                call.error = error
        for call in calls:
            call.done.set()


class Server:
    """Serves methods by name. Each is a model."""

    def __init__(self, models: dict[str, Model], max_size: int = 8, window_s: float = 0.02) -> None:
        self.batchers = {name: Batcher(model, max_size, window_s) for name, model in models.items()}
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.serve_connection, args=(connection,), daemon=True).start()

    def serve_connection(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rw") as stream:
            for line in stream:
                parts = json.loads(line)
                call = Call(parts["method"], parts["payload"], parts.get("headers", {}))
                try:
                    answer = {"answer": self.serve_call(call)}
                except Exception as error:
                    answer = {"error": f"{type(error).__name__}: {error}"}
                stream.write(json.dumps(answer) + "\n")
                stream.flush()

    def serve_call(self, call: Call) -> Any:
        """Returns the answer. Raises KeyError for an unknown method, and what the model raises."""
        self.batchers[call.method].put(call)
        call.done.wait()
        if call.error is not None:
            raise call.error
        return call.answer

    def close(self) -> None:
        self.listener.close()


def ask(port: int, method: str, payload: Any, **headers: str) -> Any:
    """Calls a method of a server, and returns its answer."""
    with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rw") as stream:
        stream.write(json.dumps({"method": method, "payload": payload, "headers": headers}) + "\n")
        stream.flush()
        return json.loads(stream.readline())
