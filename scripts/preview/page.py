"""One dashboard as one picture: what can be chosen, its rows, and every panel in its place on the grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from otel_infer.cli.report.html_helpers import escape_text
from otel_infer.monitoring.dashboards.dashboard import resolve_variables
from otel_infer.monitoring.dashboards.panels import GRID_COLUMNS
from scripts.preview.answers import Answer, Ask, Span, answer, default
from scripts.preview.cells import heatmap, is_blank, states
from scripts.preview.lines import lines
from scripts.preview.svg import FAINT, GREY, INK, LINE, NAMED, SIZE, Box, path, px, rect, text, wide
from scripts.preview.tiles import elsewhere, said, table, tile

PREVIEW = "preview, not Grafana"
COLUMN, UNIT, GAP, EDGE, HEAD, FEET = 54.0, 34.0, 8.0, 12.0, 104.0, 34.0
WIDTH = GRID_COLUMNS * COLUMN + 2 * EDGE
MOST_ELSEWHERE = 3
"""Units of height of a panel over the whole width of which nothing can be shown here."""
ELSEWHERE = {
    "alertlist": "Grafana lists here which of our alerts fire. Not drawn: it is no question to Prometheus.",
    "traces": "Grafana shows here the trace whose id is entered above. Not drawn: it is a question to Tempo.",
    "table": "Grafana lists here what Tempo finds. Not drawn: there is no Tempo behind this preview.",
}
Draw = Callable[[Mapping[str, Any], Answer, Span, Box], str]
DRAW: Mapping[str, Draw] = {
    "timeseries": lines, "heatmap": heatmap, "state-timeline": states, "stat": tile, "table": table
}  # fmt: skip
FONT = "Inter,system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,'DejaVu Sans',sans-serif"


class Placed(NamedTuple):
    """A panel or the head of a row, and where it is in the picture."""

    panel: Mapping[str, Any]
    box: Box


def drawn(board: Mapping[str, Any], ask: Ask, span: Span) -> str:
    """The picture."""
    placed = list(layout(board))
    height = max(one.box.bottom for one in placed) + FEET
    parts = [_row(one) if one.panel["type"] == "row" else _panel(one, ask, span) for one in placed]
    title = escape_text(f"{board['title']} ({PREVIEW})", 200)
    size = f'width="{px(WIDTH)}" height="{px(height)}" viewBox="0 0 {px(WIDTH)} {px(height)}"'
    letters = f'font-family="{FONT}" font-size="{SIZE}" fill="{GREY}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {letters} role="img" aria-label="{title}">'
    ground = rect(Box(0, 0, WIDTH, height), "#f4f5f7")
    return "\n".join(
        [head, f"<title>{title}</title>", ground, _head(board, span), *parts, _foot(height), "</svg>\n"]
    )


# ── where everything is ──────────────────────────────────────────────────────────────────────────────────────────


def layout(board: Mapping[str, Any]) -> Iterator[Placed]:
    """By the panels' own places; a row that is closed at first is drawn open."""
    everything = [one for top in board["panels"] for one in (top, *top.get("panels", ()))]
    tops = _tops(everything)
    for one in everything:
        x, y, w, h = (one["gridPos"][key] for key in "xywh")
        size = tops[y + h] - tops[y] - GAP
        yield Placed(one, Box(EDGE + x * COLUMN + GAP / 2, tops[y], w * COLUMN - GAP, size))


def _tops(panels: Sequence[Mapping[str, Any]]) -> list[float]:
    """Where each line of the grid begins."""
    heights = [UNIT] * max(one["gridPos"]["y"] + one["gridPos"]["h"] for one in panels)
    for one in panels:
        place = one["gridPos"]
        if is_elsewhere(one) and place["w"] == GRID_COLUMNS:
            for line in range(place["y"] + MOST_ELSEWHERE, place["y"] + place["h"]):
                heights[line] = 0.0
    tops = [HEAD]
    for height in heights:
        tops.append(tops[-1] + height)
    return tops


def is_elsewhere(panel: Mapping[str, Any]) -> bool:
    """Whether it is not Prometheus that fills it."""
    asks = any("expr" in target for target in panel.get("targets", ()))
    return panel["type"] != "row" and not asks


# ── the parts ────────────────────────────────────────────────────────────────────────────────────────────────────


