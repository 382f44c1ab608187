"""Figures with their uncertainty, gates, and the verdicts.

`low` and `high` are one-sided 95 % bounds of the median, by bootstrap over rounds. A gate passes by the bound, not by
the median. Nothing passes if its control does not hold. No round is removed for its result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

PASS, FAIL, INCONCLUSIVE, INFORMATION = "pass", "fail", "inconclusive", "—"
RESAMPLES = 4000
CONTROL_LIMIT = 0.005
"""Largest difference of bare from bare, as a share: half of the tightest gate."""


class Figure(NamedTuple):
    """A median and its one-sided 95 % bounds."""

    value: float
    low: float
    high: float

    def scale_by(self, factor: float) -> Figure:
        """Returns the figure in another unit."""
        return Figure(*(number * factor for number in self))


class Gate(NamedTuple):
    """A limit: the least value if `at_least`, else the largest."""

    limit: float
    at_least: bool = False

    def format_limit(self, unit: str) -> str:
        """Returns the cell of the table."""
        return f"{'≥' if self.at_least else '≤'} {_format_number(self.limit)}{_format_unit(unit)}"


class Control(NamedTuple):
    """A condition without which the figure has no meaning, such as the difference of bare from bare."""

    text: str
    holds: bool


@dataclass
class Line:
    """One row of the table."""

    claim: str
    unit: str
    value: float
    low: float
    high: float
    gate: str
    control: str
    verdict: str
    note: str = ""


def make_line(
    claim: str,
    unit: str,
    figure: Figure,
    gate: Gate | None = None,
    control: Control | None = None,
    note: str = "",
) -> Line:
    """Returns a row with its verdict. A row without a gate is for information only."""
    verdict = INFORMATION if gate is None else _judge_figure(figure, gate, control)
    return Line(
        claim,
        unit,
        *figure,
        gate=gate.format_limit(unit) if gate else "",
        control=control.text if control else "",
        verdict=verdict,
        note=note,
    )


def _judge_figure(figure: Figure, gate: Gate, control: Control | None) -> str:
    if (control is not None and not control.holds) or np.isnan(figure).any():
        return INCONCLUSIVE
    sign = -1 if gate.at_least else 1
    worst = figure.low if gate.at_least else figure.high
    if sign * worst <= sign * gate.limit:
        return PASS
    return FAIL if sign * figure.value > sign * gate.limit else INCONCLUSIVE


def make_exact(value: float) -> Figure:
    """Returns a figure without uncertainty: a count, or a single measurement."""
    return Figure(value, value, value)


def make_lost_line(
    claim: str, expected: int, arrived: dict[str, Any], control: Control | None = None
) -> Line:
    """Returns the row of step spans that are missing, duplicate or unexpected."""
    lost = abs(expected - arrived["steps"]) + arrived["spans"] - arrived["unique"]
    note = f"{expected:,} expected, {arrived['steps']:,} arrived; {arrived['spans']:,} spans, {arrived['unique']:,} unique ids"
    return make_line(claim, "", make_exact(float(lost)), Gate(0), control, note)


def estimate_median(rounds: Sequence[float]) -> Figure:
    """Returns the median of one number per round."""
    column = np.asarray(rounds, float)
    return bootstrap_figure(len(column), lambda rows: float(np.median(column[rows])))


def compare_percentiles(above: Sequence[Any], below: Sequence[Any], percent: float) -> Figure:
    """Returns a percentile of all of `above` over that of all of `below`, minus 1. Both have one array of steps per
    round."""
    return bootstrap_figure(
        len(above),
        lambda rows: pool_percentile(above, rows, percent) / pool_percentile(below, rows, percent) - 1,
    )


def pool_percentile(blocks: Sequence[Any], rows: Sequence[int], percent: float) -> float:
    """Returns a percentile over the steps of these rounds."""
    return float(np.percentile(np.concatenate([blocks[row] for row in rows]), percent))


def bootstrap_figure(rounds: int, statistic: Callable[[Any], float]) -> Figure:
    """Returns a statistic of rounds (given as row numbers), with bounds by resampling the rounds."""
    if rounds < 2:
        return Figure(statistic(np.arange(rounds)), float("nan"), float("nan"))
    rng = np.random.default_rng(1)
    resampled = [statistic(rng.integers(0, rounds, rounds)) for _ in range(RESAMPLES)]
    low, high = np.percentile(resampled, (5, 95))
    return Figure(statistic(np.arange(rounds)), float(low), float(high))


def make_control(figure: Figure, limit: float = CONTROL_LIMIT) -> Control:
    """Returns the control of a ratio of bare to bare, which should be 0."""
    return Control(f"{figure.value * 100:+.2f} %", abs(figure.value) <= limit)


def relax_control(control: Control, worst: Figure, gate: Gate) -> Control:
    """Returns a control that also holds if the gate passes with the difference of bare from bare counted as our
    cost."""
    return Control(control.text, control.holds or worst.low >= gate.limit)


def combine_controls(*controls: Control) -> Control:
    """Returns a control that holds if all of them hold."""
    return Control(
        ", ".join(control.text for control in controls), all(control.holds for control in controls)
    )


def divide_figures(ours: Figure, stock: Figure) -> Figure:
    """Returns `stock` over `ours`, with bounds from opposite ends. A cost that may be 0 gives infinity."""

    def ratio(above: float, below: float) -> float:
        return float("inf") if below <= 0 else above / below

    return Figure(ratio(stock.value, ours.value), ratio(stock.low, ours.high), ratio(stock.high, ours.low))


def format_rows(lines: Sequence[Line]) -> list[tuple[str, str, str, str, str, str]]:
    """Returns claim, gate, measured, bounds, control and verdict of each line."""
    return [
        (
            line.claim,
            line.gate,
            f"{_format_number(line.value)}{_format_unit(line.unit)}",
            "" if line.low == line.high else f"[{_format_number(line.low)}, {_format_number(line.high)}]",
            line.control,
            line.verdict if line.verdict != INCONCLUSIVE else INCONCLUSIVE.upper(),
        )
        for line in lines
    ]


def save_lines(lines: Sequence[Line], path: Path, environment: dict[str, Any]) -> None:
    """Writes all figures as JSON."""
    path.write_text(
        json.dumps({**environment, "lines": [asdict(line) for line in lines]}, indent=1, ensure_ascii=False)
    )


def load_lines(path: Path) -> list[Line]:
    """Reads the lines that `save_lines` wrote."""
    return [Line(**line) for line in json.loads(path.read_text())["lines"]]


def _format_number(value: float) -> str:
    if value != value:
        return "?"
    if abs(value) == float("inf"):
        return "∞"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value == int(value) else f"{value:.3g}"


def _format_unit(unit: str) -> str:
    return unit if unit in ("", "×") else f" {unit}"
