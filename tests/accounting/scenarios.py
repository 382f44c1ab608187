"""Faults in which every request must be accounted for, and the comparison with what arrived."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from otel_infer import semconv
from otel_infer.sidecar.launcher import PROCESS_NAME
from tests.support.otlp_receiver import Answer, OtlpReceiver, slow, status
from tests.support.served import RUN, Server, free_port

SERVER = Path(__file__).with_name("streaming_server.py")
ENDLESS = Path(__file__).with_name("endless_requests.py")
TOKENS = 4
SETTLE_S = 60.0


class Size(NamedTuple):
    """How large a scenario is: seconds of a fault, kills, streams at a time, requests that never end."""

    stop_s: float
    kills: int
    streams: int
    endless: int


QUICK, FULL = Size(4, 5, 300, 6_000), Size(60, 20, 2_000, 50_000)


class Outcome(NamedTuple):
    """`offered`: by the client. `received`: distinct traces at the receiver. `counts`: what we report, by metric."""

    offered: int
    received: int
    counts: dict[str, int]

    def check(self) -> None:
        """Asserts that every request is accounted for, and exported ones are those that arrived."""
        counted = dict(self.counts)
        offered = counted.pop("offered")
        assert offered == self.offered, self
        assert sum(counted.values()) == offered, self
        assert counted.get("open", 0) == 0, self
        unconfirmed = counted.get("unconfirmed", 0) + counted.get("sidecar_ended", 0)
        exported = counted.get("exported", 0)
        assert exported <= self.received <= exported + unconfirmed, self


class Load:
    """A client that keeps `streams` requests in flight until it is stopped, or sends `total` of them."""

    def __init__(self, port: int, streams: int, total: int = 0, pause: float = 0.001) -> None:
        self.offered = self.completed = 0
        self._port, self._streams, self._total, self._pause = port, streams, total, pause
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(120)

    def wait(self) -> None:
        """Waits until all requests are done."""
        self._thread.join(300)

    async def _run(self) -> None:
        await asyncio.gather(*(self._repeat() for _ in range(self._streams)))

    async def _repeat(self) -> None:
        while not self._stopping.is_set() and not (self._total and self.offered >= self._total):
            self.offered += 1
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            path = f"/generate?tokens={TOKENS}&pause={self._pause}"
            writer.write(
                f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello".encode()
            )
            answer = await reader.read(-1)
            self.completed += answer.startswith(b"HTTP/1.1 200")
            writer.close()


def find_sidecar(pid: int) -> psutil.Process | None:
    """Returns the running sidecar below this process."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if PROCESS_NAME in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                    return child
    return None


def count_request_traces(receiver: OtlpReceiver) -> int:
    """Returns the number of distinct traces of requests; a server's start is a trace of its own."""
    spans = receiver.spans
    starts = {span["trace_id"] for span in spans if span["name"] == semconv.SPAN_SERVER_START}
    return len({span["trace_id"] for span in spans} - starts)


def read_counts(metrics: OtlpReceiver) -> dict[str, int]:
    """Returns the latest counts of requests that arrived as metrics, by result or reason."""
    latest: dict[str, int] = {}
    for metric in metrics.metrics:
        if metric["name"] == "infer.self.requests.offered":
            latest["offered"] = round(metric["points"][-1]["value"])
        elif metric["name"] == "infer.self.requests.open":
            latest["open"] = round(metric["points"][-1]["value"])
        elif metric["name"] in ("infer.self.requests", "infer.self.requests.lost"):
            for point in metric["points"]:
                (label,) = point["attributes"].values()
                latest[label] = round(point["value"])
    return latest


class Bench:
    """A server under `otel-infer run` whose spans go to one receiver and whose metrics go to another."""

    def __init__(self, folder: Path, traces: str = "", rings: str = "") -> None:
        self.spans, self.metrics = OtlpReceiver(), OtlpReceiver()
        self.environ = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.metrics.endpoint,
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{traces or self.spans.endpoint}/v1/traces",
            "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "2",
            "OTEL_METRIC_EXPORT_INTERVAL": "500",
            "OTEL_INFER_LOG": str(folder / "sidecar.log"),
            **({"OTEL_INFER_RINGS": rings} if rings else {}),
        }
        port = free_port()
        self.server = Server(
            [*RUN, sys.executable, str(SERVER), str(port)], port, folder / "log", self.environ
        )

    def __enter__(self) -> Bench:
        self.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()
        self.spans.close()
        self.metrics.close()

    def sidecar(self) -> psutil.Process:
        """Returns the running sidecar; waits for it."""
        assert self.server.process is not None
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            found = find_sidecar(self.server.process.pid)
            if found is not None:
                return found
            time.sleep(0.05)
        raise AssertionError("no sidecar")

    def finish(self, load: Load) -> Outcome:
        """Stops the server, and compares what was offered with what arrived and what was counted."""
        assert self.server.process is not None
        self.server.process.terminate()  # once: a second signal asks `otel-infer run` to skip the flush
        self.server.process.wait(SETTLE_S)
        return Outcome(load.offered, count_request_traces(self.spans), read_counts(self.metrics))