def _panel(placed: Placed, ask: Ask, span: Span) -> str:
    """A picture of its own inside the picture, which cuts off whatever would leave it."""
    panel, box = placed
    inside = Box(0, 0, box.width, box.height)
    frame = rect(Box(0.5, 0.5, box.width - 1, box.height - 1), "#fff", stroke="#dfe2e7", rx=4)
    title = resolve_variables(str(panel["title"]), span.window)
    about = escape_text(str(panel["description"]).replace("\n\n", " ").replace("**", ""), 600)
    room = box.width - 24
    head = text(12, 20, title, room, 12, fill=INK, font_weight="600")
    where = f'x="{px(box.left)}" y="{px(box.top)}" width="{px(box.width)}" height="{px(box.height)}"'
    return (
        f'<svg data-panel="{panel["id"]}" {where}><title>{about}</title>'
        f"{frame}{_content(panel, ask, span, inside)}{head}</svg>"
    )


def _content(panel: Mapping[str, Any], ask: Ask, span: Span, box: Box) -> str:
    if is_elsewhere(panel):
        return elsewhere(ELSEWHERE.get(panel["type"], "Not drawn: it is no question to Prometheus."), box)
    found = answer(ask, panel, span)
    if found.refused:
        return said(f"Prometheus refuses: {found.refused}", box, NAMED["red"])
    is_nothing = not (found.series or found.rows) or (panel["type"] == "heatmap" and is_blank(found))
    if is_nothing:
        return said(str(default(panel, "noValue")), box)
    return DRAW[panel["type"]](panel, found, span, box)


def _row(placed: Placed) -> str:
    box, panel = placed.box, placed.panel
    y = box.top + box.height / 2 + 6
    arrow = path(f"M{px(box.left + 4)} {px(y - 7)}l4 4.5l4-4.5", fill="none", stroke=GREY, stroke_width=1.5)
    title = str(panel["title"])
    end = box.left + 20 + wide(title, 14) + 12
    note = "closed until it is clicked" if panel["collapsed"] else ""
    return (
        arrow
        + text(box.left + 20, y, title, box.width - 40, 14, fill=INK, font_weight="600")
        + text(end, y, note, 200, fill=FAINT)
    )


def _head(board: Mapping[str, Any], span: Span) -> str:
    """Title, what it is of, what it is not, and what can be chosen."""
    left, right = EDGE + GAP / 2, WIDTH - EDGE - GAP / 2
    badge = wide(PREVIEW, 12) + 16
    begin, end = (datetime.fromtimestamp(at, UTC) for at in (span.start, span.end))
    when = f"{begin:%Y-%m-%d %H:%M} – {end:%H:%M} UTC, rates over {span.window}"
    return "".join(
        [
            text(left, 34, str(board["title"]), right - left - badge - 20, 20, fill=INK, font_weight="600"),
            rect(Box(right - badge, 17, badge, 24), "#fff4e0", stroke="#e0a34a", rx=12),
            text(right - badge / 2, 33, PREVIEW, badge, 12, text_anchor="middle", fill="#8a5a10"),
            text(left, 56, str(board["description"]), right - left - 360, 12),
            text(right, 56, when, 340, text_anchor="end"),
            _choices(board, left, right),
            path(f"M{px(left)} {px(HEAD - 4)}h{px(right - left)}", stroke=LINE),
        ]
    )


def _choices(board: Mapping[str, Any], left: float, right: float) -> str:
    parts, x = [], left
    for one in board["templating"]["list"]:
        otherwise = one["query"] if one["type"] == "datasource" else "none"
        now = one.get("current", {}).get("text") or otherwise
        name, value = str(one["label"]), ", ".join(now) if isinstance(now, list) else str(now)
        size = wide(name) + wide(value) + 26
        if x + size > right:
            break
        parts += [
            rect(Box(x, 67, size, 22), "#fff", stroke="#dfe2e7", rx=3),
            text(x + 8, 82, name, size),
            text(x + size - 8, 82, value, size, fill=INK, font_weight="600", text_anchor="end"),
        ]
        x += size + 8
    return "".join(parts)


def _foot(height: float) -> str:
    words = (
        f"{PREVIEW}: drawn by scripts/preview_dashboards.py from a test's Prometheus. Grafana's own pictures differ: its legends, "
        "axes and colours are its own."
    )
    return text(EDGE + GAP / 2, height - 14, words, WIDTH - 2 * EDGE, fill=FAINT)
