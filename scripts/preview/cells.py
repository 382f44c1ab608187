"""Heatmaps, and what holds over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scripts.preview.answers import Answer, Series, Span, Values, default
from scripts.preview.axes import EXEMPLAR, FOOT, GUTTER, MARGIN, TITLE, across, below, diamonds
from scripts.preview.svg import FAINT, GREY, NAMED, Box, path, px, rect, text, wide
from scripts.preview.units import shown

SPECTRAL = (
    "#5e4fa2", "#466eb1", "#378ebb", "#4ba4b1", "#66c2a5", "#8bd0a4", "#abdda4", "#cbe99d", "#e6f598",
    "#f4faad", "#fee08b", "#fdc070", "#fdae61", "#f67f4b", "#f46d43", "#e1524a", "#d53e4f", "#9e0142",
)  # fmt: skip
"""From few to many, as Grafana's scheme of this name reversed."""


def heatmap(panel: Mapping[str, Any], answer: Answer, span: Span, box: Box) -> str:
    """A cell for each bucket and time, and a mark for each request that is known by its trace."""
    ordered = sorted(answer.series, key=lambda one: float(one.labels["le"]))
    bounds = [float(one.labels["le"]) for one in ordered]
    counts = np.diff(np.array([np.nan_to_num(one.values) for one in ordered]), axis=0, prepend=0.0).clip(0)
    plot = Box(GUTTER, TITLE, box.width - GUTTER - MARGIN, box.height - TITLE - FOOT - 22)
    unit = str(default(panel, "unit"))
    marks = diamonds(answer.exemplars, span, plot, lambda value: _level(value, bounds, plot))
    return "".join(
        [
            rect(plot, "#fafbfc"),
            _bounds(bounds, unit, plot),
            below(plot, span),
            _cells(counts, plot),
            marks,
            _scale(float(counts.max()), plot, bool(answer.exemplars)),
        ]
    )


def is_blank(answer: Answer) -> bool:
    """Whether no bucket ever held anything."""
    return not any(np.nanmax(one.values) > 0 for one in answer.series)


def _cells(counts: Values, plot: Box) -> str:
    """A dash for each cell, one path for each colour. A column is of the time before its instant; the first has none."""
    rows, columns = counts.shape
    high, wide = plot.height / rows, plot.width / (columns - 1)
    shades = np.ceil(np.sqrt(counts / (counts.max() or 1.0)) * len(SPECTRAL)).astype(int)
    drawn: dict[int, list[str]] = {}
    for row, column in np.argwhere(counts[:, 1:] > 1e-9).tolist():
        x, y = plot.left + column * wide, plot.bottom - (row + 0.5) * high
        shade = min(max(int(shades[row, column + 1]), 1), len(SPECTRAL))
        drawn.setdefault(shade, []).append(f"M{px(x)} {px(y)}h{px(wide - 0.6)}")
    thick = px(high - 0.6)
    return "".join(
        path("".join(dashes), stroke=SPECTRAL[shade - 1], stroke_width=thick)
        for shade, dashes in sorted(drawn.items())
    )


def _level(value: float, bounds: Sequence[float], plot: Box) -> float:
    """In the middle of its bucket's row."""
    row = min(int(np.searchsorted(bounds, value)), len(bounds) - 1)
    return plot.bottom - (row + 0.5) * plot.height / len(bounds)


def _bounds(bounds: Sequence[float], unit: str, plot: Box) -> str:
    high = plot.height / len(bounds)
    every = max(1, round(15 / high + 0.49))
    said = (
        text(plot.left - 6, plot.bottom - (i + 1) * high + 3.5, shown(bound, unit), 54, 10, text_anchor="end")
        for i, bound in enumerate(bounds)
        if (len(bounds) - 1 - i) % every == 0
    )
    return "".join(said)


def _scale(most: float, plot: Box, has_exemplars: bool) -> str:
    """What the colours mean."""
    y, wide = plot.bottom + FOOT + 6, 7.0
    boxes = "".join(rect(Box(plot.left + 16 + i * wide, y, wide, 8), fill) for i, fill in enumerate(SPECTRAL))
    end = plot.left + 16 + len(SPECTRAL) * wide
    said = text(plot.left, y + 8, "0", 14, 10) + text(
        end + 6, y + 8, f"{shown(most, 'short')} in a cell", 110, 10
    )
    if not has_exemplars:
        return boxes + said
    at = plot.right - 150
    mark = path(f"M{px(at)} {px(y + 1.3)}l2.7 2.7l-2.7 2.7l-2.7-2.7z", fill=EXEMPLAR)
    return boxes + said + mark + text(at + 8, y + 8, "a request, by its trace", 150, 10)


# ── states ───────────────────────────────────────────────────────────────────────────────────────────────────────


def states(panel: Mapping[str, Any], answer: Answer, span: Span, box: Box) -> str:
    """A band for each series, in the colour of what holds."""
    (named,) = [one["options"] for one in default(panel, "mappings") if one["type"] == "value"]
    names = min(max(wide(one.name, 10) for one in answer.series) + MARGIN + 8, box.width * 0.4)
    plot = Box(names, TITLE, box.width - names - MARGIN, box.height - TITLE - FOOT - 22)
    most = int(plot.height // 13)
    kept = answer.series if len(answer.series) <= most else answer.series[: most - 1]
    high = min(plot.height / (len(kept) + (len(kept) < len(answer.series))), 34.0)
    parts = [
        _band(one, Box(plot.left, plot.top + i * high, plot.width, high), named, span)
        for i, one in enumerate(kept)
    ]
    if len(kept) < len(answer.series):
        y, more = plot.top + (len(kept) + 0.5) * high + 3.5, f"and {len(answer.series) - len(kept)} more"
        parts.append(text(plot.left - 8, y, more, names - 20, 10, fill=FAINT, text_anchor="end"))
    return "".join([*parts, below(plot, span), _keys(named, plot)])


def _band(one: Series, band: Box, named: Mapping[str, Any], span: Span) -> str:
    """Times of the same value are one."""
    times = span.times(len(one.values) - 1)
    said = text(
        band.left - 8, band.top + band.height / 2 + 3.5, one.name, band.left - 20, 10, text_anchor="end"
    )
    parts, begun = [said], 0
    for i in range(1, len(times)):
        if one.values[i] == one.values[begun] and i < len(times) - 1:
            continue
        mapped = named.get(f"{one.values[begun]:g}")
        if np.isfinite(one.values[begun]):
            left, right = across(times[begun], span, band), across(times[i], span, band)
            fill = NAMED.get(mapped["color"], GREY) if mapped else GREY
            place = Box(left, band.top + band.height * 0.1, right - left, band.height * 0.8)
            parts.append(rect(place, fill, fill_opacity="0.75"))
        begun = i
    return "".join(parts)


def _keys(named: Mapping[str, Any], plot: Box) -> str:
    parts, left = [], plot.left
    for one in named.values():
        colour = NAMED.get(one["color"], GREY)
        parts += [
            rect(Box(left, plot.bottom + FOOT + 6, 10, 8), colour),
            text(left + 16, plot.bottom + FOOT + 14, one["text"], 100, 10),
        ]
        left += 110
    return "".join(parts)
