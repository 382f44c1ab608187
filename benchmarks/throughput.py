"""50,000 step spans a second offered for some seconds: what arrives, and what it costs where.

An engine steps at a fixed pace, and what it takes without telemetry is taken off, so whatever CPU is left is the telemetry's.
Ours is the sidecar's CPU, and that of the server besides; the stock SDK's is the server's, since it has no other process.

Both are set against each other in an engine whose thread works as long in a step as that of the simulated loop does. Where it
has no work of its own the stock SDK has more of the interpreter, and may lose half of its spans or a fifth of them, for minutes.
"""

from __future__ import annotations

import time
from collections import Counter

from benchmarks import machine, unsampled
from benchmarks.engine import Engine
from benchmarks.ours import Binding, Exporting
from benchmarks.parts import OFFERED, Part, nothing, part
from benchmarks.receiver import Receiver
from benchmarks.stock import Stock, StockBinding
from benchmarks.verdict import Control, Figure, Gate, Line, exactly, line, lost_line, median

CPU_FACTOR = 50.0
RAW_BYTES = 130.0
UNHURRIED = 5_000
"""Step spans a second of which the stock SDK loses none."""
PACE_LIMIT = 0.01
"""How far below the rate that was offered we may have been, as a share, to say that it was offered."""
_BELOW = "CPU per exported span, below the stock SDK"


