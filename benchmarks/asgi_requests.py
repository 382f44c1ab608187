"""What an HTTP request costs the server beyond itself: ours against opentelemetry-instrumentation-fastapi, which makes the
same SERVER span with the stock SDK.

CPU time of the whole server process, so theirs includes the thread that exports, and ours does not include the sidecar,
which has a line of its own. Twice: *in a row* calls the ASGI application directly, with no socket, request after request;
*at a fixed rate* is uvicorn, asked by another process.
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
    against_itself,
    bootstrapped,
    exactly,
    line,
    median,
    or_charged,
)
from otel_infer import semconv

FACTOR = 5.0
RATE = 200.0
"""Requests a second, of the fixed rate."""
WARM = 20
"""Requests before each block that do not count."""
BARE, AGAIN, OURS, THEIRS, THEIRS_ALL = "bare", "bare again", "ours", "contrib", "contrib, as it comes"

Ask = Callable[[System, str, int], Awaitable[None]]
"""Has the system asked for the path so many times."""


class Size(NamedTuple):
    """Requests of a block, and how many blocks of each system."""

    requests: int
    rounds: int


class Found(NamedTuple):
    """CPU ns per request, of each round by system; `sidecar` likewise, over all rounds."""

    server: dict[str, list[float]]
    sidecar: float


def measure(quick: bool) -> list[Line]:
    """Both ways of asking, both routes."""
    return asyncio.run(_measured(quick))


async def _measured(quick: bool) -> list[Line]:
    lines: list[Line] = []
    with Receiver() as receiver, Exporting(receiver.endpoint) as exporting:
        mine, others = machine.cores()
        machine.pin_process(receiver.pid, others)
        stock = Stock(receiver.endpoint)
        systems = _systems(stock)
        machine.pin_process(os.getpid(), mine)
        expected = 0
        async with _served(systems, others) as at_fixed_rate:
            ways = (
                ("in a row", in_a_row, Size(40, 3) if quick else Size(300, 60)),
                (f"at {RATE:.0f}/s", at_fixed_rate, Size(20, 2) if quick else Size(200, 25)),
            )
            for said, ask, size in ways:
                for path, kind in ((JSON, "JSON"), (STREAM, f"{asgi_systems.CHUNKS} chunks")):
                    await _rounds(systems, ask, path, Size(size.requests, 1), exporting)
                    found = await _rounds(systems, ask, path, size, exporting)
                    expected += (WARM + size.requests) * (size.rounds + 1)
                    lines += lines_of(f"ASGI request, {kind}, {said}", found, gated=ask is in_a_row)
        stock.close()
        lines += _spans_lines(receiver.counted(), expected)
    return lines


def _systems(stock: Stock) -> list[System]:
    return [
        asgi_systems.bare(BARE),
        asgi_systems.ours(),
        asgi_systems.contrib(THEIRS, stock, server_span_only=True),
        asgi_systems.contrib(THEIRS_ALL, stock, server_span_only=False),
    ]


async def _rounds(systems: list[System], ask: Ask, path: str, size: Size, exporting: Exporting) -> Found:
    """A block of each system per round, and a second one of the bare one, in an order drawn anew."""
    chance, found = random.Random(1), {name: [] for name in (BARE, AGAIN, OURS, THEIRS, THEIRS_ALL)}
    blocks = [*zip(systems, (BARE, OURS, THEIRS, THEIRS_ALL)), (systems[0], AGAIN)]
    sidecar = 0
    for _ in range(size.rounds):
        for system, name in chance.sample(blocks, len(blocks)):
            began = machine.cpu_ns(exporting.pid)
            found[name].append(await _block(system, ask, path, size.requests))
            if name == OURS:
                exporting.flush()
                sidecar += machine.cpu_ns(exporting.pid) - began
    return Found(found, sidecar / size.rounds / (WARM + size.requests))


async def _block(system: System, ask: Ask, path: str, requests: int) -> float:
    """CPU ns of this process per request. Garbage of those before is theirs, and the interpreter has got used to the hooks."""
    system.put_on()
    await in_a_row(system, path, WARM)
    system.flush()
    gc.collect()
    began = time.process_time_ns()
    await ask(system, path, requests)
    system.flush()
    taken = time.process_time_ns() - began
    system.take_off()
    return taken / requests


# ── two ways of asking ───────────────────────────────────────────────────────────────────────────────────────────


async def in_a_row(system: System, path: str, requests: int) -> None:
    """The ASGI application, called as a server calls it."""
    scope, left = _scope(path), asyncio.Event()

    async def send(message: dict[str, Any]) -> None:
        pass

    for _ in range(requests):
        bodies = [{"type": "http.request", "body": BODY, "more_body": False}]

        async def receive(bodies: list[dict[str, Any]] = bodies) -> dict[str, Any]:
            if not bodies:
                await left.wait()  # a client that stays
            return bodies.pop()

        await system.app(dict(scope), receive, send)


def _scope(path: str) -> dict[str, Any]:
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
async def _served(systems: list[System], others: set[int]) -> AsyncIterator[Ask]:
    """Each system behind a uvicorn of this process, asked by a client in another."""
    import uvicorn

    client, ports, servers = Client(), {}, []
    machine.pin_process(client.pid, others)
    for system in systems:
        server = uvicorn.Server(uvicorn.Config(system.app, port=0, log_level="error", access_log=False))
        servers.append((server, asyncio.create_task(server.serve())))
        while not server.started:
            await asyncio.sleep(0.01)
        ports[system.name] = server.servers[0].sockets[0].getsockname()[1]

    async def ask(system: System, path: str, requests: int) -> None:
        await asyncio.to_thread(client.ask, ports[system.name], path, requests, RATE)

    try:
        yield ask
    finally:
        client.close()
        for server, serving in servers:
            server.should_exit = True
            await serving


# ── what follows ─────────────────────────────────────────────────────────────────────────────────────────────────


def lines_of(said: str, found: Found, gated: bool = True) -> list[Line]:
    """The gate, and under it what it was made of. At a fixed rate there is none: the bare server, whose caches are cold for
    each request, varies by more than what is to be told apart."""
    server = {name: np.asarray(column) for name, column in found.server.items()}
    usual = (server[BARE] + server[AGAIN]) / 2
    ours, theirs, all_theirs = (server[name] - usual for name in (OURS, THEIRS, THEIRS_ALL))
    off = abs(median(server[AGAIN] - server[BARE]).value)
    control = against_itself(median(server[AGAIN] / server[BARE] - 1))
    control = or_charged(control, times(all_theirs, ours + off), Gate(FACTOR, at_least=True))
    note = f"uninstrumented {median(usual).value / 1000:.0f} µs, contrib without a span per message {_said(median(theirs))} µs more"
    gate = Gate(FACTOR, at_least=True) if gated else None
    both = ours + found.sidecar
    return [
        line(f"{said}: below contrib, server", "×", times(all_theirs, ours), gate, control, note),
        line(f"{said}: below contrib without a span per message, server", "×", times(theirs, ours)),
        line(f"{said}: below contrib without those, sidecar and server", "×", times(theirs, both)),
        line(f"{said}: server", "µs", median(ours).scaled(1 / 1000)),
        line(f"{said}: sidecar", "µs", exactly(found.sidecar / 1000)),
    ]


def times(theirs: Sequence[float], ours: Sequence[float]) -> Figure:
    """How many times less ours is, by medians over rounds; a cost that cannot be told from 0 is endlessly less."""
    above, below = np.asarray(theirs), np.asarray(ours)

    def ratio(rows: Any) -> float:
        cost = float(np.median(below[rows]))
        return float(np.median(above[rows])) / cost if cost > 0 else float("inf")

    return bootstrapped(len(above), ratio)


def _said(figure: Figure) -> str:
    return f"{figure.value / 1000:.1f} [{figure.low / 1000:.1f}, {figure.high / 1000:.1f}]"


def _spans_lines(arrived: dict[str, Any], expected: int) -> list[Line]:
    """All three make the same span for each request, no more and no less; the stock SDK drops what its queue has no room for."""
    servers = arrived["servers"]
    ours, all_of_them = servers.get(semconv.SCOPE, 0), sum(servers.values())
    theirs, doubled = all_of_them - ours, arrived["spans"] - arrived["unique"]
    note = f"{expected:,} expected, {ours:,} arrived"
    more = f"{2 * expected:,} expected, {theirs:,} arrived; {arrived['spans'] - all_of_them:,} others of contrib as it comes"
    claim = "ASGI request: SERVER spans lost or doubled"
    return [
        line(f"{claim}, ours", "", exactly(abs(expected - ours) + doubled), Gate(0), None, note),
        line(f"{claim}, contrib's", "", exactly(abs(2 * expected - theirs)), note=more),
    ]
