"""Measures the CPU time that an HTTP request adds to the server: otel_infer against opentelemetry-instrumentation-fastapi.

Both make the same SERVER span. CPU time is of the whole server process, with contrib's exporting thread and without our sidecar, which
has rows of its own. *In a row* calls the ASGI application directly. *At 200/s* is uvicorn, with a client in another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks import asgi_systems, machine
from benchmarks.asgi_systems import JSON, STREAM, System
from benchmarks.ours import Exporting
from benchmarks.paced_client import BODY, HEADERS, Client
from benchmarks.receiver import Receiver
from benchmarks.stock import Stock
from benchmarks.verdict import (
    Figure,
    Gate,
    Line,
    bootstrap_figure,
    estimate_median,
    make_control,
    make_exact,
    make_line,
    relax_control,
)
from otel_infer import semconv

FACTOR = 5.0
RATE = 200.0
"""Requests per second of the fixed rate."""
WARM_UP = 20
"""Requests before each block that do not count."""
BARE, AGAIN, OURS, THEIRS, THEIRS_DEFAULT = "bare", "bare again", "ours", "contrib", "contrib by default"

SendRequests = Callable[[System, str, int], Awaitable[None]]
"""Sends this many requests for a path to a system."""


class Size(NamedTuple):
    """Requests per block, and blocks of each system."""

    requests: int
    rounds: int


class RequestCosts(NamedTuple):
    """CPU ns per request: of the server by system and round, and of the sidecar over all rounds."""

    server: dict[str, list[float]]
    sidecar: float


def measure(quick: bool) -> list[Line]:
    """Measures both routes, in a row and at a fixed rate."""
    return asyncio.run(_measure_all(quick))


async def _measure_all(quick: bool) -> list[Line]:
    lines: list[Line] = []
    with Receiver() as receiver, Exporting(receiver.endpoint) as exporting:
        mine, others = machine.choose_cores()
        machine.pin_process(receiver.pid, others)
        stock = Stock(receiver.endpoint)
        bare, ours = asgi_systems.make_bare(BARE), asgi_systems.make_ours(OURS)
        systems = [
            bare,
            ours,
            asgi_systems.make_contrib(THEIRS, stock, server_span_only=True),
            asgi_systems.make_contrib(THEIRS_DEFAULT, stock, server_span_only=False),
        ]
        machine.pin_process(os.getpid(), mine)
        expected = 0
        async with _serve_systems([bare, ours], others) as send_at_rate:
            for name, send, compared, size in (
                ("in a row", call_in_sequence, systems, Size(40, 3) if quick else Size(300, 60)),
                (f"at {RATE:.0f}/s", send_at_rate, [bare, ours], Size(20, 2) if quick else Size(200, 25)),
            ):
                for path, route in ((JSON, "JSON"), (STREAM, f"{asgi_systems.CHUNKS} chunks")):
                    await measure_rounds(compared, send, path, Size(size.requests, 1), exporting)
                    costs = await measure_rounds(compared, send, path, size, exporting)
                    expected += (WARM_UP + size.requests) * (size.rounds + 1)
                    lines += make_lines(f"ASGI request, {route}, {name}", costs)
        stock.close()
        lines.append(_make_span_line(receiver.read_counts(), expected))
    return lines


async def measure_rounds(
    systems: list[System],
    send: SendRequests,
    path: str,
    size: Size,
    exporting: Exporting,
    warm_up: SendRequests | None = None,
) -> RequestCosts:
    """Runs a block of each system per round, and a second bare one, in random order.

    `warm_up`: sends the requests before each block; None = `call_in_sequence`.
    """
    blocks = [(system, system.name) for system in systems] + [(systems[0], AGAIN)]
    rng, server, sidecar = random.Random(1), {name: list[float]() for _, name in blocks}, 0
    for _ in range(size.rounds):
        for system, name in rng.sample(blocks, len(blocks)):
            began = machine.read_cpu_ns(exporting.pid)
            server[name].append(await _measure_block(system, send, path, size.requests, warm_up))
            if name == OURS:
                exporting.flush()
                sidecar += machine.read_cpu_ns(exporting.pid) - began
    return RequestCosts(server, sidecar / size.rounds / (WARM_UP + size.requests))


async def _measure_block(
    system: System, send: SendRequests, path: str, requests: int, warm_up: SendRequests | None
) -> float:
    """Returns the CPU ns of this process per request. Before, the code is warmed up and garbage of other blocks is collected."""
    system.switch_on()
    await (warm_up or call_in_sequence)(system, path, WARM_UP)
    system.flush()
    gc.collect()
    began = time.process_time_ns()
    await send(system, path, requests)
    system.flush()
    taken = time.process_time_ns() - began
    system.switch_off()
    return taken / requests


# ── requests in a row and at a fixed rate ────────────────────────────────────────────────────────────────────────


async def call_in_sequence(system: System, path: str, requests: int) -> None:
    """Calls the ASGI application as a server does."""
    scope, disconnected = _make_scope(path), asyncio.Event()

    async def send(message: dict[str, Any]) -> None:
        pass

    for _ in range(requests):
        bodies = [{"type": "http.request", "body": BODY, "more_body": False}]

        async def receive(bodies: list[dict[str, Any]] = bodies) -> dict[str, Any]:
            if not bodies:
                await disconnected.wait()  # never set: the client stays
            return bodies.pop()

        await system.app(dict(scope), receive, send)


def _make_scope(path: str) -> dict[str, Any]:
    headers = [(b"host", b"127.0.0.1:8000"), (b"content-length", b"%d" % len(BODY))]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers + [(name.encode(), value.encode()) for name, value in HEADERS.items()],
        "server": ("127.0.0.1", 8000),
        "client": ("127.0.0.1", 40000),
        "state": {},
    }


@contextlib.asynccontextmanager
async def _serve_systems(systems: list[System], others: set[int]) -> AsyncIterator[SendRequests]:
    """Serves each system with a uvicorn of this process, and yields the client, which runs in another process."""
    import uvicorn

    client, ports, servers = Client(), {}, []
    machine.pin_process(client.pid, others)
    for system in systems:
        server = uvicorn.Server(uvicorn.Config(system.app, port=0, log_level="error", access_log=False))
        servers.append((server, asyncio.create_task(server.serve())))
        while not server.started:
            await asyncio.sleep(0.01)
        ports[system.name] = server.servers[0].sockets[0].getsockname()[1]

    async def send(system: System, path: str, requests: int) -> None:
        await asyncio.to_thread(client.send_requests, ports[system.name], path, requests, RATE)

    try:
        yield send
    finally:
        client.close()
        for server, serving in servers:
            server.should_exit = True
            await serving


# ── the rows ─────────────────────────────────────────────────────────────────────────────────────────────────────


def make_lines(claim: str, costs: RequestCosts) -> list[Line]:
    """Returns the comparison with contrib, if it was measured, and the costs in µs.

    At a fixed rate contrib is not measured: caches are cold, and the bare server varies by more than the difference.
    """
    server = {name: np.asarray(column) for name, column in costs.server.items()}
    usual = (server[BARE] + server[AGAIN]) / 2
    ours = server[OURS] - usual
    note = f"uninstrumented {estimate_median(usual).value / 1000:.0f} µs"
    lines = [
        make_line(f"{claim}: server", "µs", estimate_median(ours).scale_by(1 / 1000), note=note),
        make_line(f"{claim}: sidecar", "µs", make_exact(costs.sidecar / 1000)),
    ]
    if THEIRS not in server:
        return lines
    theirs, theirs_default = server[THEIRS] - usual, server[THEIRS_DEFAULT] - usual
    gate = Gate(FACTOR, at_least=True)
    difference = abs(estimate_median(server[AGAIN] - server[BARE]).value)
    control = make_control(estimate_median(server[AGAIN] / server[BARE] - 1))
    control = relax_control(control, divide_costs(theirs_default, ours + difference), gate)
    note = f"contrib without a span per message {_format_figure(estimate_median(theirs))} µs"
    below, single = divide_costs(theirs_default, ours), divide_costs(theirs, ours)
    with_sidecar = divide_costs(theirs, ours + costs.sidecar)
    return [
        make_line(f"{claim}: below contrib, server", "×", below, gate, control, note),
        make_line(f"{claim}: below contrib without a span per message, server", "×", single),
        make_line(
            f"{claim}: below contrib without a span per message, sidecar and server", "×", with_sidecar
        ),
        *lines,
    ]


def divide_costs(theirs: Sequence[float], ours: Sequence[float]) -> Figure:
    """Returns the ratio of the medians over rounds; infinity if our cost is not above 0."""
    above, below = np.asarray(theirs), np.asarray(ours)

    def divide_medians(rows: Any) -> float:
        cost = float(np.median(below[rows]))
        return float(np.median(above[rows])) / cost if cost > 0 else float("inf")

    return bootstrap_figure(len(above), divide_medians)


def _format_figure(figure: Figure) -> str:
    return f"{figure.value / 1000:.1f} [{figure.low / 1000:.1f}, {figure.high / 1000:.1f}]"


def _make_span_line(arrived: dict[str, Any], expected: int) -> Line:
    """Returns the row of our SERVER spans, of which there is one per request."""
    ours, doubled = arrived["servers"].get(semconv.SCOPE, 0), arrived["spans"] - arrived["unique"]
    note = f"{expected:,} expected, {ours:,} arrived"
    wrong = make_exact(abs(expected - ours) + doubled)
    return make_line("ASGI request: SERVER spans lost or doubled, ours", "", wrong, Gate(0), note=note)
