"""A client of vLLM's OpenAI server."""

from __future__ import annotations

import http.client
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.vllm.serving import MODEL

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, EMBEDDINGS, METRICS = "/v1/responses", "/v1/embeddings", "/metrics"


class Answer(NamedTuple):
    """`events`: decoded events of a stream. `at`: their arrival, monotonic ns, as `sent_at`."""

    status: int
    trace_id: str
    parent_id: str
    events: list[dict[str, Any]]
    at: list[int]
    sent_at: int
    body: dict[str, Any]


def prompt(words: int, word: str = "time") -> str:
    """Returns a prompt of about as many tokens as words."""
    return " ".join([word] * words)


def send_request(
    port: int,
    path: str,
    *,
    close_after: int | None = None,
    close_in: float = 0.0,
    headers: dict[str, str] | None = None,
    **body: Any,
) -> Answer:
    """Sends one request with a `traceparent` of its own.

    The client disconnects after `close_after` events, or after `close_in` s even without a response.
    """
    trace_id, parent_id = secrets.token_hex(16), secrets.token_hex(8)
    sent = {
        "content-type": "application/json",
        "traceparent": f"00-{trace_id}-{parent_id}-01",
        **(headers or {}),
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    sent_at = time.monotonic_ns()
    connection.request("POST", path, json.dumps({"model": MODEL, **body}), sent)
    events: list[dict[str, Any]] = []
    at: list[int] = []
    status, answer = 0, {}
    if close_in:
        time.sleep(close_in)
    else:
        response = connection.getresponse()
        status = response.status
        if body.get("stream") and status == 200:
            while (close_after is None or len(events) < close_after) and (line := response.readline()):
                if line.startswith(b"data:") and b"[DONE]" not in line:
                    events.append(json.loads(line[5:]))
                    at.append(time.monotonic_ns())
        else:
            answer = json.loads(response.read() or b"{}")
        if close_after is not None and response.fp is not None:
            response.close()
    if connection.sock is not None:
        connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    return Answer(status, trace_id, parent_id, events, at, sent_at, answer)


def texts(answer: Answer) -> list[str]:
    """Returns the texts of a streamed chat or completion."""
    choices = [choice for event in answer.events for choice in event.get("choices", ())]
    return [
        text for choice in choices if (text := choice.get("text") or choice.get("delta", {}).get("content"))
    ]


class ConcurrentRequests:
    """Requests in threads of their own; `answers` waits for all."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._answers: dict[int, Answer] = {}

    def send_request(self, *args: Any, **kwargs: Any) -> None:
        """Calls `send_request` in a new thread."""
        number = len(self._threads)

        def go() -> None:
            self._answers[number] = send_request(*args, **kwargs)

        self._threads.append(threading.Thread(target=go, daemon=True))
        self._threads[-1].start()

    def answers(self) -> list[Answer]:
        """Returns all responses, in the order of sending."""
        for thread in self._threads:
            thread.join(120)
        return [self._answers[number] for number in range(len(self._threads))]


def counters(port: int) -> dict[str, float]:
    """Returns vLLM's own metrics, summed over the labels of each except `le`."""
    found: dict[str, float] = {}
    for line in _scraped(port).splitlines():
        if line and not line.startswith("#") and 'le="' not in line:
            name, value = line.partition("{")[0].partition(" ")[0], line.rpartition(" ")[2]
            found[name] = found.get(name, 0.0) + float(value)
    return found


def block_size(port: int) -> int:
    """Returns the tokens per KV block, from vLLM's own metrics."""
    return int(re.findall(r'[{,]block_size="(\d+)"', _scraped(port))[0])


def _scraped(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", METRICS)
    text = connection.getresponse().read().decode()
    connection.close()
    return text


def eventually(condition: Callable[[], object], timeout: float = 15.0) -> bool:
    """Returns whether the condition became true in time."""
    deadline = time.monotonic() + timeout
    while not (found := bool(condition())) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found
