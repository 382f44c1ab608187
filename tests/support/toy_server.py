"""An inference server without a model, for failure tests: it starts in half a second and decodes by sleeping.

    python tests/support/toy_server.py PORT          serves until it is killed

A loop of its own, instrumented by hand, batches requests. Other actions (fork, spawn, …) are requested over HTTP.
`Toy` is the test's side of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import http.client
import json
import multiprocessing
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from opentelemetry import trace

import otel_infer
from otel_infer.cli.demo.free_port import find_free_port

MARK = "TOY_SERVER_MARK"
SIDECAR = b"otel_infer-sidecar"
RUN = (sys.executable, "-m", "otel_infer", "run", "--")

# ── the server ───────────────────────────────────────────────────────────────────────────────────────────────────


class Job:
    """One request as the loop sees it."""

    def __init__(self, request: otel_infer.request, tokens: int) -> None:
        self.request, self.left = request, tokens
        self.done = threading.Event()


class Loop(threading.Thread):
    """Batches the waiting requests; every step takes `step_s`."""

    def __init__(self, step_s: float) -> None:
        super().__init__(daemon=True)
        self.waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.step_s = step_s

    def run(self) -> None:
        batch: list[Job] = []
        while True:
            new = [self.waiting.get()] if not batch else []
            while not self.waiting.empty():
                new.append(self.waiting.get())
            batch += new
            requests = [job.request for job in batch]
            prompts = {job.request: 8 for job in new}
            with otel_infer.step(requests, prompt_tokens=prompts, waiting=self.waiting.qsize()):
                time.sleep(self.step_s)
            for job in batch:
                job.left -= 1
            for job in [job for job in batch if job.left <= 0]:
                batch.remove(job)
                job.request.finished("length")
                job.done.set()


def serve_request(loop: Loop | None, headers: dict[str, str], body: dict[str, Any]) -> dict[str, Any]:
    """Serves one request; without a loop (a forked child) it runs its own steps."""
    tokens = int(body.get("tokens", 3))
    with otel_infer.request("chat", model="toy", headers=headers) as request:
        with otel_infer.stage("tokenize"):
            prompt = str(body.get("prompt", ""))
        if body.get("fail"):
            raise ValueError(body["fail"])
        if body.get("abort"):
            raise asyncio.CancelledError
        request.submitted(input_tokens=8, max_tokens=tokens)
        if body.get("fork"):
            child = fork(body["fork"])
            request.set_attribute("process_role", "parent")
            return {"pid": os.getpid(), "child": child}
        if loop is None:
            request.set_attribute("process_role", "child")
            for _ in range(tokens):
                with otel_infer.step([request]):
                    time.sleep(0.001)
        else:
            job = Job(request, tokens)
            loop.waiting.put(job)
            job.done.wait()
    return {"pid": os.getpid(), "text": prompt[:1] * tokens}


def fork(body: dict[str, Any]) -> int:
    """Forks a child during a request; the child records events of its own and an attribute on its parent's span."""
    child = os.fork()
    if child:
        return child
    status = 1
    faulthandler.dump_traceback_later(20.0)  # shows where a child hangs
    try:
        if "uid" in body:
            os.setgid(body["uid"])
            os.setuid(body["uid"])
        trace.get_current_span().set_attribute("process_role", "the child, of its parent")
        for _ in range(body["requests"]):
            serve_request(None, {}, {"tokens": 3})
        otel_infer.flush(20.0)
        status = 0
    finally:
        os._exit(status)


def serve_in_new_process(headers: dict[str, str]) -> None:
    """Runs in a spawned process."""
    otel_infer.instrument()
    serve_request(None, headers, {"tokens": 3})


def spawn(body: dict[str, Any]) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=serve_in_new_process, args=(body["headers"],))
    process.start()
    process.join(20)
    return {"child": process.pid, "status": process.exitcode}


def state(body: dict[str, Any]) -> dict[str, Any]:
    """Returns the server's own state."""
    from otel_infer._bootstrap.install import installation
    from otel_infer.ringbuffer.recorder import recorder

    return {
        "pid": os.getpid(),
        "folder": str(installation.folder or ""),
        "active": recorder.active,
        "arena": type(recorder.arena).__name__,
        "threads": sorted(thread.name for thread in threading.enumerate()),
    }


def reinstrument(body: dict[str, Any]) -> dict[str, Any]:
    """Instruments again, as a notebook's first cell does when it runs again."""
    otel_infer.uninstrument()
    return {"instrumented": otel_infer.instrument()}


