"""The rows of the table for one server, and whether they are conclusive."""

from __future__ import annotations

import math
from typing import NamedTuple

from benchmarks import verdict
from benchmarks.verdict import Figure, Gate, Line, make_line
from benchmarks.whole.gil_samples import SAMPLES
from benchmarks.whole.measurement import ServerResult
from benchmarks.whole.servers import ServedLoad

GIL_GATE, SIDECAR_GATE, CPU_GATE = Gate(0.8), Gate(0.5), Gate(40.0)
CORES = 2


class Loss(NamedTuple):
    """A figure of the rounds, how it becomes worse, and the gate for that, %."""

    figure: str
    claim: str
    gate: float
    is_more_worse: bool = True


LOSSES = (
    Loss("rate", "{unit}s/s lost", 1.0, is_more_worse=False),
    Loss("gap_p50", "gap between tokens, p50", 1.0),
    Loss("gap_p99", "gap between tokens, p99", 2.0),
    Loss("first_p99", "{first}, p99", 2.0),
)


def make_lines(served: ServedLoad, result: ServerResult, is_quick: bool) -> list[Line]:
    """Returns the rows of a server; those that are not applicable are left out."""
    lines = make_loss_lines(served, result, is_quick)
    lines.append(make_cpu_line(served, result, is_quick))
    lines.append(_make_sidecar_line(served, result, is_quick))
    lines.append(_make_samples_line(served, result))
    return lines


def are_rounds_conclusive(served: ServedLoad, result: ServerResult) -> bool:
    """Returns whether every gated row of the rounds has a verdict."""
    lines = [*make_loss_lines(served, result, False), make_cpu_line(served, result, False)]
    return all(line.verdict != verdict.INCONCLUSIVE for line in lines)


def make_loss_lines(served: ServedLoad, result: ServerResult, is_quick: bool) -> list[Line]:
    """Returns what is lost of the load, %."""
    lines = []
    for loss in LOSSES:
        if loss.figure.startswith("gap") and served.kind != "streams":
            continue
        pairs = [(pair["on"][loss.figure], pair["off"][loss.figure]) for pair in result.rounds]
        figure = verdict.estimate_median(
            [100 * ((on / off - 1) if loss.is_more_worse else (1 - on / off)) for on, off in pairs]
        )
        first = "time to the first token" if served.kind == "streams" else "time to the answer"
        claim = f"{served.title}: {loss.claim.format(unit=served.unit, first=first)}"
        lines.append(make_gated_line(claim, "%", figure, Gate(loss.gate), is_quick, _describe_off(loss, pairs)))
    return lines


def make_cpu_line(served: ServedLoad, result: ServerResult, is_quick: bool) -> Line:
    """Returns the CPU time that the server takes more for a token or a request, µs."""
    costs = [(pair["on"]["cpu"] - pair["off"]["cpu"]) * 1e6 for pair in result.rounds]
    bare = verdict.estimate_median([pair["off"]["cpu"] * 1e6 for pair in result.rounds])
    claim = f"{served.title}: CPU of the server per {served.unit}"
    note = f"{bare.value:.0f} µs without hooks"
    figure = verdict.estimate_median(costs)
    if served.is_cpu_gated:
        return make_gated_line(claim, "µs", figure, CPU_GATE, is_quick, note)
    return make_line(claim, "µs", figure, note=note)


def make_gated_line(
    claim: str, unit: str, figure: Figure, gate: Gate, is_quick: bool = False, note: str = ""
) -> Line:
    """Returns a row that is judged by its estimate."""
    line = make_line(claim, unit, figure, gate, note=note)
    line.verdict = verdict.INCONCLUSIVE if is_quick else judge_estimate(figure, gate.limit)
    return line


def judge_estimate(figure: Figure, limit: float) -> str:
    """Fails an estimate above the limit whose lower bound is above 0. Otherwise the bounds must be narrow to pass."""
    if any(math.isnan(number) for number in figure):
        return verdict.INCONCLUSIVE
    if figure.value > limit and figure.low > 0:
        return verdict.FAIL
    is_wide = (figure.high - figure.low) / 2 > limit
    return verdict.INCONCLUSIVE if is_wide or figure.value > limit else verdict.PASS


def _describe_off(loss: Loss, pairs: list[tuple[float, float]]) -> str:
    bare = verdict.estimate_median([off for _, off in pairs]).value
    shown = f"{bare:,.1f}/s" if loss.figure == "rate" else f"{bare * 1000:.2f} ms"
    return f"{shown} without hooks, {len(pairs)} rounds"


def _make_sidecar_line(served: ServedLoad, result: ServerResult, is_quick: bool) -> Line:
    figure = verdict.estimate_median([100 * share / CORES for share in result.sidecar])
    line = make_line(f"{served.title}: sidecar, share of both cores", "%", figure, SIDECAR_GATE)
    line.verdict = verdict.INCONCLUSIVE if is_quick else _judge_exact(figure.value, SIDECAR_GATE)
    return line


def _make_samples_line(served: ServedLoad, result: ServerResult) -> Line:
    total, ours = result.samples["total"], result.samples["ours"]
    figure = _estimate_share(ours, total)
    line = make_line(f"{served.title}: samples of who holds the GIL that are ours", "%", figure, GIL_GATE)
    line.verdict = _judge_exact(figure.value, GIL_GATE) if total >= SAMPLES else verdict.INCONCLUSIVE
    line.note = describe_samples(result)
    return line


def describe_samples(result: ServerResult, places: int = 8) -> str:
    """Returns the number of samples, our share in each process, and our top places."""
    samples = result.samples
    total = samples["total"]
    parts = [f"{samples['ours']} of {total:,} samples"]
    if samples["missing"]:
        parts.append(samples["missing"])
    if len(samples["processes"]) > 1:
        parts += [f"{name} {ours} of {all_:,}" for name, (all_, ours) in samples["processes"].items()]
    return "; ".join(parts + [f"{100 * n / total:.2f} % {place}" for place, n in samples["places"][:places]])


def _estimate_share(count: int, total: int) -> Figure:
    """Returns a share of samples, %, with one-sided 95 % bounds (Wilson's)."""
    if not total:
        return Figure(*[float("nan")] * 3)
    z, share = 1.645, count / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    width = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total)) / (1 + z * z / total)
    return Figure(100 * share, 100 * (centre - width), 100 * (centre + width))


def _judge_exact(value: float, gate: Gate) -> str:
    return verdict.PASS if value <= gate.limit else verdict.FAIL
