"""Single numbers, tables, and panels that have nothing to show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from scripts.preview.answers import Answer, Series, Span, columns, default, labels_of, overridden
from scripts.preview.axes import MARGIN, TITLE, across, axis
from scripts.preview.svg import (
    FAINT,
    GREY,
    INK,
    LINE,
    NAMED,
    Box,
    cut,
    path,
    px,
    rect,
    route,
    text,
    wide,
    wrapped,
)
from scripts.preview.units import shown

_ROW = 26.0


def tile(panel: Mapping[str, Any], answer: Answer, span: Span, box: Box) -> str:
    """The last value, over its course."""
    series = answer.series[0]
    said = shown(series.last, str(default(panel, "unit")), default(panel, "decimals"))
    colour = _judged(panel, series.last)
    size = next((size for size in (32, 28, 24, 20, 16) if wide(said, size) <= box.width - 2 * MARGIN), 13)
    number = text(
        box.width / 2, box.height / 2 + 12, said, box.width - 2 * MARGIN, size,
        text_anchor="middle", fill=colour, font_weight="600",
    )  # fmt: skip
    return _course(series, colour, span, box) + number


def _judged(panel: Mapping[str, Any], value: float) -> str:
    """The colour of the last threshold that is reached."""
    if default(panel, "color")["mode"] != "thresholds":
        return INK
    steps = default(panel, "thresholds")["steps"]
    reached = [step["color"] for step in steps if step["value"] is None or value >= step["value"]]
    return NAMED.get(reached[-1], INK)


def _course(series: Series, colour: str, span: Span, box: Box) -> str:
    """Small, along the lower edge."""
    plot = Box(1, box.height * 0.68, box.width - 2, box.height * 0.32 - 1)
    scale = axis(float(np.nanmax(series.values)), "none", None, plot.height)
    times = span.times(len(series.values) - 1)
    known = np.flatnonzero(np.isfinite(series.values)).tolist()
    points = [(across(times[i], span, plot), scale.height(float(series.values[i]), plot)) for i in known]
    line = path(route(points), stroke=colour, stroke_opacity="0.45", fill="none")
    edges = [(points[0][0], plot.bottom), *points, (points[-1][0], plot.bottom)]
    return path(route(edges) + "Z", fill=colour, fill_opacity="0.09") + line


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────


def table(panel: Mapping[str, Any], answer: Answer, span: Span, box: Box) -> str:
    """As many lines as there is room for."""
    places = _places(panel, box.width - 2 * MARGIN)
    most = int((box.height - TITLE - _ROW - 6) // _ROW)
    kept = answer.rows if len(answer.rows) <= most else answer.rows[: most - 1]
    parts = [_line([(name, FAINT) for name in places], places, TITLE + 14)]
    for i, row in enumerate(kept):
        cells = [_cell(panel, row, name) for name in places]
        parts.append(_line(cells, places, TITLE + 14 + (i + 1) * _ROW))
    rules = (
        f"M{px(MARGIN)} {px(TITLE + 22 + i * _ROW)}h{px(box.width - 2 * MARGIN)}" for i in range(len(kept))
    )
    if len(kept) < len(answer.rows):
        y = TITLE + 14 + (len(kept) + 1) * _ROW
        parts.append(text(MARGIN, y, f"and {len(answer.rows) - len(kept)} more", 200, fill=FAINT))
    return path("".join(rules), stroke=LINE) + "".join(parts)


def _places(panel: Mapping[str, Any], width: float) -> dict[str, tuple[float, float, bool]]:
    """Of each column where it begins and how wide it is, and whether it is of words: those have more room."""
    names = columns(panel)
    words = {names[label] for label in labels_of(panel)}
    shares = [1.7 if name in words else 1.0 for name in names.values()]
    places, left = {}, MARGIN
    for name, share in zip(names.values(), shares):
        each = width * share / sum(shares)
        places[name] = left, each, name in words
        left += each
    return places


def _cell(panel: Mapping[str, Any], row: Mapping[str, str | float], name: str) -> tuple[str, str]:
    """What it says, and in which colour; a number that is not there says what the panel says of nothing."""
    value = row.get(name, math.nan)
    if isinstance(value, str):
        return value or "–", INK
    if math.isnan(value):
        return str(default(panel, "noValue")), FAINT
    return shown(value, str(overridden(panel, name).get("unit", default(panel, "unit")))), INK


def _line(cells: Sequence[tuple[str, str]], places: Mapping[str, tuple[float, float, bool]], y: float) -> str:
    """Words begin on the left of their column, numbers end on its right."""
    parts = []
    for (said, colour), (left, each, is_words) in zip(cells, places.values()):
        where, anchor = (left, "start") if is_words else (left + each - 6, "end")
        parts.append(text(where, y, said, each - 14, fill=colour, text_anchor=anchor))
    return "".join(parts)


# ── nothing ──────────────────────────────────────────────────────────────────────────────────────────────────────


def said(words: str, box: Box, fill: str = GREY, size: float = 12) -> str:
    """Words in the middle of a panel."""
    lines = wrapped(words, box.width - 2 * MARGIN, size, max(1, min(4, int((box.height - TITLE - 8) // 16))))
    top = (box.height + TITLE) / 2 - (len(lines) - 1) * 8
    return "".join(
        text(box.width / 2, top + i * 16, cut(line, box.width - 2 * MARGIN, size), box.width, size,
             text_anchor="middle", fill=fill)
        for i, line in enumerate(lines)
    )  # fmt: skip


def elsewhere(words: str, box: Box) -> str:
    """A panel that something else than Prometheus fills."""
    return rect(Box(0.5, 0.5, box.width - 1, box.height - 1), "#eceef1", rx=4) + said(words, box)