def measure(quick: bool) -> list[Line]:
    """Ours and the stock SDK in turn, in several parts, both with spans alone; then ours as it is by default, with metrics."""
    seconds, parts, many = (0.8, 2, 64) if quick else (8.0, 15, 160)
    with Receiver() as receiver:
        _, others = machine.cores()
        machine.pin_process(receiver.pid, others)
        working, engine, stock = Engine(wait_us=0), Engine(python_us=0, wait_us=0), Stock(receiver.endpoint)
        machine.pin_apart()
        part(engine, None, receiver, nothing, 0, 0.5)
        alone, theirs = _spans_alone(working, stock, receiver, seconds, parts)
        fewer = -(-parts // 3)
        unhindered = [_of_theirs(engine, stock, receiver, seconds) for _ in range(fewer)]
        unhurried = _of_theirs(engine, stock, receiver, seconds, UNHURRIED)
        stock.close()
        with Exporting(receiver.endpoint) as exporting:
            idle = _idle(exporting.pid, seconds)
            ours = [_of_ours(engine, exporting, receiver, seconds) for _ in range(fewer)]
            out = unsampled.sampled_out(engine, exporting, receiver, seconds / unsampled.SHORTER, many)
            memory = machine.peak_memory(exporting.pid)
            engine.churning = False
            calm = _of_ours(engine, exporting, receiver, seconds)
    return [
        *_loss([*alone, *ours], theirs),
        *_cpu(alone, theirs),
        *_cpu_by_default(ours, unhindered, unhurried, idle),
        *unsampled.lines_of(*out, many),
        *_sizes(ours, theirs, calm, memory),
    ]


def _spans_alone(
    engine: Engine, stock: Stock, receiver: Receiver, seconds: float, parts: int
) -> tuple[list[Part], list[Part]]:
    """The stock SDK has no metrics of its own."""
    ours, theirs = [], []
    with Exporting(receiver.endpoint, metrics=False) as exporting:
        for _ in range(parts):
            ours.append(_of_ours(engine, exporting, receiver, seconds))
            theirs.append(_of_theirs(engine, stock, receiver, seconds))
    return ours, theirs


def _of_theirs(
    engine: Engine, stock: Stock, receiver: Receiver, seconds: float, offered: int = OFFERED
) -> Part:
    return part(engine, StockBinding(engine, stock), receiver, stock.flush, 0, seconds, offered)


def _of_ours(engine: Engine, exporting: Exporting, receiver: Receiver, seconds: float) -> Part:
    return part(engine, Binding(engine), receiver, exporting.flush, exporting.pid, seconds)


def _idle(pid: int, seconds: float) -> float:
    """The sidecar's CPU, as a share of a core, while nothing happens."""
    began = machine.cpu_ns(pid)
    time.sleep(seconds)
    return (machine.cpu_ns(pid) - began) / seconds / 1e9


def _loss(ours: list[Part], theirs: list[Part]) -> list[Line]:
    rate = min(part.rate for part in ours)
    offered = Control(f"{rate:,.0f}/s offered", rate >= OFFERED * (1 - PACE_LIMIT))
    together = Counter[str]()
    for one in ours:
        together.update({name: one.arrived[name] for name in ("steps", "spans", "unique")})
    stock_lost = median([100 * (1 - part.arrived["steps"] / part.expected) for part in theirs])
    stock_rate = median([part.rate for part in theirs]).value
    said = f"{OFFERED // 1000}k step spans/s"
    return [
        lost_line(f"{said}: lost or doubled, ours", sum(part.expected for part in ours), together, offered),
        line(f"{said}: lost, stock SDK", "%", stock_lost, note=f"it got {stock_rate:,.0f}/s made"),
    ]


def _cpu(alone: list[Part], theirs: list[Part]) -> list[Line]:
    """Spans alone on both sides, in an engine that works."""
    sidecar = median([part.sidecar_cpu / part.arrived["spans"] for part in alone])
    gate = Gate(CPU_FACTOR, at_least=True)
    return [
        line(f"{_BELOW}: sidecar", "×", _times(alone, theirs), gate, note=_said(theirs)),
        line("CPU per exported span: sidecar", "µs", sidecar.scaled(1 / 1000)),
    ]


def _cpu_by_default(ours: list[Part], theirs: list[Part], unhurried: Part, idle: float) -> list[Line]:
    """Ours with metrics, in an engine without work: what the server takes is little beside that."""
    sidecar = median([part.sidecar_cpu / part.arrived["spans"] for part in ours])
    both = median([(part.sidecar_cpu + part.server_cpu) / part.arrived["spans"] for part in ours])
    stock, calm = _stock_cpu(theirs), unhurried.server_cpu / unhurried.arrived["spans"]
    lost = 1 - unhurried.arrived["steps"] / unhurried.expected
    calm_note = f"stock {calm / 1000:.1f} µs at {unhurried.rate:,.0f}/s, where it loses {lost:.0%}"
    idly = "in an engine without work, with metrics"
    return [
        line(f"{_BELOW} {idly}: sidecar", "×", _below(stock, sidecar), note=_said(theirs)),
        line(f"{_BELOW} {idly}: sidecar and server", "×", _below(stock, both), note=_share(ours)),
        line(
            f"{_BELOW} where that loses nothing, with metrics: sidecar",
            "×",
            _below(exactly(calm), sidecar),
            note=calm_note,
        ),
        line(f"CPU per exported span {idly}: sidecar", "µs", sidecar.scaled(1 / 1000)),
        line("CPU of the sidecar while nothing happens", "% of a core", exactly(idle * 100)),
    ]


def _stock_cpu(parts: list[Part]) -> Figure:
    """ns per span that arrived."""
    return median([part.server_cpu / part.arrived["spans"] for part in parts])


def _said(theirs: list[Part]) -> str:
    stock = _stock_cpu(theirs).scaled(1 / 1000)
    lost = median([100 * (1 - part.arrived["steps"] / part.expected) for part in theirs])
    return f"stock {stock.value:.1f} µs [{stock.low:.1f}, {stock.high:.1f}], it loses {lost.value:.0f} %"


def _below(theirs: Figure, ours: Figure) -> Figure:
    """At least and at most as many times as both ends allow."""
    return Figure(theirs.value / ours.value, theirs.low / ours.high, theirs.high / ours.low)


def _times(ours: list[Part], theirs: list[Part]) -> Figure:
    """How many times less the sidecar takes, from one part to the next."""
    return median(
        [
            (stock.server_cpu / stock.arrived["spans"]) / (our.sidecar_cpu / our.arrived["spans"])
            for our, stock in zip(ours, theirs)
        ]
    )


def _sizes(ours: list[Part], theirs: list[Part], calm: Part, memory: int) -> list[Line]:
    plain, other = _raw_bytes([*ours, calm])
    sent, stock_sent = (
        median([part.arrived["wire"] / part.arrived["spans"] for part in parts]) for parts in (ours, theirs)
    )
    note = f"stock, by default: {stock_sent.value:.0f} B"
    return [
        line("bytes per step span, raw, nobody's prompt in the step", "B", plain, Gate(RAW_BYTES)),
        line("bytes per step span, raw, with another's prompt in it", "B", other),
        line("bytes per span as sent, compressed", "B", sent, note=note),
        line("sidecar memory, most", "MiB", exactly(memory / 2**20)),
    ]


def _raw_bytes(parts: list[Part]) -> tuple[Figure, Figure]:
    """Per step span without and with the attribute that says how many prompt tokens of others the step had."""
    steps, plain, plain_raw, other_raw = (
        sum(part.arrived[name] for part in parts) for name in ("steps", "plain", "plain_raw", "other_raw")
    )
    return exactly(plain_raw / (plain or float("nan"))), exactly(other_raw / (steps - plain or float("nan")))


def _share(parts: list[Part]) -> str:
    seconds = sum(part.seconds for part in parts)
    server = sum(part.server_cpu for part in parts) / seconds / 1e9
    sidecar = sum(part.sidecar_cpu for part in parts) / seconds / 1e9
    return f"{100 * server:.2f} % of a core in the server, {100 * sidecar:.1f} % in the sidecar"
