"""The rows of the table for one server, and whether they are conclusive."""

from __future__ import annotations

import math
from typing import NamedTuple

from benchmarks import verdict
from benchmarks.verdict import Control, Figure, Gate, Line, make_line
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
    too_short = Control("too short", False) if is_quick else None
    return [
        *make_round_lines(served, result, too_short),
        _make_sidecar_line(served, result, too_short),
        _make_samples_line(served, result, too_short),
    ]


def are_rounds_conclusive(served: ServedLoad, result: ServerResult) -> bool:
    """Returns whether every gated row of the rounds has a verdict."""
    return all(line.verdict != verdict.INCONCLUSIVE for line in make_round_lines(served, result))


def make_round_lines(served: ServedLoad, result: ServerResult, control: Control | None = None) -> list[Line]:
    """Returns what is lost of the load, and the CPU time of the server. A failed request leaves no conclusion."""
    failed = sum(pair[state]["errors"] for pair in result.rounds for state in ("on", "off"))
    control = Control(f"{failed:.0f} requests failed", False) if failed else control
    lines = [
        _make_loss_line(served, loss, result, control)
        for loss in LOSSES
        if served.kind == "streams" or not loss.figure.startswith("gap")
    ]
    return [*lines, _make_cpu_line(served, result, control)]


def _make_loss_line(served: ServedLoad, loss: Loss, result: ServerResult, control: Control | None) -> Line:
    pairs = [(pair["on"][loss.figure], pair["off"][loss.figure]) for pair in result.rounds]
    shares = [on / off - 1 if loss.is_more_worse else 1 - on / off for on, off in pairs]
    first = "time to the first token" if served.kind == "streams" else "time to the answer"
    claim = f"{served.title}: {loss.claim.format(unit=served.unit, first=first)}"
    figure = verdict.estimate_median(shares).scale_by(100)
    return make_gated_line(claim, "%", figure, Gate(loss.gate), control, _describe_off(loss, pairs))


def _make_cpu_line(served: ServedLoad, result: ServerResult, control: Control | None) -> Line:
    costs = [(pair["on"]["cpu"] - pair["off"]["cpu"]) * 1e6 for pair in result.rounds]
    bare = verdict.estimate_median([pair["off"]["cpu"] * 1e6 for pair in result.rounds])
    claim, note = f"{served.title}: CPU of the server per {served.unit}", f"{bare.value:.0f} µs without hooks"
    figure = verdict.estimate_median(costs)
    if not served.is_cpu_gated:
        return make_line(claim, "µs", figure, control=control, note=note)
    return make_gated_line(claim, "µs", figure, CPU_GATE, control, note)


def make_gated_line(
    claim: str, unit: str, figure: Figure, gate: Gate, control: Control | None = None, note: str = ""
) -> Line:
    """Returns a row that is judged by its estimate."""
    line = make_line(claim, unit, figure, gate, control, note)
    if control is None or control.holds:
        line.verdict = judge_estimate(figure, gate.limit)
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


def _make_sidecar_line(served: ServedLoad, result: ServerResult, control: Control | None) -> Line:
    figure = verdict.estimate_median([100 * share / CORES for share in result.sidecar])
    claim = f"{served.title}: sidecar, share of both cores"
    return _make_exact_line(claim, figure, SIDECAR_GATE, control)


def _make_samples_line(served: ServedLoad, result: ServerResult, control: Control | None) -> Line:
    total = result.samples["total"]
    if total < SAMPLES:
        control = Control(f"{total:,} samples", False)
    claim = f"{served.title}: samples of who holds the GIL that are ours"
    figure = _estimate_share(result.samples["ours"], total)
    return _make_exact_line(claim, figure, GIL_GATE, control, describe_samples(result))


def _make_exact_line(claim: str, figure: Figure, gate: Gate, control: Control | None, note: str = "") -> Line:
    """Returns a row that is judged by its value alone."""
    line = make_line(claim, "%", figure, gate, control, note)
    if control is None or control.holds:
        line.verdict = verdict.PASS if figure.value <= gate.limit else verdict.FAIL
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
    return "; ".join(parts + [f"{100 * n / total:.2f} % {place}" for place, n in samples["hooks"][:places]])


def _estimate_share(count: int, total: int) -> Figure:
    """Returns a share of samples, %, with one-sided 95 % bounds (Wilson's)."""
    if not total:
        return Figure(*[float("nan")] * 3)
    z, share = 1.645, count / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    width = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total)) / (1 + z * z / total)
    return Figure(100 * share, 100 * (centre - width), 100 * (centre + width))
