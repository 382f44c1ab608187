"""A load client for an OpenAI-compatible server that shares no code with the rest of otel_infer.

Its own timing is the reference that our spans are compared with, so this module must not import otel_infer.
"""

from __future__ import annotations

import http.client
import json
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from urllib.parse import urlsplit

WORDS = (
    "time year people way day thing world life hand part child eye woman place work week case point company number "
    "group problem fact be have do say get make go know take see come think look want give use find tell ask seem"
).split()


@dataclass(slots=True)
class RequestResult:
    """One request as its client measured it. `_at`: `time.perf_counter_ns()` instants; `_ns`: lengths."""

    prompt_words: int
    max_tokens: int
    trace_id: str | None
    """32 hex digits from the `traceparent` header; None if none was sent."""
    started_at: int = 0
    """Just before the request is written."""
    started_unix_ns: int = 0
    """The same instant on the wall clock."""
    content_at: list[int] = field(default_factory=list)
    """When each event with text arrived. Events with only a role are not included."""
    ended_at: int = 0
    """End of the response body, or when the request failed."""
    status: int = 0
    """HTTP status; 0 if there was no response."""
    error: str | None = None

    @property
    def ttft_ns(self) -> int | None:
        """Time to the first text; None if there was none."""
        return self.content_at[0] - self.started_at if self.content_at else None

    @property
    def gaps_ns(self) -> list[int]:
        """Times between consecutive text events."""
        return [later - sooner for sooner, later in zip(self.content_at, self.content_at[1:], strict=False)]

    @property
    def e2e_ns(self) -> int:
        """Time from the start of the request to the end of the response."""
        return self.ended_at - self.started_at


def run_load(
    base_url: str,
    model: str,
    *,
    requests: int | None,
    concurrency: int,
    seconds: float | None = None,
    prompt_lengths: Sequence[int] = (16, 64, 256),
    output_lengths: Sequence[int] = (16, 32, 64),
    seed: int = 0,
    on_done: Callable[[RequestResult], None] | None = None,
    traceparent: bool = True,
    timeout_s: float = 120.0,
) -> list[RequestResult]:
    """Streams chat completions from `concurrency` clients.

    Returns the results in the order in which they ended. Stops after `requests`, or starts no request after
    `seconds`, whichever is first. At least one of them must be given. Each request draws its prompt length
    (words) and its output length (tokens) from the two lists. The same `seed` gives the same sequence of
    requests, independent of timing. `on_done` is called once per request, never concurrently; an exception
    from it ends the load. `timeout_s` limits each socket wait. A failed request is a result with an `error`.
    """
    if requests is None and seconds is None:
        raise ValueError("requests and seconds are both None, so the load would never end; give one of them")
    plan = _generate_requests(prompt_lengths, output_lengths, seed, traceparent)
    deadline = None if seconds is None else time.perf_counter() + seconds
    lock, stop, done = threading.Lock(), threading.Event(), list[RequestResult]()

    def run_client() -> None:
        client = _ChatClient(base_url, model, timeout_s, stop)
        while not stop.is_set() and (deadline is None or time.perf_counter() < deadline):
            with lock:
                index, prompt, result = next(plan)
            if requests is not None and index >= requests:
                break
            client.send_request(prompt, result)
            with lock:
                done.append(result)
                if on_done is not None:
                    on_done(result)
        client.close()

    _run_clients(run_client, concurrency, stop)
    return done


def _run_clients(run_client: Callable[[], None], concurrency: int, stop: threading.Event) -> None:
    """Runs that many clients; the first exception of a client stops all, and is raised."""
    with ThreadPoolExecutor(concurrency, thread_name_prefix="client") as clients:
        running = [clients.submit(run_client) for _ in range(concurrency)]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
    for client in running:
        client.result()


def _generate_requests(
    prompt_lengths: Sequence[int], output_lengths: Sequence[int], seed: int, traceparent: bool
) -> Iterator[tuple[int, str, RequestResult]]:
    """Yields requests without end: the index, the prompt, and an empty result."""
    generator, index = random.Random(seed), 0
    while True:
        words, tokens = generator.choice(prompt_lengths), generator.choice(output_lengths)
        prompt = " ".join(generator.choices(WORDS, k=words))
        yield index, prompt, RequestResult(words, tokens, secrets.token_hex(16) if traceparent else None)
        index += 1


class _ChatClient:
    """A client with one connection, kept alive over its requests as in a browser or SDK."""

    def __init__(self, base_url: str, model: str, timeout_s: float, stop: threading.Event) -> None:
        url = urlsplit(base_url)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(url.hostname or "127.0.0.1", url.port, timeout=timeout_s)
        self._path = url.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        self._model = model
        self._stop = stop

    def send_request(self, prompt: str, result: RequestResult) -> None:
        """Sends one request, reads its response to the end and records it in `result`."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": result.max_tokens,
            "temperature": 1.0,
            "stream": True,
        }
        headers = {"content-type": "application/json", "accept": "text/event-stream"}
        if result.trace_id is not None:
            headers["traceparent"] = f"00-{result.trace_id}-{secrets.token_hex(8)}-01"
        payload = json.dumps(body).encode()
        result.started_unix_ns, result.started_at = time.time_ns(), time.perf_counter_ns()
        try:
            self._connection.request("POST", self._path, payload, headers)
            self._read_stream(self._connection.getresponse(), result)
        except (OSError, http.client.HTTPException, ValueError) as error:
            result.error = f"{type(error).__name__}: {error}"
            self._connection.close()
        result.ended_at = time.perf_counter_ns()

    def _read_stream(self, response: http.client.HTTPResponse, result: RequestResult) -> None:
        result.status = response.status
        if response.status != 200:
            result.error = f"HTTP {response.status}: {response.read()[:200].decode(errors='replace')}"
            return
        finished = False
        while line := response.readline():
            arrived_at = time.perf_counter_ns()
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                finished = True
                continue
            event = json.loads(data)
            if "error" in event:
                result.error = f"error event: {str(event['error'])[:200]}"
            for choice in event.get("choices", ()):
                finished |= choice.get("finish_reason") is not None
                if choice.get("delta", {}).get("content"):
                    result.content_at.append(arrived_at)
            if self._stop.is_set():
                raise OSError("the load was stopped")
        if not finished and result.error is None:
            result.error = "the stream ended early"

    def close(self) -> None:
        self._connection.close()