def flush(body: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    return {"flushed": otel_infer.flush(body["timeout"]), "seconds": time.monotonic() - began}


ACTIONS = {"/state": state, "/spawn": spawn, "/reinstrument": reinstrument, "/flush": flush}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    loop: Loop

    def do_POST(self) -> None:
        path = self.path.partition("?")[0]
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        try:
            if path in ACTIONS:
                return self.respond(200, ACTIONS[path](body))
            headers = {name.lower(): value for name, value in self.headers.items()}
            self.respond(200, serve_request(self.loop, headers, body))
        except (Exception, asyncio.CancelledError) as broken:
            self.respond(500, {"error": str(broken)})

    def do_GET(self) -> None:
        self.respond(200, {"pid": os.getpid()})

    def respond(self, status: int, answered: dict[str, Any]) -> None:
        content = json.dumps(answered).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""


def main() -> None:
    otel_infer.instrument()
    Handler.loop = Loop(float(os.environ.get("TOY_STEP_S", "0.01")))
    Handler.loop.start()
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    server.daemon_threads = True
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever(0.02)


# ── the test's side ──────────────────────────────────────────────────────────────────────────────────────────────


class Reply(NamedTuple):
    """A client's response and its trace. `status` 0: the connection broke."""

    status: int
    trace_id: str
    parent_id: str
    seconds: float
    body: dict[str, Any]


def processes(mark: str) -> dict[int, bytes]:
    """Returns the living processes with this mark in their environment, with their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes()
    return found


def wait_until(reached: Any, timeout: float = 15.0, every: float = 0.02) -> Any:
    """Returns the value of `reached()` once it is true; fails after `timeout` s."""
    deadline = time.monotonic() + timeout
    while not (result := reached()):
        assert time.monotonic() < deadline, "never happened"
        time.sleep(every)
    return result


def traceparent(flags: str | None = "01") -> tuple[str, str, dict[str, str]]:
    """Returns trace id, span id, and the `traceparent` header with these flags (None: no header)."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    headers = {"traceparent": f"00-{trace_id}-{span_id}-{flags}"} if flags is not None else {}
    return trace_id, span_id, headers


class Toy:
    """A toy server in marked processes, so that each of them can be found and ended."""

    def __init__(self, log: Path, environ: Mapping[str, str], launcher: Sequence[str] = ()) -> None:
        self.port, self.log, self.mark = find_free_port(), log, secrets.token_hex(8)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
        self.environ = {**kept, "OTEL_METRIC_EXPORT_INTERVAL": "300", **environ, MARK: self.mark}
        self.command = [*launcher, sys.executable, str(Path(__file__).resolve()), str(self.port)]
        self.process: subprocess.Popen[bytes] | None = None
        self.folder: Path | None = None

    def start(self, timeout: float = 30.0, **options: Any) -> Toy:
        """Starts it and waits until it responds."""
        options = {"start_new_session": True, "stdin": subprocess.DEVNULL, **options}
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.command, stdout=output, stderr=output, env=self.environ, **options
            )
        self.wait_until_ready(timeout)
        return self

    def wait_until_ready(self, timeout: float = 30.0) -> None:
        """Waits until it responds; an error contains its output."""
        deadline = time.monotonic() + timeout
        while self.post("/state").status != 200:
            assert self.process is None or self.process.poll() is None, f"it exited:\n{self.read_log()}"
            assert time.monotonic() < deadline, f"it was not ready in time:\n{self.read_log()}"
            time.sleep(0.02)

    def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout: float = 30.0,
        flags: str | None = "01",
    ) -> Reply:
        """Sends one request with a `traceparent` of its own, with these flags (None: without one)."""
        trace_id, parent_id, headers = traceparent(flags)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        began = time.perf_counter()
        status, answered = 0, {}
        try:
            connection.request("POST", path, json.dumps(body or {}), headers)
            response = connection.getresponse()
            status, answered = response.status, json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError):
            pass
        finally:
            connection.close()
        return Reply(status, trace_id, parent_id, time.perf_counter() - began, answered)

    def chat(self, tokens: int = 3, flags: str | None = "01", **body: Any) -> Reply:
        return self.post("/chat", {"tokens": tokens, **body}, flags=flags)

    def state(self) -> dict[str, Any]:
        """Returns the server's state; remembers its folder for checks after it ended."""
        known = self.post("/state").body
        if known.get("folder"):
            self.folder = Path(known["folder"])
        return known

    @contextlib.contextmanager
    def load(self, threads: int = 4, tokens: int = 5) -> Iterator[list[Reply]]:
        """Sends requests from `threads` clients as long as the block lasts; yields their replies."""
        replies: list[Reply] = []
        over = threading.Event()

        def drive() -> None:
            while not over.is_set():
                replies.append(self.chat(tokens))
                if replies[-1].status == 0:
                    time.sleep(0.01)

        clients = [threading.Thread(target=drive, daemon=True) for _ in range(threads)]
        for client in clients:
            client.start()
        try:
            yield replies
        finally:
            over.set()
            for client in clients:
                client.join(30)

    def sidecars(self) -> list[int]:
        return [pid for pid, command in processes(self.mark).items() if SIDECAR in command]

    def sidecar(self) -> int:
        """Waits for the single sidecar; returns its process id."""
        (pid,) = wait_until(self.sidecars)
        return int(pid)

    def read_log(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal to the serving process, not to its launcher."""
        os.kill(self.state()["pid"], number)

    def wait(self, timeout: float = 20.0) -> int:
        """Waits for the started process and its sidecar; returns the exit status."""
        assert self.process is not None
        status = self.process.wait(timeout)
        wait_until(lambda: not processes(self.mark), timeout)
        return status

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stops it with a signal; returns its exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.wait()

    def __enter__(self) -> Toy:
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Ends all of its processes."""
        for pid in processes(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait(10)
        if self.folder is not None and self.folder.is_dir():
            for path in self.folder.iterdir():
                path.unlink(missing_ok=True)
            self.folder.rmdir()


if __name__ == "__main__":
    main()
