"""The words that a picture is written in: text that fits, boxes, lines. Plain strings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import NamedTuple
from xml.sax.saxutils import quoteattr

from otel_infer.cli.report.html_helpers import escape_text

INK, GREY, FAINT, LINE = "#24292e", "#5f6774", "#8d95a1", "#e6e9ee"
NAMED = {
    "green": "#4f9d57",
    "orange": "#e07b1a",
    "red": "#d6404b",
    "yellow": "#d9a800",
    "blue": "#3a77b8",
    "purple": "#8a4fb0",
    "text": INK,
}
"""What Grafana's names of colours look like here."""
PALETTE = (
    "#7eb26d", "#eab839", "#6ed0e0", "#ef843c", "#e24d42", "#1f78c1", "#ba43a9", "#705da0", "#508642", "#cca300",
    "#447ebc", "#c15c17", "#890f02", "#0a437c", "#6d1f62", "#584477", "#b7dbab", "#f4d598", "#70dbed", "#f9ba8f",
    "#f29191", "#82b5d8", "#e5a8e2", "#aea2e0",
)  # fmt: skip
"""Grafana's classic colours, in its order."""
_WIDE, _NARROW = frozenset("mwMWGOQ%@—…"), frozenset("fijlrtI.,:;'|!()[]{}/- ")
_SQUARE = "\u2e80"
"""From here on most letters are as wide as high."""
SIZE = 11


class Box(NamedTuple):
    """A place in a panel."""

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


def px(value: float) -> str:
    """A coordinate, to a tenth of a pixel."""
    said = f"{value:.1f}"
    said = said.removesuffix(".0")
    return "0" if said == "-0" else said


def wide(said: str, size: float = SIZE) -> float:
    """How wide a text is at most, in whichever plain font there is; DejaVu Sans is the widest of those."""
    return size * sum(map(_wide, said))


def _wide(letter: str) -> float:
    if letter in _NARROW:
        return 0.41
    return 0.98 if letter in _WIDE else 0.67 if letter < _SQUARE else 1.1


def cut(said: str, width: float, size: float = SIZE) -> str:
    """As much of a text as fits."""
    ends = list(accumulate(map(_wide, said)))
    if not ends or ends[-1] * size <= width:
        return said
    kept = said[: sum((end + _wide("…")) * size <= width for end in ends)]
    return kept.rstrip() + "…" if kept else ""


def wrapped(said: str, width: float, size: float, most: int) -> list[str]:
    """A text on so many lines at most, the last one cut."""
    lines: list[str] = []
    for word in said.split():
        if lines and wide(f"{lines[-1]} {word}", size) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    if len(lines) > most:
        lines[most - 1 :] = [" ".join(lines[most - 1 :])]
    return [cut(line, width, size) for line in lines]


def attributes(of: Mapping[str, object]) -> str:
    """As markup; underscores are dashes, numbers are coordinates."""
    said = {
        key.rstrip("_").replace("_", "-"): px(value) if isinstance(value, float) else str(value)
        for key, value in of.items()
    }
    return "".join(f" {key}={quoteattr(value)}" for key, value in said.items())


def text(x: float, y: float, said: str, width: float, size: float = SIZE, **more: object) -> str:
    """One line, no wider than `width`."""
    kept = escape_text(cut(said, width, size), 400)
    sized = {} if size == SIZE else {"font_size": size}
    return f'<text x="{px(x)}" y="{px(y)}"{attributes({**sized, **more})}>{kept}</text>' if kept else ""


def rect(box: Box, fill: str, **more: object) -> str:
    where = f'x="{px(box.left)}" y="{px(box.top)}" width="{px(box.width)}" height="{px(box.height)}"'
    return f'<rect {where} fill="{fill}"{attributes(more)}/>'


def route(points: Iterable[tuple[float, float]]) -> str:
    """The `d` of a line through these; a point between two others on the same level is left out."""
    kept: list[tuple[str, str]] = []
    for x, y in points:
        here = px(x), px(y)
        if len(kept) > 1 and kept[-1][1] == kept[-2][1] == here[1]:
            kept.pop()
        kept.append(here)
    return "M" + "L".join(f"{x} {y}" for x, y in kept) if kept else ""


def path(d: str, **more: object) -> str:
    return f'<path d="{d}"{attributes(more)}/>' if d else ""


def lighter(colour: str, share: float) -> str:
    """So much of a `#rrggbb`, on white."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) * share):02x}" for part in parts)
