"""What a token costs of which nothing is exported: the load of `throughput`, of callers who do not sample."""

from __future__ import annotations

import numpy as np

from benchmarks import neighbours
from benchmarks.blocks import PATIENCE
from benchmarks.engine import Engine
from benchmarks.ours import Binding, Exporting
from benchmarks.parts import Part, nothing, part
from benchmarks.receiver import Receiver
from benchmarks.stock import Stock, StockBinding
from benchmarks.verdict import Control, Gate, Line, exactly, line, median

FACTOR = 10.0
SHORTER = 16
"""So much shorter these parts are."""
MOSTLY, LEAST = 0.7, 0.25
"""The share of its steps that makes a part an undisturbed one, and how many of those there must be, as a share of the parts that
are wanted."""


def sampled_out(
    engine: Engine, exporting: Exporting, receiver: Receiver, seconds: float, parts: int
) -> tuple[list[Part], list[Part]]:
    """Ours and the stock SDK in turn. So little is used that the machine's own pace weighs more: many short parts, until
    enough were undisturbed, or patience ends. There is nothing to flush after each."""
    ours, theirs, stock = [], [], Stock(receiver.endpoint, sampled=False)
    while len(ours) < PATIENCE * parts:
        unsampled = Binding(engine, sampled=False)
        ours.append(part(engine, unsampled, receiver, nothing, exporting.pid, seconds))
        theirs.append(part(engine, StockBinding(engine, stock), receiver, nothing, 0, seconds))
        if len(ours) >= parts and _undisturbed(list(zip(ours, theirs)), parts)[1].holds:
            break
    exporting.flush()
    stock.flush()
    last = receiver.counted()
    theirs[-1] = theirs[-1]._replace(arrived={"spans": theirs[-1].arrived["spans"] + last["spans"]})
    stock.close()
    return ours, theirs


def lines_of(ours: list[Part], theirs: list[Part], wanted: int) -> list[Line]:
    """What a token costs of which nothing is exported; in µs it is said by `retention`."""
    below = "CPU per token sampled out, below the stock SDK"
    pairs, control = _undisturbed(list(zip(ours, theirs)), wanted)
    server = [(b.server_cpu / b.expected) / (a.server_cpu / a.expected) for a, b in pairs]
    both = [(b.server_cpu / b.expected) / ((a.server_cpu + a.sidecar_cpu) / a.expected) for a, b in pairs]
    note = f"stock {median([b.server_cpu / b.expected for b in theirs]).value / 1000:.2f} µs"
    exported = sum(part.arrived["spans"] for part in (*ours, *theirs))
    return [
        line(f"{below}: server", "×", median(server), Gate(FACTOR, at_least=True), control, note),
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
