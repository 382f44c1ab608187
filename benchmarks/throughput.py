"""50,000 step spans a second offered for some seconds: what arrives, and what it costs where.

An engine without work of its own steps at a fixed pace, so whatever CPU is used is the telemetry's. Ours is the sidecar's
CPU, and that of the server besides; the stock SDK's is the server's, since it has no other process.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks import machine, neighbours
from benchmarks.blocks import PATIENCE
from benchmarks.engine import Engine, at_pace
from benchmarks.ours import Binding, Exporting
from benchmarks.receiver import Receiver
from benchmarks.stock import Stock, StockBinding
from benchmarks.verdict import Control, Figure, Gate, Line, exactly, line, lost_line, median

OFFERED = 50_000
CPU_FACTOR = 50.0
OUT_FACTOR = 10.0
RAW_BYTES = 130.0
UNHURRIED = 5_000
"""Step spans a second of which the stock SDK loses none."""
SHORTER = 16
"""So much shorter are parts that are sampled out."""
MOSTLY, LEAST = 0.7, 0.25
"""The share of its steps that makes a part an undisturbed one, and how many of those there must be, as a share of the parts that
are wanted."""
PACE_LIMIT = 0.01
"""How far below the rate that was offered we may have been, as a share, to say that it was offered."""


class Part(NamedTuple):
    """Some seconds of load and what they came to; CPU in ns, without what the bare engine takes."""

    rate: float
    seconds: float
    expected: int
    arrived: dict[str, Any]
    server_cpu: float
    sidecar_cpu: float
    probes: list[int]
    """Of `neighbours`, ns, before each step."""


def measure(quick: bool) -> list[Line]:
    """Ours and the stock SDK in turn, in several parts, both with spans alone; then ours as it is by default, with metrics."""
    seconds, parts, unsampled = (0.8, 2, 64) if quick else (8.0, 15, 160)
    with Receiver() as receiver:
        _, others = machine.cores()
        machine.pin_process(receiver.pid, others)
        engine, stock = Engine(python_us=0, wait_us=0), Stock(receiver.endpoint)
        machine.pin_apart()
        part(engine, None, receiver, _nothing, 0, 0.5)
        alone, theirs = _spans_alone(engine, stock, receiver, seconds, parts)
        unhurried = part(engine, StockBinding(engine, stock), receiver, stock.flush, 0, seconds, UNHURRIED)
        stock.close()
        with Exporting(receiver.endpoint) as exporting:
            idle = _idle(exporting.pid, seconds)
            ours = [_of_ours(engine, exporting, receiver, seconds) for _ in range(-(-parts // 3))]
            out = _sampled_out(engine, exporting, receiver, seconds / SHORTER, unsampled)
            memory = machine.peak_memory(exporting.pid)
            engine.churning = False
            calm = _of_ours(engine, exporting, receiver, seconds)
    return [
        *_loss([*alone, *ours], theirs),
        *_cpu(alone, ours, theirs, unhurried, idle),
        *_sampled_out_lines(*out, unsampled),
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
            theirs.append(part(engine, StockBinding(engine, stock), receiver, stock.flush, 0, seconds))
    return ours, theirs


def _of_ours(engine: Engine, exporting: Exporting, receiver: Receiver, seconds: float) -> Part:
    return part(engine, Binding(engine), receiver, exporting.flush, exporting.pid, seconds)


def _sampled_out(
    engine: Engine, exporting: Exporting, receiver: Receiver, seconds: float, parts: int
) -> tuple[list[Part], list[Part]]:
    """The same, of callers who do not sample. So little is used that the machine's own pace weighs more: many short parts, until
    enough were undisturbed, or patience ends. There is nothing to flush after each."""
    ours, theirs, stock = [], [], Stock(receiver.endpoint, sampled=False)
    while len(ours) < PATIENCE * parts:
        unsampled = Binding(engine, sampled=False)
        ours.append(part(engine, unsampled, receiver, _nothing, exporting.pid, seconds))
        theirs.append(part(engine, StockBinding(engine, stock), receiver, _nothing, 0, seconds))
        if len(ours) >= parts and _undisturbed(list(zip(ours, theirs)), parts)[1].holds:
            break
    exporting.flush()
    stock.flush()
    last = receiver.counted()
    theirs[-1] = theirs[-1]._replace(arrived={"spans": theirs[-1].arrived["spans"] + last["spans"]})
    stock.close()
    return ours, theirs


def _nothing() -> None:
    """In the place of a flush."""


def part(
    engine: Engine,
    binding: Any,
    receiver: Receiver,
    flush: Callable[[], None],
    sidecar: int,
    seconds: float,
    offered: int = OFFERED,
) -> Part:
    """One part at `offered` step spans a second: a bare half before and after the hooked one, whose CPU is subtracted."""
    bare_taken, _, probes = paced(engine, seconds / 2, offered)
    if binding is None:
        return Part(0, 0, 0, {}, 0, 0, probes)
    binding.put_on()
    steps = engine.steps
    sidecar_cpu = machine.cpu_ns(sidecar) if sidecar else 0
    taken, lasted, more = paced(engine, seconds, offered)
    rate = (engine.steps - steps) * engine.size / lasted
    binding.take_off()
    expected = binding.end_all()  # as many arrived before the part as end after it
    before = time.process_time_ns()
    flush()
    taken += time.process_time_ns() - before
    sidecar_cpu = machine.cpu_ns(sidecar) - sidecar_cpu if sidecar else 0
    bare_after, _, last = paced(engine, seconds / 2, offered)
    engine.answered.clear()
    server_cpu = taken - bare_taken - bare_after
    return Part(rate, lasted, expected, receiver.counted(), server_cpu, sidecar_cpu, probes + more + last)


def paced(engine: Engine, seconds: float, offered: int) -> tuple[int, float, list[int]]:
    """Steps at the pace that offers so many spans a second; process CPU without that of the pauses, the seconds it took, and
    the probe of `neighbours` before each step.

    Who falls behind does not catch up: what was not offered in time is not offered.
    """
    pause = engine.size / offered
    began, everything, this_thread = time.perf_counter(), time.process_time_ns(), time.thread_time_ns()
    stepping, probes = 0, []
    for _ in at_pace(int(seconds / pause), pause):
        probes.append(neighbours.probe())
        before = time.thread_time_ns()
        engine.step()
        stepping += time.thread_time_ns() - before
    others = (time.process_time_ns() - everything) - (time.thread_time_ns() - this_thread)
    return stepping + others, time.perf_counter() - began, probes


def _idle(pid: int, seconds: float) -> float:
    """The sidecar's CPU, as a share of a core, while nothing happens."""
    began = machine.cpu_ns(pid)
    time.sleep(seconds)
    return (machine.cpu_ns(pid) - began) / seconds / 1e9


