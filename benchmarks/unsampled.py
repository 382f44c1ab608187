"""CPU time per token of requests whose callers do not sample, under the load of `throughput`."""

from __future__ import annotations

import numpy as np

from benchmarks import neighbours
from benchmarks.blocks import MAX_TIMES_ROUNDS
from benchmarks.engine import Engine
from benchmarks.ours import Binding, Exporting
from benchmarks.parts import Part, do_nothing, measure_part
from benchmarks.receiver import Receiver
from benchmarks.stock import Stock, StockBinding
from benchmarks.verdict import Control, Gate, Line, estimate_median, make_exact, make_line

FACTOR = 10.0
TIMES_SHORTER = 16
"""How much shorter than the parts of `throughput` these parts are."""
MIN_UNDISTURBED_STEPS, MIN_UNDISTURBED_PARTS = 0.7, 0.25
"""The undisturbed share of its steps that makes a part undisturbed, and the least undisturbed share of the wanted parts."""

Pair = tuple[Part, Part]
"""A part with otel_infer and one with the stock SDK."""


def measure_pairs(
    engine: Engine, exporting: Exporting, receiver: Receiver, seconds: float, wanted: int
) -> list[Pair]:
    """Measures both in turn, until enough parts are undisturbed. The parts are short, because the cost is small against changes of
    the machine's pace. No flush follows a part."""
    pairs: list[Pair] = []
    stock = Stock(receiver.endpoint, sampled=False)
    while len(pairs) < MAX_TIMES_ROUNDS * wanted:
        binding = Binding(engine, sampled=False)
        ours = measure_part(engine, binding, receiver, do_nothing, exporting.pid, seconds)
        theirs = measure_part(engine, StockBinding(engine, stock), receiver, do_nothing, 0, seconds)
        pairs.append((ours, theirs))
        if len(pairs) >= wanted and _select_undisturbed(pairs, wanted)[1].holds:
            break
    exporting.flush()
    stock.flush()
    ours, theirs = pairs[-1]
    spans = theirs.arrived["spans"] + receiver.read_counts()["spans"]
    pairs[-1] = ours, theirs._replace(arrived={"spans": spans})
    stock.close()
    return pairs


def make_lines(pairs: list[Pair], wanted: int) -> list[Line]:
    """Returns the comparison with the stock SDK, and whether any span was exported."""
    below = "CPU per token sampled out, below the stock SDK"
    selected, control = _select_undisturbed(pairs, wanted)
    stock = [theirs.server_cpu / theirs.expected for _, theirs in selected]
    server = [ours.server_cpu / ours.expected for ours, _ in selected]
    both = [(ours.server_cpu + ours.sidecar_cpu) / ours.expected for ours, _ in selected]
    note = f"stock {estimate_median(stock).value / 1000:.2f} µs"
    exported = sum(part.arrived["spans"] for pair in pairs for part in pair)
    gate = Gate(FACTOR, at_least=True)
    return [
        make_line(
            f"{below}: server", "×", estimate_median(np.divide(stock, server).tolist()), gate, control, note
        ),
        make_line(f"{below}: sidecar and server", "×", estimate_median(np.divide(stock, both).tolist())),
        make_line("spans exported although sampled out", "spans", make_exact(exported), Gate(0)),
    ]


def _select_undisturbed(pairs: list[Pair], wanted: int) -> tuple[list[Pair], Control]:
    """Returns the pairs in which most steps were undisturbed, or all pairs if there are too few of them."""
    limit = neighbours.compute_limit(np.concatenate([part.probes for pair in pairs for part in pair]))
    undisturbed = [
        pair
        for pair in pairs
        if all(np.mean(np.array(part.probes) <= limit) >= MIN_UNDISTURBED_STEPS for part in pair)
    ]
    control = Control(
        f"{len(undisturbed)} of {len(pairs)} parts undisturbed",
        len(undisturbed) >= MIN_UNDISTURBED_PARTS * wanted,
    )
    return undisturbed if control.holds else pairs, control
