"""Offers 50,000 step spans per second: how many arrive, and the CPU time they take.

An engine steps at a fixed pace, and its own CPU time is subtracted. Ours is the CPU time of the sidecar, and of the server where
listed; the stock SDK runs in the server only. The gate compares both in an engine with as much work per step as the simulated loop.
Without that work the stock SDK has more of the GIL, and loses a fifth to half of its spans for minutes at a time.
"""

from __future__ import annotations

import time
from collections import Counter

from benchmarks import machine, unsampled
from benchmarks.engine import Engine
from benchmarks.ours import Binding, Exporting
from benchmarks.parts import OFFERED, Part, measure_part, run_paced
from benchmarks.receiver import Receiver
from benchmarks.stock import Stock, StockBinding
from benchmarks.verdict import (
    Control,
    Figure,
    Gate,
    Line,
    estimate_median,
    make_exact,
    make_line,
    make_lost_line,
)

CPU_FACTOR = 50.0
RAW_BYTES = 130.0
SLOW_OFFERED = 5_000
"""Step spans per second of which the stock SDK loses none."""
MAX_RATE_DEFICIT = 0.01
"""Largest shortfall of the offered rate, as a share."""
_BELOW = "CPU per exported span, below the stock SDK"


def measure(quick: bool) -> list[Line]:
    """Measures otel_infer and the stock SDK in turn with spans alone, then otel_infer with metrics, as by default."""
    seconds, parts, unsampled_parts = (0.8, 2, 64) if quick else (8.0, 15, 160)
    with Receiver() as receiver:
        _, others = machine.choose_cores()
        machine.pin_process(receiver.pid, others)
        working, idle, stock = Engine(wait_us=0), Engine(python_us=0, wait_us=0), Stock(receiver.endpoint)
        machine.pin_apart()
        run_paced(idle, 0.25, OFFERED)
        spans_alone, theirs = _measure_spans_alone(working, stock, receiver, seconds, parts)
        fewer = -(-parts // 3)
        theirs_idle = [_measure_stock(idle, stock, receiver, seconds) for _ in range(fewer)]
        theirs_slow = _measure_stock(idle, stock, receiver, seconds, SLOW_OFFERED)
        stock.close()
        with Exporting(receiver.endpoint) as exporting:
            idle_share = _measure_idle(exporting.pid, seconds)
            ours = [_measure_ours(idle, exporting, receiver, seconds) for _ in range(fewer)]
            short = seconds / unsampled.TIMES_SHORTER
            pairs = unsampled.measure_pairs(idle, exporting, receiver, short, unsampled_parts)
            memory = machine.read_peak_memory(exporting.pid)
            idle.churning = False
            unchanged = _measure_ours(idle, exporting, receiver, seconds)
    return [
        *_make_loss_lines([*spans_alone, *ours], theirs),
        *_make_cpu_lines(spans_alone, theirs),
        *_make_default_lines(ours, theirs_idle, theirs_slow, idle_share),
        *unsampled.make_lines(pairs, unsampled_parts),
        *_make_size_lines(ours, theirs, unchanged, memory),
    ]


def _measure_spans_alone(
    engine: Engine, stock: Stock, receiver: Receiver, seconds: float, parts: int
) -> tuple[list[Part], list[Part]]:
    """Measures without metrics, because the stock SDK has none."""
    ours, theirs = [], []
    with Exporting(receiver.endpoint, metrics=False) as exporting:
        for _ in range(parts):
            ours.append(_measure_ours(engine, exporting, receiver, seconds))
            theirs.append(_measure_stock(engine, stock, receiver, seconds))
    return ours, theirs


def _measure_stock(
    engine: Engine, stock: Stock, receiver: Receiver, seconds: float, offered: int = OFFERED
) -> Part:
    return measure_part(engine, StockBinding(engine, stock), receiver, stock.flush, 0, seconds, offered)


def _measure_ours(engine: Engine, exporting: Exporting, receiver: Receiver, seconds: float) -> Part:
    return measure_part(engine, Binding(engine), receiver, exporting.flush, exporting.pid, seconds)


def _measure_idle(pid: int, seconds: float) -> float:
    """Returns the CPU of the idle sidecar as a share of a core."""
    began = machine.read_cpu_ns(pid)
    time.sleep(seconds)
    return (machine.read_cpu_ns(pid) - began) / seconds / 1e9


def _make_loss_lines(ours: list[Part], theirs: list[Part]) -> list[Line]:
    rate = min(part.rate for part in ours)
    offered = Control(f"{rate:,.0f}/s offered", rate >= OFFERED * (1 - MAX_RATE_DEFICIT))
    arrived = Counter[str]()
    for part in ours:
        arrived.update({name: part.arrived[name] for name in ("steps", "spans", "unique")})
    stock_rate = estimate_median([part.rate for part in theirs]).value
    claim, note = f"{OFFERED // 1000}k step spans/s", f"offered {stock_rate:,.0f}/s"
    return [
        make_lost_line(
            f"{claim}: lost or doubled, ours", sum(part.expected for part in ours), arrived, offered
        ),
        make_line(f"{claim}: lost, stock SDK", "%", _estimate_lost(theirs), note=note),
    ]


def _make_cpu_lines(spans_alone: list[Part], theirs: list[Part]) -> list[Line]:
    """Returns the rows with spans alone on both sides, in an engine that works."""
    times_less = estimate_median(
        [
            (stock.server_cpu / stock.arrived["spans"]) / (our.sidecar_cpu / our.arrived["spans"])
            for our, stock in zip(spans_alone, theirs)
        ]
    )
    sidecar = estimate_median([part.sidecar_cpu / part.arrived["spans"] for part in spans_alone])
    gate = Gate(CPU_FACTOR, at_least=True)
    return [
        make_line(f"{_BELOW}: sidecar", "×", times_less, gate, note=_format_stock(theirs)),
        make_line("CPU per exported span: sidecar", "µs", sidecar.scale_by(1 / 1000)),
    ]


def _make_default_lines(
    ours: list[Part], theirs: list[Part], theirs_slow: Part, idle_share: float
) -> list[Line]:
    """Returns the rows with metrics, in an engine without work."""
    sidecar = estimate_median([part.sidecar_cpu / part.arrived["spans"] for part in ours])
    both = estimate_median([(part.sidecar_cpu + part.server_cpu) / part.arrived["spans"] for part in ours])
    stock, slow = _estimate_stock_cpu(theirs), theirs_slow.server_cpu / theirs_slow.arrived["spans"]
    lost = 1 - theirs_slow.arrived["steps"] / theirs_slow.expected
    slow_note = f"stock {slow / 1000:.1f} µs at {theirs_slow.rate:,.0f}/s, where it loses {lost:.0%}"
    load = "in an engine without work, with metrics"
    note, shares = _format_stock(theirs), _format_shares(ours)
    return [
        make_line(f"{_BELOW} {load}: sidecar", "×", _divide_bounds(stock, sidecar), note=note),
        make_line(f"{_BELOW} {load}: sidecar and server", "×", _divide_bounds(stock, both), note=shares),
        make_line(
            f"{_BELOW} where that loses nothing, with metrics: sidecar",
            "×",
            _divide_bounds(make_exact(slow), sidecar),
            note=slow_note,
        ),
        make_line(f"CPU per exported span {load}: sidecar", "µs", sidecar.scale_by(1 / 1000)),
        make_line("CPU of the idle sidecar", "% of a core", make_exact(idle_share * 100)),
    ]


def _estimate_stock_cpu(parts: list[Part]) -> Figure:
    """Returns ns per span that arrived."""
    return estimate_median([part.server_cpu / part.arrived["spans"] for part in parts])


def _estimate_lost(parts: list[Part]) -> Figure:
    """Returns the lost step spans in %."""
    return estimate_median([100 * (1 - part.arrived["steps"] / part.expected) for part in parts])


def _format_stock(theirs: list[Part]) -> str:
    stock = _estimate_stock_cpu(theirs).scale_by(1 / 1000)
    lost = _estimate_lost(theirs).value
    return f"stock {stock.value:.1f} µs [{stock.low:.1f}, {stock.high:.1f}], it loses {lost:.0f} %"


def _divide_bounds(theirs: Figure, ours: Figure) -> Figure:
    """Returns the ratio, with bounds from opposite ends."""
    return Figure(theirs.value / ours.value, theirs.low / ours.high, theirs.high / ours.low)


def _make_size_lines(ours: list[Part], theirs: list[Part], unchanged: Part, memory: int) -> list[Line]:
    without_prompt, with_prompt = _measure_raw_bytes([*ours, unchanged])
    sent, stock_sent = (
        estimate_median([part.arrived["wire"] / part.arrived["spans"] for part in parts])
        for parts in (ours, theirs)
    )
    note = f"stock, by default: {stock_sent.value:.0f} B"
    claim = "bytes per step span, raw"
    return [
        make_line(f"{claim}, without another prompt in the step", "B", without_prompt, Gate(RAW_BYTES)),
        make_line(f"{claim}, with another prompt in the step", "B", with_prompt),
        make_line("bytes per span as sent, compressed", "B", sent, note=note),
        make_line("sidecar memory, peak", "MiB", make_exact(memory / 2**20)),
    ]


def _measure_raw_bytes(parts: list[Part]) -> tuple[Figure, Figure]:
    """Returns bytes per step span without and with the attribute for the prompt tokens of other requests."""
    steps, plain, plain_raw, other_raw = (
        sum(part.arrived[name] for part in parts) for name in ("steps", "plain", "plain_raw", "other_raw")
    )
    return make_exact(plain_raw / (plain or float("nan"))), make_exact(
        other_raw / (steps - plain or float("nan"))
    )


def _format_shares(parts: list[Part]) -> str:
    seconds = sum(part.seconds for part in parts)
    server = sum(part.server_cpu for part in parts) / seconds / 1e9
    sidecar = sum(part.sidecar_cpu for part in parts) / seconds / 1e9
    return f"{100 * server:.2f} % of a core in the server, {100 * sidecar:.1f} % in the sidecar"
