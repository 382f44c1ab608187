"""Real servers for tests: `transformers serve` on a tiny model, under `otel-infer run` or another launcher."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from otel_infer.cli.demo.free_port import find_free_port as free_port

RUN = (sys.executable, "-m", "otel_infer", "run", "--")
BATCHING = (
    "--continuous-batching",
    *"--cb-num-blocks 64 --cb-block-size 32 --cb-max-batch-tokens 256".split(),
)


class ChatResponse(NamedTuple):
    """A client's response: `chunks` of text and their arrival (perf_counter_ns)."""

    status: int
    trace_id: str
    parent_id: str
    chunks: list[str]
    at: list[int]
    sent_at: int
    done_at: int
    body: dict[str, Any]


class Server:
    """A server process on its own port; `path` is polled until it responds."""

    def __init__(
        self, command: Sequence[str], port: int, log: Path, environ: Mapping[str, str], path: str = "/health"
    ) -> None:
        self.port, self.log, self._path = port, log, path
        kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
        self._environ = {**kept, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environ}
        self._command = list(command)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, timeout: float = 90.0) -> Server:
        """Starts it and waits until it responds; an error contains its output."""
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(self._command, stdout=output, stderr=output, env=self._environ)
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.read_log()}")
            if self.responds():
                return self
            time.sleep(0.1)
        self.stop(signal.SIGKILL)
        raise RuntimeError(f"the server was not ready in time:\n{self.read_log()}")

    def responds(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        try:
            connection.request("GET", self._path)
            return connection.getresponse().status < 500
        except OSError:
            return False
        finally:
            connection.close()

    def stop(self, number: int = signal.SIGTERM, timeout: float = 30.0) -> int:
        """Stops it with a repeated signal, because `transformers serve` hangs on the first; returns its exit status."""
        assert self.process is not None
        deadline = time.monotonic() + timeout
        while self.process.poll() is None:
            self.process.send_signal(number if time.monotonic() < deadline else signal.SIGKILL)
            try:
                self.process.wait(1.5)
            except subprocess.TimeoutExpired:
                continue
        return self.process.returncode

    def read_log(self) -> str:
        return self.log.read_text(errors="replace")[-6000:] if self.log.exists() else ""

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.stop()


def transformers_serve(
    model: Path, log: Path, environ: Mapping[str, str], *, batching: bool, launcher: Sequence[str] = RUN
) -> Server:
    """Returns `transformers serve MODEL` behind a launcher."""
    beside = Path(sys.executable).parent / "transformers"
    program = str(beside) if beside.exists() else str(shutil.which("transformers"))
    port = free_port()
    options = (
        f"--host 127.0.0.1 --port {port} --device cpu --dtype float32 --attn-implementation sdpa".split()
    )
    command = [*launcher, program, "serve", str(model), *options, *(BATCHING if batching else ())]
    return Server(command, port, log, environ)


def chat(
    port: int, model: Path, *, tokens: int = 8, words: int = 8, stream: bool = True, flags: str = "01"
) -> ChatResponse:
    """Sends one chat completion with a `traceparent` of its own."""
    trace_id, parent_id = secrets.token_hex(16), secrets.token_hex(8)
    body = {
        "model": str(model),
        "messages": [{"role": "user", "content": " ".join(["time"] * words)}],
        "max_tokens": tokens,
        "stream": stream,
    }
    headers = {"content-type": "application/json", "traceparent": f"00-{trace_id}-{parent_id}-{flags}"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    chunks: list[str] = []
    at: list[int] = []
    answer: dict[str, Any] = {}
    sent_at = time.perf_counter_ns()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if stream and response.status == 200:
        while line := response.readline():
            if line.startswith(b"data:") and b"[DONE]" not in line:
                for choice in json.loads(line[5:]).get("choices", ()):
                    if choice.get("delta", {}).get("content"):
                        chunks.append(choice["delta"]["content"])
                        at.append(time.perf_counter_ns())
    else:
        answer = json.loads(response.read() or b"{}")
    connection.close()
    return ChatResponse(
        response.status, trace_id, parent_id, chunks, at, sent_at, time.perf_counter_ns(), answer
    )