def _loss(ours: list[Part], theirs: list[Part]) -> list[Line]:
    rate = min(part.rate for part in ours)
    offered = Control(f"{rate:,.0f}/s offered", rate >= OFFERED * (1 - PACE_LIMIT))
    together = Counter[str]()
    for part in ours:
        together.update({name: part.arrived[name] for name in ("steps", "spans", "unique")})
    stock_lost = median([100 * (1 - part.arrived["steps"] / part.expected) for part in theirs])
    stock_rate = median([part.rate for part in theirs]).value
    said = f"{OFFERED // 1000}k step spans/s"
    return [
        lost_line(f"{said}: lost or doubled, ours", sum(part.expected for part in ours), together, offered),
        line(f"{said}: lost, stock SDK", "%", stock_lost, note=f"it got {stock_rate:,.0f}/s made"),
    ]


def _cpu(alone: list[Part], ours: list[Part], theirs: list[Part], unhurried: Part, idle: float) -> list[Line]:
    calm = unhurried.server_cpu / unhurried.arrived["spans"]
    lost = 1 - unhurried.arrived["steps"] / unhurried.expected
    calm_note = f"stock {calm / 1000:.1f} µs at {unhurried.rate:,.0f}/s, where it loses {lost:.0%}"
    sidecar, by_default = (
        median([part.sidecar_cpu / part.arrived["spans"] for part in parts]) for parts in (alone, ours)
    )
    stock = median([part.server_cpu / part.arrived["spans"] for part in theirs])
    gate = Gate(CPU_FACTOR, at_least=True)
    note = f"stock {stock.value / 1000:.1f} µs [{stock.low / 1000:.1f}, {stock.high / 1000:.1f}]"
    below = "CPU per exported span, below the stock SDK"
    return [
        line(f"{below}: sidecar, spans alone", "×", _times(alone, theirs, 0), gate, note=note),
        line(f"{below}: sidecar and server, spans alone", "×", _times(alone, theirs, 1)),
        line(
            f"{below}: sidecar, with metrics besides", "×", _below(stock.value, by_default), note=_share(ours)
        ),
        line(
            f"{below} where that loses nothing: sidecar, spans alone",
            "×",
            _below(calm, sidecar),
            note=calm_note,
        ),
        line("CPU per exported span: sidecar, spans alone", "µs", sidecar.scaled(1 / 1000)),
        line("CPU per exported span: sidecar, with metrics besides", "µs", by_default.scaled(1 / 1000)),
        line("CPU of the sidecar while nothing happens", "% of a core", exactly(idle * 100)),
    ]


def _below(theirs: float, ours: Figure) -> Figure:
    return Figure(*(theirs / one for one in (ours.value, ours.high, ours.low)))


def _sampled_out_lines(ours: list[Part], theirs: list[Part], wanted: int) -> list[Line]:
    """What a token costs of which nothing is exported; in µs it is said by `retention`."""
    below = "CPU per token sampled out, below the stock SDK"
    pairs, control = _undisturbed(list(zip(ours, theirs)), wanted)
    server = [(b.server_cpu / b.expected) / (a.server_cpu / a.expected) for a, b in pairs]
    both = [(b.server_cpu / b.expected) / ((a.server_cpu + a.sidecar_cpu) / a.expected) for a, b in pairs]
    note = f"stock {median([b.server_cpu / b.expected for b in theirs]).value / 1000:.2f} µs"
    exported = sum(part.arrived["spans"] for part in (*ours, *theirs))
    return [
        line(f"{below}: server", "×", median(server), Gate(OUT_FACTOR, at_least=True), control, note),
        line(f"{below}: sidecar and server", "×", median(both)),
        line("sampled out and exported all the same", "spans", exactly(exported), Gate(0)),
    ]


def _undisturbed(pairs: list[tuple[Part, Part]], wanted: int) -> tuple[list[tuple[Part, Part]], Control]:
    """Those during most of whose steps nobody else emptied the caches, or all where those are too few of the wanted ones."""
    limit = neighbours.undisturbed_below(np.concatenate([part.probes for pair in pairs for part in pair]))
    quiet = [
        pair for pair in pairs if all(np.mean(np.array(part.probes) <= limit) >= MOSTLY for part in pair)
    ]
    control = Control(f"{len(quiet)} of {len(pairs)} parts undisturbed", len(quiet) >= LEAST * wanted)
    return quiet if control.holds else pairs, control


def _times(ours: list[Part], theirs: list[Part], server: int) -> Figure:
    """How many times less, from one part to the next; with the CPU used in the server, or without."""
    return median(
        [
            (stock.server_cpu / stock.arrived["spans"])
            / ((our.sidecar_cpu + server * our.server_cpu) / our.arrived["spans"])
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
