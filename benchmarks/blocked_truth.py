"""Compares a client's latency with the trace's on servers whose requests wait before the server reads them.

Two servers of the battery: `generate` in an `async def` endpoint, which blocks the event loop, and `def` endpoints, of
which 40 run at a time. Percentiles of all requests are compared, because that is what a user sees.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.battery import draw
from benchmarks.battery.faults import Case
from benchmarks.battery.load import PATHS, Load, TimedRequest
from benchmarks.battery.servers import SERVERS
from benchmarks.closed_loop import post_closed_loop
from benchmarks.truth import Lateness, compare_percentile
from benchmarks.verdict import Gate, Line, make_exact, make_line
from otel_infer.assembly.assembler import Assembler
from otel_infer.cli.demo.command import wait_until_healthy
from otel_infer.cli.demo.free_port import find_free_port
from otel_infer.cli.replay import read_records

REQUESTS = 200
TOKENS, WORDS = 8, 16


class Setup(NamedTuple):
    """A server of the battery, and how many requests are sent at a time."""

    server: str
    title: str
    concurrency: int


SETUPS = (
    Setup("generate-async", "blocked event loop", 8),
    Setup("generate-async", "blocked event loop", 40),
    Setup("embeddings", "def endpoints", 100),
)


def measure(quick: bool) -> list[Line]:
    """Returns the rows of the table."""
    return [line for setup in SETUPS for line in compare_latencies(setup, 40 if quick else REQUESTS)]


def compare_latencies(setup: Setup, requests: int) -> list[Line]:
    """Returns the rows of one server."""
    server = SERVERS[setup.server]
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name) / "run", find_free_port()
        folder.mkdir()
        model = draw.make_model(server, Path(name))
        process = draw.start_server(server, Case([]), folder, port, model, {})
        try:
            if not wait_until_healthy(
                f"http://127.0.0.1:{port}", lambda: process.poll() is None, draw.READY_S
            ):
                raise RuntimeError(
                    f"{setup.server} did not start: {(folder / 'server.log').read_text()[-2000:]}"
                )
            load = draw.make_load(server, port, model, [])
            _send_closed_loop(load, 4, 2)
            with Lateness() as lateness:
                clients = _send_closed_loop(load, requests, setup.concurrency)
        finally:
            draw.stop_server(process)
        ours = {
            record.trace_id.hex(): record.duration_ns / 1e6
            for record in read_records(folder / "server.tape", Assembler())
        }
    pairs = np.array([(client, ours[trace]) for trace, client in clients.items() if trace in ours])
    title = f"truth: {setup.title}, {setup.concurrency} at a time"
    lost = make_line(
        f"{title}: requests without a trace", "", make_exact(float(requests - len(pairs))), Gate(0)
    )
    return [lost, *(compare_percentile(title, pairs, percent, lateness) for percent in (50, 99))]


def _send_closed_loop(load: Load, requests: int, concurrency: int) -> dict[str, float]:
    """Sends requests, so many at a time; returns the latency of each by its trace id, ms."""
    body = json.dumps(load.make_body(TimedRequest(0, WORDS, TOKENS))).encode()
    return post_closed_loop(load.port, PATHS[load.kind], body, requests, concurrency)
