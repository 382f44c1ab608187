"""Axes, and the marks of single requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from scripts.preview.answers import Exemplar, Span
from scripts.preview.svg import LINE, Box, path, px, text
from scripts.preview.units import shown, ticks

GUTTER, MARGIN, TITLE, FOOT = 70.0, 14.0, 36.0, 18.0
"""Room beside a plot for its axis, or without one; above it, and for the time under it."""
EXEMPLAR = "#c531c5"
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)


class Axis(NamedTuple):
    """Of values, from 0 to `top`."""

    top: float
    unit: str
    marks: Sequence[float]

    def height(self, value: float, plot: Box) -> float:
        """Where a value is; nothing leaves the plot."""
        share = min(max(value / self.top, 0.0), 1.0) if self.top else 0.0
        return plot.bottom - share * plot.height


def axis(top: float, unit: str, most: float | None, height: float) -> Axis:
    """Up to a round value, or to `most`."""
    marks = ticks(top if most is None else most, unit, max(round(height / 36), 2))
    return Axis(marks[-1], unit, marks)


def beside(plot: Box, of: Axis, on_right: bool = False) -> str:
    """The values of an axis, and on the left its lines."""
    x, anchor, room = (
        (plot.right + 6, "start", GUTTER - 8) if on_right else (plot.left - 6, "end", plot.left - 8)
    )
    heights = [(mark, of.height(mark, plot)) for mark in of.marks]
    lines = "" if on_right else "".join(f"M{px(plot.left)} {px(y)}h{px(plot.width)}" for _, y in heights)
    said = (
        text(x, y + 3.5, "0" if mark == 0 else shown(mark, of.unit), room, 10, text_anchor=anchor)
        for mark, y in heights
    )
    return path(lines, stroke=LINE) + "".join(said)


def below(plot: Box, span: Span) -> str:
    """The time of day."""
    length = span.end - span.start
    most = max(plot.width / 70, 2)
    step = next((step for step in _STEPS if length / step <= most), _STEPS[-1])
    form = "%H:%M" if step >= 60 else "%H:%M:%S"
    first = -(-span.start // step) * step
    said = []
    for i in range(int((span.end - first) // step) + 1):
        at = first + i * step
        x = across(at, span, plot)
        if plot.left + 16 <= x <= plot.right - 12:
            clock = datetime.fromtimestamp(at, UTC).strftime(form)
            said.append(text(x, plot.bottom + 14, clock, 70, 10, text_anchor="middle"))
    return "".join(said)


def across(at: float, span: Span, plot: Box) -> float:
    return plot.left + (at - span.start) / (span.end - span.start) * plot.width


def diamonds(exemplars: Sequence[Exemplar], span: Span, plot: Box, height: Callable[[float], float]) -> str:
    """A mark for each request, as wide as it is high."""
    marks = (
        f"M{px(across(one.at, span, plot))} {px(height(one.value) - 2.4)}l2.4 2.4l-2.4 2.4l-2.4-2.4z"
        for one in exemplars
        if span.start <= one.at <= span.end
    )
    return path("".join(marks), fill=EXEMPLAR, stroke="#fff", stroke_width=0.5)
