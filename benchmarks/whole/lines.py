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


class EstimatedLoss(NamedTuple):
    """A loss by estimate, with its gate; None for information."""

    claim: str
    unit: str
    figure: Figure
    gate: Gate | None
    note: str


LOSSES = (
    Loss("rate", "{unit}s/s lost", 1.0, is_more_worse=False),
    Loss("gap_p50", "gap between tokens, p50", 1.0),
    Loss("gap_p99", "gap between tokens, p99", 2.0),
    Loss("first_p99", "{first}, p99", 2.0),
)


def make_lines(served: ServedLoad, result: ServerResult, is_quick: bool) -> list[Line]:
    """Returns the rows of a server."""
    too_short = Control("too short", False) if is_quick else None
    failed = sum(pair[state]["errors"] for pair in result.rounds for state in ("on", "off"))
    control = Control(f"{failed:.0f} requests failed", False) if failed else too_short
    return [
        *(make_estimated_line(loss, control) for loss in estimate_losses(served, result)),
        _make_sidecar_line(served, result, too_short),
        _make_samples_line(served, result, too_short),
    ]


def are_rounds_conclusive(served: ServedLoad, result: ServerResult) -> bool:
    """Returns whether further rounds would hardly change a verdict: bounds are narrow, or all above the gate."""
    return all(
        not _is_wide(loss.figure, loss.gate.limit) or loss.figure.low > loss.gate.limit
        for loss in estimate_losses(served, result)
        if loss.gate is not None
    )


def estimate_losses(served: ServedLoad, result: ServerResult) -> list[EstimatedLoss]:
    """Returns what is lost of the load, and the CPU time that the server takes more, by the medians of all rounds."""
    losses = [
        _estimate_loss(served, loss, result)
        for loss in LOSSES
        if served.kind == "streams" or not loss.figure.startswith("gap")
    ]
    return [*losses, _estimate_cpu(served, result)]


def _estimate_loss(served: ServedLoad, loss: Loss, result: ServerResult) -> EstimatedLoss:
    pairs = [(pair["on"][loss.figure], pair["off"][loss.figure]) for pair in result.rounds]
    shares = [on / off - 1 if loss.is_more_worse else 1 - on / off for on, off in pairs]
    first = "time to the first token" if served.kind == "streams" else "time to the answer"
    claim = f"{served.title}: {loss.claim.format(unit=served.unit, first=first)}"
    figure = verdict.estimate_median(shares).scale_by(100)
    return EstimatedLoss(claim, "%", figure, Gate(loss.gate), _describe_off(loss, pairs))


def _estimate_cpu(served: ServedLoad, result: ServerResult) -> EstimatedLoss:
    figure = verdict.estimate_median(
        [(pair["on"]["cpu"] - pair["off"]["cpu"]) * 1e6 for pair in result.rounds]
    )
    bare = verdict.estimate_median([pair["off"]["cpu"] * 1e6 for pair in result.rounds]).value
    claim, note = f"{served.title}: CPU of the server per {served.unit}", f"{bare:.0f} µs without hooks"
    return EstimatedLoss(claim, "µs", figure, CPU_GATE if served.is_cpu_gated else None, note)


def make_estimated_line(loss: EstimatedLoss, control: Control | None = None) -> Line:
    """Returns a row that is judged by its estimate. Without a gate it is for information."""
    line = make_line(loss.claim, loss.unit, loss.figure, loss.gate, control, loss.note)
    if loss.gate is not None and control is None:
        line.verdict = judge_estimate(loss.figure, loss.gate.limit)
    return line


def judge_estimate(figure: Figure, limit: float) -> str:
    """Fails an estimate above the limit whose lower bound is above 0. Otherwise the bounds must be narrow to pass."""
    if any(math.isnan(number) for number in figure):
        return verdict.INCONCLUSIVE
    if figure.value > limit and figure.low > 0:
        return verdict.FAIL
    return verdict.INCONCLUSIVE if _is_wide(figure, limit) or figure.value > limit else verdict.PASS


def _is_wide(figure: Figure, limit: float) -> bool:
    return not (figure.high - figure.low) / 2 <= limit  # NaN is wide


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
    if control is None:
        line.verdict = verdict.PASS if figure.value <= gate.limit else verdict.FAIL
    return line


def describe_samples(result: ServerResult, places: int = 8) -> str:
    """Returns the number of samples, our share in each process, and our top places."""
    samples, running = result.samples, result.running_samples
    total = samples["total"]
    parts = [f"{samples['ours']} of {total:,} samples"]
    if running.get("total"):
        share = 100 * running["ours"] / running["total"]
        parts.append(f"{share:.2f} % of {running['total']:,} without stops and native frames")
    if samples["missing"]:
        parts.append(samples["missing"])
    if len(samples["processes"]) > 1:
        parts += [f"{name} {ours} of {all_:,}" for name, (all_, ours) in samples["processes"].items()]
    hooks = list(samples["hooks"].items())[:places]
    return "; ".join(parts + [f"{100 * count / total:.2f} % {place}" for place, count in hooks])


def _estimate_share(count: int, total: int) -> Figure:
    """Returns a share of samples, %, with one-sided 95 % bounds (Wilson's)."""
    if not total:
        return Figure(*[float("nan")] * 3)
    z, share = 1.645, count / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    width = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total)) / (1 + z * z / total)
    return Figure(100 * share, 100 * (centre - width), 100 * (centre + width))
