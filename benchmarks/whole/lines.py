"""The rows of the table for one server, and whether they are conclusive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks import verdict
from benchmarks.verdict import Control, Figure, Gate, Line, make_line
from benchmarks.whole.gil_samples import SAMPLES
from benchmarks.whole.measurement import ServerResult
from benchmarks.whole.servers import ServedLoad
from benchmarks.whole.switched_server import OFF, ON

GIL_GATE, SIDECAR_GATE, CPU_GATE = Gate(0.8), Gate(0.5), Gate(40.0)
CORES = 2


FigurePair = tuple[dict[str, float], dict[str, float]]
"""The figures of a round, with hooks and without them."""


class Loss(NamedTuple):
    """A figure of the rounds, how it becomes worse, and the gate for that, %; None for information."""

    figure: str
    claim: str
    gate: float | None
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
    control = check_requests(result) or too_short
    return [
        *(make_estimated_line(loss, control) for loss in estimate_losses(served, result)),
        _make_sidecar_line(served, result, too_short),
        _make_samples_line(served, result, too_short),
    ]


def check_requests(result: ServerResult) -> Control | None:
    """Returns a control that does not hold if a request failed, else None."""
    failed = sum(figures["errors"] for states in result.rounds for figures in states.values())
    return Control(f"{failed:.0f} requests failed", False) if failed else None


def are_rounds_conclusive(served: ServedLoad, result: ServerResult) -> bool:
    """Returns whether further rounds would hardly change a verdict: bounds are narrow, or all above the gate."""
    return all(
        not _is_wide(loss.figure, loss.gate.limit) or loss.figure.low > loss.gate.limit
        for loss in estimate_losses(served, result)
        if loss.gate is not None
    )


def estimate_losses(
    served: ServedLoad, result: ServerResult, state: str = ON, losses: Sequence[Loss] = LOSSES
) -> list[EstimatedLoss]:
    """Returns what is lost of the load in a state, against the server without hooks, and the CPU time that the server takes
    more, by the medians of all rounds."""
    pairs = [(states[state], states[OFF]) for states in result.rounds]
    has_gaps = served.kind == "streams"
    estimated = [
        _estimate_loss(served, loss, pairs)
        for loss in losses
        if has_gaps or not loss.figure.startswith("gap")
    ]
    return [*estimated, _estimate_cpu(served, pairs)]


def _estimate_loss(served: ServedLoad, loss: Loss, pairs: Sequence[FigurePair]) -> EstimatedLoss:
    values = [(on[loss.figure], off[loss.figure]) for on, off in pairs]
    shares = [on / off - 1 if loss.is_more_worse else 1 - on / off for on, off in values]
    first = "time to the first token" if served.kind == "streams" else "time to the answer"
    claim = f"{served.title}: {loss.claim.format(unit=served.unit, first=first)}"
    figure = verdict.estimate_median(shares).scale_by(100)
    gate = None if loss.gate is None else Gate(loss.gate)
    return EstimatedLoss(claim, "%", figure, gate, _describe_off(loss, values))


def _estimate_cpu(served: ServedLoad, pairs: Sequence[FigurePair]) -> EstimatedLoss:
    figure = verdict.estimate_median([(on["cpu"] - off["cpu"]) * 1e6 for on, off in pairs])
    bare = verdict.estimate_median([off["cpu"] * 1e6 for _, off in pairs]).value
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
