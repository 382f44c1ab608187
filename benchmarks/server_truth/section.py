"""The rows of the section: client against trace under load, and 50 ms that are added to each stage."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.battery.draw import ROOT, VARIABLES, stop_server
from benchmarks.server_truth.client import send_requests
from benchmarks.server_truth.servers import SERVERS, TruthServer, list_names
from benchmarks.truth import Lateness, compare_percentile
from benchmarks.verdict import Gate, Line, load_lines, make_exact, make_line
from otel_infer.assembly.assembler import Assembler
from otel_infer.assembly.records.request import RequestRecord
from otel_infer.cli.demo.free_port import find_free_port
from otel_infer.cli.replay import read_records
from tests.servers.leftovers import MARKER, kill_leftovers, wait_for_sidecars
from tests.servers.ray_check import UNSHARE

REQUESTS, PARTS, PAUSE_S = 320, 4, 2.0
"""Of a part; parts, and the pause after each: clients and server leave no core idle to the sidecar."""
DELAYED_REQUESTS = 20
DELAY_MS, TOLERANCE_MS = 50.0, 5.0
READY_S = 60.0
ISOLATED = "SERVER_TRUTH_IS_ISOLATED"
"""The environment variable in a network namespace."""


def measure(quick: bool, servers: list[str]) -> list[Line]:
    """Returns the rows of these servers; of all that can run here, if none is named."""
    lines: list[Line] = []
    for name in servers or list_names():
        print(f"  {name} …", file=sys.stderr, flush=True)
        if SERVERS[name].is_isolated and ISOLATED not in os.environ:
            lines += _measure_isolated(quick, name)
            continue
        lines += _compare_latencies(SERVERS[name], 64 if quick else REQUESTS)
        lines += _compare_stages(SERVERS[name], 5 if quick else DELAYED_REQUESTS)
    return lines


def _measure_isolated(quick: bool, name: str) -> list[Line]:
    """Returns the rows of a server, which runs with its client in a network namespace."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lines.json"
        section = ["--section", "server_truth", "--servers", name, "--json", str(path), *["--quick"] * quick]
        command = [*UNSHARE, sys.executable, "-m", "benchmarks", *section]
        subprocess.run(command, env={**os.environ, ISOLATED: "1"}, check=True)
        return load_lines(path)


def _serve(
    server: TruthServer, requests: int, concurrency: int, parts: int = 1, **variables: str
) -> tuple[dict[str, float], list[RequestRecord], Lateness]:
    """Runs a server and sends it requests. Returns their latencies in ms by trace id, their records, and the client's lateness."""
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), find_free_port()
        with _run_server(server, folder, port, variables):
            _warm_up(server, port, concurrency)
            clients, lateness = _send_parts(server, port, requests, concurrency, parts)
        return clients, _read_records(folder, clients), lateness


@contextmanager
def _run_server(server: TruthServer, folder: Path, port: int, variables: dict[str, str]) -> Iterator[None]:
    """Runs a server with its tape in `folder`, which is complete afterwards."""
    run = [sys.executable, "-m", "otel_infer", "run", "--tape", str(folder / "server.tape"), "--"]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    environ = {**kept, "PYTHONPATH": str(ROOT), **VARIABLES, MARKER: str(port), **variables}
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen([*run, *server.make_command(port)], env=environ, stdout=log, stderr=log)
        try:
            if not _wait_until_open(port, process):
                raise RuntimeError(f"{server.title}: {(folder / 'server.log').read_text()[-2000:]}")
            yield
        finally:
            stop_server(process)
            kill_leftovers(str(port))
            wait_for_sidecars(str(port))


def _read_records(folder: Path, traces: Container[str]) -> list[RequestRecord]:
    records = read_records(folder / "server.tape", Assembler())
    return [record for record in records if record.trace_id.hex() in traces]


