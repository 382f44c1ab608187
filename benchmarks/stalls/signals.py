"""Sends signals into servers under load, and checks that no request fails.

    python -m benchmarks.stalls.signals [--signals 10000] [--servers NAME …]

The servers are those of the battery. Exit status 1 if a request failed, or a server ended.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from benchmarks.battery.draw import READY_S, ROOT, VARIABLES, make_load, make_model
from benchmarks.battery.load import draw_requests
from benchmarks.battery.servers import SERVERS, Server
from otel_infer import _clock
from otel_infer.cli.demo.command import wait_until_healthy
from otel_infer.cli.demo.free_port import find_free_port
from otel_infer.ringbuffer import directory
from otel_infer.ringbuffer.merged_reader import MergedReader
from otel_infer.sidecar.probes.stalls.stack_dump import StackDump

PAUSE_S, MAX_S = 0.001, 540.0
BATCH = 40
"""Requests that are drawn at a time."""


class Outcome(NamedTuple):
    """Signals that were sent, dumps that were read, requests that ended, and why some failed, then the end of the log."""

    signals: int
    dumps: int
    requests: int
    failed: list[str]


def send_signals_under_load(
    folder: Path,
    command: Sequence[str],
    send: Callable[[int], list[str]],
    count: int,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Outcome:
    """Starts a server, and signals its processes while `send` sends requests until all signals are sent.

    `command`: the server's, with `{port}`. `send`: sends some requests to this port, and returns how each ended: "" is
    well.
    """
    rings, port = directory.create_server_folder(token=f"signals-{folder.name}"), find_free_port()
    run = [sys.executable, "-m", "otel_infer", "run", "--tape", str(folder / "server.tape"), "--"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    environ = {**kept, "PYTHONPATH": str(ROOT), "OTEL_INFER_RINGS": str(rings), **VARIABLES, **variables}
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [*run, *(part.replace("{port}", str(port)) for part in command)],
            env=environ,
            stdout=log,
            stderr=log,
        )
    try:
        if not wait_until_healthy(f"http://127.0.0.1:{port}", lambda: process.poll() is None, READY_S):
            raise RuntimeError(f"the server did not start: {(folder / 'server.log').read_text()[-2000:]}")
        ended = send(port)
        with _signals(rings, count) as sent:
            while sent.is_running and process.poll() is None:
                ended += send(port)
        if process.poll() is None:
            ended += send(port)
        if process.poll() is not None:
            ended.append(f"the server ended with status {process.returncode}")
    finally:
        process.terminate()
        process.wait(60)
    failed = [reason for reason in ended if reason]
    if failed:
        failed.append((folder / "server.log").read_text()[-2000:])
    return Outcome(sent.signals, sent.dumps, len(ended), failed)


class _Sender(threading.Thread):
    """Sends signals to each thread of each process of a server in turn."""

    def __init__(self, rings: Path, count: int) -> None:
        super().__init__()
        self.count, self.signals, self.dumps, self.is_running = count, 0, 0, True
        self._reader = MergedReader()
        self._reader.discover_rings(rings, _clock.now())

    def run(self) -> None:
        dumps = [StackDump(process) for process in self._reader.processes]
        until = time.monotonic() + MAX_S
        while self.is_running and self.signals < self.count and time.monotonic() < until:
            for dump in dumps:
                dump.find_thread(1)  # opens the process
                for thread in dump.list_threads():
                    self.dumps += bool(dump.read_stack(thread))
                time.sleep(PAUSE_S)
            self.signals = sum(dump.signals for dump in dumps)
        self.is_running = False
        for dump in dumps:
            dump.close()


@contextmanager
def _signals(rings: Path, count: int) -> Iterator[_Sender]:
    sender = _Sender(rings, count)
    sender.start()
    try:
        yield sender
    finally:
        sender.is_running = False
        sender.join()


def signal_battery_server(server: Server, folder: Path, count: int) -> Outcome:
    """Signals a server of the battery under its usual load."""
    model = make_model(server, folder)
    rng = random.Random(0)

    def send(port: int) -> list[str]:
        requests = draw_requests(rng, BATCH / server.rate / 2, server.rate * 2, server.tokens)
        answers = make_load(server, port, model, requests).run()
        return ["" if answer.status == 200 else f"status {answer.status}" for answer in answers]

    values = {"{model}": str(model), "{mistakes}": "{}"}
    return send_signals_under_load(
        folder, [values.get(part, part) for part in server.command], send, count, server.variables
    )


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stalls.signals", description=__doc__)
    parser.add_argument("--signals", type=int, default=10_000)
    parser.add_argument("--servers", nargs="*", default=list(SERVERS), choices=list(SERVERS))
    arguments = parser.parse_args()
    failed = 0
    for name in arguments.servers:
        if not SERVERS[name].can_run:
            print(f"{name}: cannot run in this environment")
            continue
        with tempfile.TemporaryDirectory() as folder:
            outcome = signal_battery_server(SERVERS[name], Path(folder), arguments.signals)
        print(
            f"{name}: {outcome.signals} signals, {outcome.dumps} dumps, {outcome.requests} requests, {len(outcome.failed)} failed "
            f"{', '.join(sorted(set(outcome.failed)))}",
            flush=True,
        )
        failed += len(outcome.failed) + (outcome.signals < arguments.signals)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
