"""A figure with its uncertainty, held against its gate.

`low` and `high` are one-sided 95 % bounds of the median, by bootstrap over rounds. A gate is passed by the bound, not by
the median; nothing is passed under a control that is off; no round is left out for what came out of it.
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
"""How far uninstrumented against uninstrumented may be off, as a share: half of the tightest gate."""


class Figure(NamedTuple):
    """A median and its one-sided 95 % bounds."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> Figure:
        """The same in another unit."""
        return Figure(*(number * factor for number in self))


class Gate(NamedTuple):
    """`at_least`: the figure must reach the limit; else it must not exceed it."""

    limit: float
    at_least: bool = False

    def said(self, unit: str) -> str:
        """As it stands in the table."""
        return f"{'≥' if self.at_least else '≤'} {_number(self.limit)}{_unit(unit)}"


class Control(NamedTuple):
    """Uninstrumented against uninstrumented, or what else must hold for the figure to mean something."""

    said: str
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


def line(
    claim: str,
    unit: str,
    figure: Figure,
    gate: Gate | None = None,
    control: Control | None = None,
    note: str = "",
) -> Line:
    """A row with its verdict; without a gate it only informs."""
    verdict = INFORMATION if gate is None else _judged(figure, gate, control)
    return Line(
        claim,
        unit,
        *figure,
        gate=gate.said(unit) if gate else "",
        control=control.said if control else "",
        verdict=verdict,
        note=note,
    )


def _judged(figure: Figure, gate: Gate, control: Control | None) -> str:
    if (control is not None and not control.holds) or np.isnan(figure).any():
        return INCONCLUSIVE
    sign = -1 if gate.at_least else 1
    worst = figure.low if gate.at_least else figure.high
    if sign * worst <= sign * gate.limit:
        return PASS
    return FAIL if sign * figure.value > sign * gate.limit else INCONCLUSIVE


def exactly(value: float) -> Figure:
    """A figure that was counted, or measured once."""
    return Figure(value, value, value)


def lost_line(claim: str, expected: int, arrived: dict[str, Any], control: Control | None = None) -> Line:
    """Step spans that did not arrive, arrived twice, or should not be there."""
    lost = abs(expected - arrived["steps"]) + arrived["spans"] - arrived["unique"]
    note = f"{expected:,} expected, {arrived['steps']:,} arrived; {arrived['spans']:,} spans, {arrived['unique']:,} unique ids"
    return line(claim, "", exactly(float(lost)), Gate(0), control, note)


def median(rounds: Sequence[float]) -> Figure:
    """The median of one number per round."""
    column = np.asarray(rounds, float)
    return bootstrapped(len(column), lambda rows: float(np.median(column[rows])))


def quantile_ratio(above: Sequence[Any], below: Sequence[Any], percent: float) -> Figure:
    """A percentile of all of `above` over the same of all of `below`, minus 1; each is one array of steps per round."""
    return bootstrapped(
        len(above), lambda rows: pooled(above, rows, percent) / pooled(below, rows, percent) - 1
    )


def pooled(blocks: Sequence[Any], rows: Sequence[int], percent: float) -> float:
    """A percentile over these rounds taken together."""
    return float(np.percentile(np.concatenate([blocks[row] for row in rows]), percent))


def bootstrapped(rounds: int, statistic: Callable[[Any], float]) -> Figure:
    """A statistic of rounds (given as row numbers), with the bounds that redrawing the rounds gives."""
    if rounds < 2:
        return Figure(statistic(np.arange(rounds)), float("nan"), float("nan"))
    chance = np.random.default_rng(1)
    drawn = [statistic(chance.integers(0, rounds, rounds)) for _ in range(RESAMPLES)]
    low, high = np.percentile(drawn, (5, 95))
    return Figure(statistic(np.arange(rounds)), float(low), float(high))


def against_itself(figure: Figure, limit: float = CONTROL_LIMIT) -> Control:
    """The control of a ratio: both sides were uninstrumented, so it should be 0."""
    return Control(f"{figure.value * 100:+.2f} %", abs(figure.value) <= limit)


def or_charged(control: Control, charged: Figure, gate: Gate) -> Control:
    """What uninstrumented differs from itself by does not matter where the gate holds with all of it charged to us."""
    return Control(control.said, control.holds or charged.low >= gate.limit)


def all_of(*controls: Control) -> Control:
    """All of them must hold."""
    return Control(", ".join(one.said for one in controls), all(one.holds for one in controls))


def times_less(ours: Figure, stock: Figure) -> Figure:
    """How many times less `ours` is, worst against best for the bounds; a cost that cannot be told from 0 is endless."""

    def ratio(above: float, below: float) -> float:
        return float("inf") if below <= 0 else above / below

    return Figure(ratio(stock.value, ours.value), ratio(stock.low, ours.high), ratio(stock.high, ours.low))


def rows_of(lines: Sequence[Line]) -> list[tuple[str, str, str, str, str, str]]:
    """Claim, gate, measured, bounds, control, verdict."""
    return [
        (
            one.claim,
            one.gate,
            f"{_number(one.value)}{_unit(one.unit)}",
            "" if one.low == one.high else f"[{_number(one.low)}, {_number(one.high)}]",
            one.control,
            one.verdict if one.verdict != INCONCLUSIVE else INCONCLUSIVE.upper(),
        )
        for one in lines
    ]


def saved(lines: Sequence[Line], path: Path, about: dict[str, Any]) -> None:
    """Writes everything that was measured."""
    path.write_text(
        json.dumps({**about, "lines": [asdict(one) for one in lines]}, indent=1, ensure_ascii=False)
    )


def loaded(path: Path) -> list[Line]:
    """What `saved` wrote."""
    return [Line(**one) for one in json.loads(path.read_text())["lines"]]


def _number(value: float) -> str:
    if value != value:
        return "?"
    if abs(value) == float("inf"):
        return "∞"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value == int(value) else f"{value:.3g}"


def _unit(unit: str) -> str:
    return unit if unit in ("", "×") else f" {unit}"