def _send_parts(
    server: TruthServer, port: int, requests: int, concurrency: int, parts: int
) -> tuple[dict[str, float], Lateness]:
    """Returns latencies by trace id, ms, and the client's lateness while it sent."""
    clients: dict[str, float] = {}
    delays: list[float] = []
    for _ in range(parts):
        with Lateness() as lateness:
            clients |= send_requests(server, port, requests, concurrency)
        delays += lateness.ms
        time.sleep(PAUSE_S if parts > 1 else 0.0)
    lateness.ms = delays
    return clients, lateness


def _wait_until_open(port: int, process: subprocess.Popen[bytes]) -> bool:
    until = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < until:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                time.sleep(0.5)
                return True
        time.sleep(0.1)
    return False


def _warm_up(server: TruthServer, port: int, concurrency: int) -> None:
    """Sends requests, of which the first ones are slower. A model may be loaded after its server accepts connections."""
    until = time.monotonic() + READY_S
    while True:
        try:
            send_requests(server, port, 2 * concurrency, concurrency)
            return
        except (OSError, EOFError, RuntimeError):
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


# ── latencies ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _compare_latencies(server: TruthServer, requests: int) -> list[Line]:
    clients, records, lateness = _serve(server, requests, server.concurrency, PARTS)
    ours = {record.trace_id.hex(): record.duration_ns / 1e6 for record in records}
    pairs = np.array([(client, ours[trace]) for trace, client in clients.items() if trace in ours])
    title = f"truth: {server.title}, {server.concurrency} at a time"
    lost = make_exact(float(PARTS * requests - len(pairs)))
    return [
        make_line(f"{title}: requests without a trace", "", lost, Gate(0)),
        *(compare_percentile(title, pairs, percent, lateness) for percent in (50, 95)),
    ]


# ── stages ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _compare_stages(server: TruthServer, requests: int) -> list[Line]:
    """Returns a row for each stage that can be delayed: how far its growth, and that of any other stage, is off."""
    usual = {} if server.delays_by_file else _measure_stages(server, requests, "")
    lines = []
    for place in server.stages:
        if server.delays_by_file:
            usual, delayed = _measure_in_turn(server, requests, place)
        else:
            delayed = _measure_stages(server, requests, place)
        growth = {
            name: delayed.get(name, 0.0) - usual.get(name, 0.0) for name in sorted({*usual, *delayed, place})
        }
        off = max(
            abs(length - DELAY_MS * (name == place))
            for name, length in growth.items()
            if name not in server.outer
        )
        note = ", ".join(f"{name} {length:+.1f}" for name, length in growth.items()) + " ms"
        claim = f"truth: {server.title}, {DELAY_MS:.0f} ms added to {place}: largest error of any stage"
        lines.append(make_line(claim, "ms", make_exact(off), Gate(TOLERANCE_MS), note=note))
    return lines


def _measure_stages(server: TruthServer, requests: int, place: str) -> dict[str, float]:
    """Returns the median length of each stage, ms, one request at a time."""
    _, records, _ = _serve(server, requests, 1, DELAY=place, DELAY_S=str(DELAY_MS / 1000))
    return _find_medians(records)


def _measure_in_turn(
    server: TruthServer, requests: int, place: str
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the medians without and with the delay, of requests in turn: two lives of an engine differ by several ms."""
    taken: tuple[set[str], set[str]] = set(), set()
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), find_free_port()
        file = folder / "delay"
        delay = {"DELAY": place, "DELAY_S": str(DELAY_MS / 1000), "DELAY_FILE": str(file)}
        with _run_server(server, folder, port, delay):
            _warm_up(server, port, 4)
            for number in range(2 * requests):
                if number % 2:
                    file.touch()
                taken[number % 2].update(send_requests(server, port, 1, 1))
        records = [_read_records(folder, traces) for traces in taken]
    return _find_medians(records[0]), _find_medians(records[1])


def _find_medians(records: list[RequestRecord]) -> dict[str, float]:
    """Returns the median length of each stage, ms."""
    lengths: dict[str, list[float]] = {}
    for record in records:
        for stage in record.stages:
            lengths.setdefault(stage.name, []).append((stage.ended_at - stage.started_at) / 1e6)
    absent = [0.0] * len(records)
    return {name: float(np.median([*found, *absent[len(found) :]])) for name, found in lengths.items()}