# ── scenarios ────────────────────────────────────────────────────────────────────────────────────────────────────


def run_calm(folder: Path, size: Size) -> Outcome:
    with Bench(folder) as bench:
        with Load(bench.server.port, 8) as load:
            time.sleep(2)
        return bench.finish(load)


def run_sidecar_stopped(folder: Path, size: Size) -> Outcome:
    """The sidecar gets no CPU for a while, and the rings are overwritten many times."""
    with Bench(folder) as bench:
        with Load(bench.server.port, 16) as load:
            time.sleep(1.5)
            sidecar = bench.sidecar()
            sidecar.send_signal(signal.SIGSTOP)
            time.sleep(size.stop_s)
            sidecar.send_signal(signal.SIGCONT)
            time.sleep(1.5)
        return bench.finish(load)


def run_sidecar_killed(folder: Path, size: Size) -> Outcome:
    """The sidecar is killed again and again, sometimes while it starts."""
    with Bench(folder) as bench:
        with Load(bench.server.port, 8) as load:
            for kill in range(size.kills):
                time.sleep(0.2 + 0.37 * (kill % 6))
                bench.sidecar().kill()
                time.sleep(0.2)
        return bench.finish(load)


def run_with_answer(answer: Answer) -> Callable[[Path, Size], Outcome]:
    def run(folder: Path, size: Size) -> Outcome:
        with Bench(folder) as bench:
            with Load(bench.server.port, 8) as load:
                time.sleep(2)
                bench.spans.answer(answer)
                time.sleep(size.stop_s)
                bench.spans.answer(Answer())
                time.sleep(2)
            return bench.finish(load)

    return run


def run_collector_gone(folder: Path, size: Size) -> Outcome:
    with Bench(folder) as bench:
        with Load(bench.server.port, 8) as load:
            time.sleep(1)
            bench.spans.refuse()
            time.sleep(size.stop_s)
            bench.spans.listen()
            time.sleep(1)
        return bench.finish(load)


def run_collector_hanging(folder: Path, size: Size) -> Outcome:
    """Connections are accepted and never answered, until the end."""
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        address = f"http://127.0.0.1:{hanging.getsockname()[1]}"
        with Bench(folder, traces=address) as bench:
            with Load(bench.server.port, 8) as load:
                time.sleep(size.stop_s)
            return bench.finish(load)


def run_collector_talking_garbage(folder: Path, size: Size) -> Outcome:
    """What it answers is no HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as garbling:
        thread = threading.Thread(target=_answer_garbage, args=(garbling,), daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{garbling.getsockname()[1]}"
        with Bench(folder, traces=address) as bench:
            with Load(bench.server.port, 8) as load:
                time.sleep(size.stop_s)
            return bench.finish(load)


def _answer_garbage(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                connection.sendall(os.urandom(64) + b"\r\n\r\n")


def run_many_streams(folder: Path, size: Size) -> Outcome:
    with Bench(folder) as bench, Load(bench.server.port, size.streams, 2 * size.streams, 0.2) as load:
        load.wait()
        return bench.finish(load)


def run_shared_memory_full(folder: Path, size: Size) -> Outcome:
    """Each process exports by itself, since there is no room for rings. Only root can mount a small tmpfs."""
    small = folder / "small"
    small.mkdir()
    with mount_tmpfs(small, 128 << 10), Bench(folder, rings=str(small / "rings")) as bench:
        with Load(bench.server.port, 8) as load:
            time.sleep(2)
        return bench.finish(load)


@contextlib.contextmanager
def mount_tmpfs(folder: Path, size: int) -> Iterator[None]:
    """Mounts a tmpfs of this size (bytes); raises `PermissionError` where that is not allowed."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        raise PermissionError("a tmpfs cannot be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def run_endless_requests(folder: Path, size: Size) -> Outcome:
    """Requests that never end fill the table; their process ends with them in flight."""
    with OtlpReceiver() as spans, OtlpReceiver() as metrics:
        environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("OTEL_")},
            "OTEL_EXPORTER_OTLP_ENDPOINT": metrics.endpoint,
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{spans.endpoint}/v1/traces",
        }
        command = [*RUN, sys.executable, str(ENDLESS), str(size.endless)]
        subprocess.run(command, env=environ, check=True, timeout=120, stdout=subprocess.DEVNULL)
        return Outcome(size.endless, count_request_traces(spans), read_counts(metrics))


SCENARIOS: Mapping[str, Callable[[Path, Size], Outcome]] = {
    "calm": run_calm,
    "sidecar stopped": run_sidecar_stopped,
    "sidecar killed": run_sidecar_killed,
    "collector slow": run_with_answer(slow(4.0)),
    "collector refusing": run_with_answer(status(400)),
    "collector overloaded": run_with_answer(status(503)),
    "collector gone": run_collector_gone,
    "collector hanging": run_collector_hanging,
    "collector talking garbage": run_collector_talking_garbage,
    "collector answering a web page": run_with_answer(Answer(body=b"<html>hello</html>")),
    "many streams": run_many_streams,
    "shared memory full": run_shared_memory_full,
    "endless requests": run_endless_requests,
}
