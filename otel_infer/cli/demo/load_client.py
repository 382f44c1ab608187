"""A load client for an OpenAI-compatible server that shares no code with the rest of us.

What it times on its own sockets is the truth our spans are compared with, so nothing here may come from otel_infer.
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
    """One request as its client saw it. `_at` are `time.perf_counter_ns()` instants, `_ns` lengths."""

    prompt_words: int
    max_tokens: int
    trace_id: str | None
    """32 hex digits of the `traceparent` sent; None when none was."""
    started_at: int = 0
    """Just before the request is written."""
    started_unix_ns: int = 0
    """The same instant on the wall clock."""
    content_at: list[int] = field(default_factory=list)
    """When each event that carried text arrived; an event with only a role is not among them."""
    ended_at: int = 0
    """End of the response body, or when the request failed."""
    status: int = 0
    """HTTP status; 0 when no answer came."""
    error: str | None = None

    @property
    def ttft_ns(self) -> int | None:
        """Time to the first text; None when none came."""
        return self.content_at[0] - self.started_at if self.content_at else None

    @property
    def gaps_ns(self) -> list[int]:
        """Time between one text event and the next."""
        return [later - sooner for sooner, later in zip(self.content_at, self.content_at[1:], strict=False)]

    @property
    def e2e_ns(self) -> int:
        """From start to the end of the response."""
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
    """Stream chat completions from `concurrency` clients at once; return every request in the order they ended.

    Stops after `requests`, or starts no more after `seconds`, whichever comes first; one of them is given. Prompts are so
    many words and answers so many tokens, drawn per request from the two lists: one `seed` is one sequence of requests,
    whatever the timing. `on_done` is called once per request, never twice at a time. `timeout_s` bounds one socket wait.
    A request that fails is an Observed with an error, never an exception; what `on_done` raises ends the drive.
    """
    if requests is None and seconds is None:
        raise ValueError("give requests, seconds or both: nothing would end the drive")
    plan = _generate_requests(prompt_lengths, output_lengths, seed, traceparent)
    deadline = None if seconds is None else time.perf_counter() + seconds
    turn, stop, done = threading.Lock(), threading.Event(), list[RequestResult]()

    def run_client() -> None:
        client = _ChatClient(base_url, model, timeout_s, stop)
        while not stop.is_set() and (deadline is None or time.perf_counter() < deadline):
            with turn:
                index, prompt, observed = next(plan)
            if requests is not None and index >= requests:
                break
            client.send_request(prompt, observed)
            with turn:
                done.append(observed)
                if on_done is not None:
                    on_done(observed)
        client.close()

    with ThreadPoolExecutor(concurrency, thread_name_prefix="client") as clients:
        running = [clients.submit(run_client) for _ in range(concurrency)]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
    for client in running:
        client.result()
    return done


def _generate_requests(
    prompt_lengths: Sequence[int], output_lengths: Sequence[int], seed: int, traceparent: bool
) -> Iterator[tuple[int, str, RequestResult]]:
    """Requests without end: index, prompt, and what is known of it before it starts."""
    chance, index = random.Random(seed), 0
    while True:
        words, tokens = chance.choice(prompt_lengths), chance.choice(output_lengths)
        prompt = " ".join(chance.choices(WORDS, k=words))
        yield index, prompt, RequestResult(words, tokens, secrets.token_hex(16) if traceparent else None)
        index += 1


class _ChatClient:
    """One connection, kept alive over its requests as a browser or SDK keeps it."""

    def __init__(self, base_url: str, model: str, timeout_s: float, stop: threading.Event) -> None:
        url = urlsplit(base_url)
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(url.hostname or "127.0.0.1", url.port, timeout=timeout_s)
        self._path = url.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        self._model = model
        self._stop = stop

    def send_request(self, prompt: str, observed: RequestResult) -> None:
        """Send one request and read its answer to the end into `observed`."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": observed.max_tokens,
            "temperature": 1.0,
            "stream": True,
        }
        headers = {"content-type": "application/json", "accept": "text/event-stream"}
        if observed.trace_id is not None:
            headers["traceparent"] = f"00-{observed.trace_id}-{secrets.token_hex(8)}-01"
        payload = json.dumps(body).encode()
        observed.started_unix_ns, observed.started_at = time.time_ns(), time.perf_counter_ns()
        try:
            self._connection.request("POST", self._path, payload, headers)
            self._read_stream(self._connection.getresponse(), observed)
        except (OSError, http.client.HTTPException, ValueError) as error:
            observed.error = f"{type(error).__name__}: {error}"
            self._connection.close()
        observed.ended_at = time.perf_counter_ns()

    def _read_stream(self, response: http.client.HTTPResponse, observed: RequestResult) -> None:
        observed.status = response.status
        if response.status != 200:
            observed.error = f"HTTP {response.status}: {response.read()[:200].decode(errors='replace')}"
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
                observed.error = f"error event: {str(event['error'])[:200]}"
            for choice in event.get("choices", ()):
                finished |= choice.get("finish_reason") is not None
                if choice.get("delta", {}).get("content"):
                    observed.content_at.append(arrived_at)
            if self._stop.is_set():
                raise OSError("stopped by the one who drives")
        if not finished and observed.error is None:
            observed.error = "the stream broke off before its end"

    def close(self) -> None:
        self._connection.close()
