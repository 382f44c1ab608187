"""Values over time: lines, or areas that are stacked, with their legend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from scripts.preview import svg
from scripts.preview.answers import Answer, Series, Span, Values, default, overridden
from scripts.preview.axes import FOOT, GUTTER, MARGIN, TITLE, Axis, across, axis, below, beside, diamonds
from scripts.preview.svg import FAINT, NAMED, PALETTE, Box, lighter, path, rect, route, text
from scripts.preview.units import shown

MOST = 40
"""Lines of a panel; of more, those that reach highest."""
_ENTRY, _NUMBERS, _BACK = 15.0, 148.0, (80.0, 12.0)
"""Of the legend: height of a line, room for its two numbers, and how far from its right end these are."""


class Drawn(NamedTuple):
    """A series with its colour, and what it is measured in."""

    series: Series
    colour: str
    unit: str
    is_right: bool


def lines(panel: Mapping[str, Any], answer: Answer, span: Span, box: Box) -> str:
    """A panel of lines or areas."""
    drawn = _drawn(panel, answer.series)
    mode, most = default(panel, "custom")["stacking"]["mode"], default(panel, "max")
    legend, height = _legend(drawn, len(answer.series), box)
    on_left, on_right = ([one for one in drawn if one.is_right == is_right] for is_right in (False, True))
    margin = GUTTER if on_right else MARGIN
    plot = Box(GUTTER, TITLE, box.width - GUTTER - margin, box.height - TITLE - FOOT - height)
    if mode != "none":
        return _stacked(panel, drawn, span, plot, mode) + legend
    scale = axis(_top(on_left), str(default(panel, "unit")), most, plot.height)
    parts = [below(plot, span), beside(plot, scale), *(_line(one, span, plot, scale) for one in on_left)]
    if on_right:
        other = axis(_top(on_right), on_right[0].unit, None, plot.height)
        parts += [beside(plot, other, True), *(_line(one, span, plot, other) for one in on_right)]
    spots = diamonds(answer.exemplars, span, plot, lambda value: scale.height(value, plot))
    return "".join([*parts, spots, legend])


def _drawn(panel: Mapping[str, Any], series: Sequence[Series]) -> list[Drawn]:
    drawn = []
    for i, one in enumerate(series):
        said = overridden(panel, one.name)
        fixed = NAMED.get(said.get("color", {}).get("fixedColor", ""))
        unit = str(said.get("unit", default(panel, "unit")))
        is_right = said.get("custom.axisPlacement") == "right"
        drawn.append(Drawn(one, fixed or PALETTE[i % len(PALETTE)], unit, is_right))
    return _largest(drawn, MOST)


def _top(drawn: Sequence[Drawn]) -> float:
    return max((float(np.nanmax(one.series.values)) for one in drawn), default=0.0)


def _line(one: Drawn, span: Span, plot: Box, scale: Axis) -> str:
    """With gaps where there is nothing; a single instant is a spot."""
    times = span.times(len(one.series.values) - 1)
    parts = []
    for run in _runs(np.isfinite(one.series.values)):
        points = [
            (across(times[i], span, plot), scale.height(float(one.series.values[i]), plot)) for i in run
        ]
        parts.append(route(points if len(points) > 1 else [points[0], (points[0][0] + 1.5, points[0][1])]))
    return path("".join(parts), stroke=one.colour, stroke_width=1.4, fill="none", stroke_linejoin="round")


def _runs(known: Any) -> list[list[int]]:
    """Instants beside each other at which something is known."""
    return [
        [i for i, _ in run]
        for is_known, run in groupby(enumerate(known), key=lambda one: bool(one[1]))
        if is_known
    ]


def _stacked(panel: Mapping[str, Any], drawn: Sequence[Drawn], span: Span, plot: Box, mode: str) -> str:
    """The highest first, each over what is behind it, so that each needs its upper edge only."""
    values = np.array([one.series.values for one in drawn])
    known = np.isfinite(values).any(axis=0)
    edges = np.cumsum(np.nan_to_num(values), axis=0)
    unit, most = str(default(panel, "unit")), default(panel, "max")
    if mode == "percent":
        unit, most, known = "percentunit", 1.0, known & (edges[-1] > 0)
        edges = edges / np.where(edges[-1] > 0, edges[-1], 1.0)
    scale = axis(float(edges.max()), unit, most, plot.height)
    areas = [_area(one.colour, edge, known, span, plot, scale) for one, edge in zip(drawn, edges)]
    return beside(plot, scale) + below(plot, span) + "".join(areas[::-1])


def _area(colour: str, edge: Values, known: Any, span: Span, plot: Box, scale: Axis) -> str:
    times = span.times(len(edge) - 1)
    parts = []
    for run in _runs(known):
        points = [(across(times[i], span, plot), scale.height(float(edge[i]), plot)) for i in run]
        first, last = points[0][0], points[-1][0]
        parts.append(route([(first, plot.bottom), *points, (last, plot.bottom)]) + "Z")
    return path("".join(parts), fill=lighter(colour, 0.6), stroke=colour, stroke_width=0.8)


# ── legend ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _legend(drawn: Sequence[Drawn], of: int, box: Box) -> tuple[str, float]:
    """Name, last and largest value of each, in columns as wide as the names want; and how high that is."""
    name = min(max((svg.wide(one.series.name, 10) for one in drawn), default=0.0), box.width / 2)
    columns = max(1, int((box.width - 2 * MARGIN) // (name + _NUMBERS + 20)))
    most = max(int((box.height - 100) // _ENTRY * 0.5), 1) * columns
    told = list(drawn) if of <= most else _largest(drawn, most - 1)
    count = len(told) + (of > len(told))
    columns = max(1, min(columns, count))
    lines = -(-count // columns)
    height = (lines + 1) * _ENTRY + 8
    top, wide = box.height - height + 12, (box.width - 2 * MARGIN) / columns
    places = [(MARGIN + i // lines * wide, top + (i % lines + 1) * _ENTRY) for i in range(count)]
    parts = [_heads(left, top, wide) for left in sorted({left for left, _ in places})]
    parts += [_entry(one, left, y, wide) for one, (left, y) in zip(told, places)]
    if count > len(told):
        left, y = places[-1]
        parts.append(text(left + 16, y, f"and {of - len(told)} more", wide - 30, 10, fill=FAINT))
    return "".join(parts), height


def _largest(drawn: Sequence[Drawn], count: int) -> list[Drawn]:
    """So many of them, in their order."""
    ranked = sorted(range(len(drawn)), key=lambda i: -float(np.nanmax(drawn[i].series.values)))
    return [drawn[i] for i in sorted(ranked[:count])]


def _heads(left: float, y: float, wide: float) -> str:
    places = zip((left + wide - back for back in _BACK), ("last", "max"))
    return "".join(text(x, y, said, 60, 9.5, fill=FAINT, text_anchor="end") for x, said in places)


def _entry(one: Drawn, left: float, y: float, wide: float) -> str:
    values = one.series.last, float(np.nanmax(one.series.values))
    numbers = (
        text(left + wide - back, y, shown(value, one.unit), 66, 10, text_anchor="end")
        for value, back in zip(values, _BACK)
    )
    spot = rect(Box(left, y - 5, 10, 3), one.colour)
    return spot + text(left + 16, y, one.series.name or "value", wide - 16 - _NUMBERS, 10) + "".join(numbers)
