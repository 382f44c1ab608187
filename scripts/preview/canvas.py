"""A matplotlib figure whose coordinates are pixels from its top left corner."""

from __future__ import annotations

import unicodedata
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

INK, GREY, FAINT, LINE = "#24292e", "#5f6774", "#8d95a1", "#e6e9ee"
DPI = 72
"""One point is one pixel."""


class Box(NamedTuple):
    """An area of the picture; px."""

    left: float
    top: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def shrink(self, left: float, top: float, right: float, bottom: float) -> Box:
        """Returns the area without these margins."""
        return Box(self.left + left, self.top + top, self.width - left - right, self.height - top - bottom)


def estimate_width(text: str, size: float) -> float:
    """Returns about how wide a text is in DejaVu Sans, in px; wide letters count as one em."""
    return size * sum(1.0 if unicodedata.east_asian_width(letter) in "WF" else 0.62 for letter in text)


def cut_text(text: str, room: float, size: float) -> str:
    """Returns the text, or its beginning with an ellipsis where it is wider than the room in px."""
    if estimate_width(text, size) <= room:
        return text
    while text and estimate_width(text + "…", size) > room:
        text = text[:-1]
    return text + "…" if text else ""


class Canvas:
    """A picture of the given size in px."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self.figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor="#f4f5f7")

    def add_text(
        self, x: float, y: float, text: str, room: float, size: float = 10, color: str = GREY, **style: Any
    ) -> None:
        """Writes one line with its baseline at y, cut to the room in px. `$` has no special meaning."""
        text = cut_text(text, room, size)
        self.figure.text(
            x / self.width, 1 - y / self.height, text, fontsize=size, color=color, parse_math=False, **style
        )

    def add_box(self, box: Box, face: str, edge: str = "none") -> None:
        """Draws a filled rectangle with round corners."""
        corner = (box.left / self.width, 1 - box.bottom / self.height)
        size = (box.width / self.width, box.height / self.height)
        style = {"boxstyle": "round,pad=0,rounding_size=0.002", "mutation_aspect": self.width / self.height}
        patch = FancyBboxPatch(corner, *size, facecolor=face, edgecolor=edge, linewidth=1, **style)
        self.figure.add_artist(patch).set_zorder(-1)

    def add_axes(self, box: Box) -> Axes:
        """Returns axes that fill the area, with horizontal grid lines and without a frame."""
        place = (box.left / self.width, 1 - box.bottom / self.height)
        axes = self.figure.add_axes((*place, box.width / self.width, box.height / self.height))
        axes.set_facecolor("none")
        axes.tick_params(length=0, labelsize=9, labelcolor=GREY)
        axes.grid(axis="y", color=LINE, linewidth=1)
        axes.set_axisbelow(True)
        for spine in axes.spines.values():
            spine.set_visible(False)
        return axes
