"""Draws a dashboard as one picture: its variables, its rows, and each panel at its place in the grid."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from otel_infer.monitoring.dashboards.dashboard import resolve_variables
from otel_infer.monitoring.dashboards.panels import GRID_COLUMNS
from scripts.preview.canvas import FAINT, GREY, INK, Box, Canvas, estimate_width
from scripts.preview.panels import DRAW_BY_TYPE, MARGIN, TITLE
from scripts.preview.queries import PanelData, Prometheus, TimeRange, find_default, query_panel

PREVIEW = "preview, not Grafana"
COLUMN, UNIT, GAP, EDGE, HEAD, FOOT = 54.0, 34.0, 8.0, 12.0, 104.0, 34.0
"""px: width of a column of the grid, height of a line, space between panels and around the page, head and foot."""
WIDTH = GRID_COLUMNS * COLUMN + 2 * EDGE
NOT_DRAWN_UNITS = 3
"""The height of a wide panel that is not drawn, in lines of the grid."""
NOT_DRAWN = {
    "alertlist": "Grafana lists here which alerts fire. Not drawn: it is no query to Prometheus.",
    "traces": "Grafana shows here the trace with the id entered above. Not drawn: it is a query to Tempo.",
    "table": "Grafana lists here what Tempo finds. Not drawn: this preview has no Tempo.",
}


class PlacedPanel(NamedTuple):
    """A panel or the title of a row, and its area in the picture."""

    panel: Mapping[str, Any]
    box: Box


def draw_dashboard(dashboard: Mapping[str, Any], prometheus: Prometheus, time_range: TimeRange) -> Figure:
    """Returns the picture of a dashboard; closed rows are open."""
    placed = list(place_panels(dashboard))
    canvas = Canvas(WIDTH, max(each.box.bottom for each in placed) + FOOT)
    _draw_head(canvas, dashboard, time_range)
    for panel, box in placed:
        if panel["type"] == "row":
            note = "  (closed until it is clicked)" if panel["collapsed"] else ""
            title = f"▾ {panel['title']}{note}"
            canvas.add_text(box.left, box.top + box.height / 2 + 6, title, box.width, 14, INK, weight="bold")
        else:
            _draw_panel(canvas, panel, prometheus, time_range, box)
    note = f"{PREVIEW}: drawn by scripts/preview_dashboards.py from the Prometheus of a test. Grafana's legends and axes differ."
    canvas.add_text(EDGE + GAP / 2, canvas.height - 14, note, WIDTH - 2 * EDGE, color=FAINT)
    return canvas.figure


def place_panels(dashboard: Mapping[str, Any]) -> Iterator[PlacedPanel]:
    """Yields each panel with its area, from its position in the grid."""
    panels = [panel for top in dashboard["panels"] for panel in (top, *top.get("panels", ()))]
    tops = _line_tops(panels)
    for panel in panels:
        x, y, w, h = (panel["gridPos"][key] for key in "xywh")
        height = tops[y + h] - tops[y] - GAP
        yield PlacedPanel(panel, Box(EDGE + x * COLUMN + GAP / 2, tops[y], w * COLUMN - GAP, height))


def _line_tops(panels: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns the top of each line of the grid; wide panels that are not drawn are low."""
    heights = np.full(max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels), UNIT)
    for panel in panels:
        place = panel["gridPos"]
        if not has_queries(panel) and panel["type"] != "row" and place["w"] == GRID_COLUMNS:
            heights[place["y"] + NOT_DRAWN_UNITS : place["y"] + place["h"]] = 0.0
    return [HEAD, *(HEAD + np.cumsum(heights))]


def has_queries(panel: Mapping[str, Any]) -> bool:
    """Whether a panel queries Prometheus."""
    return any("expr" in target for target in panel.get("targets", ()))


def _draw_panel(
    canvas: Canvas, panel: Mapping[str, Any], prometheus: Prometheus, time_range: TimeRange, box: Box
) -> None:
    canvas.add_box(box, "white" if has_queries(panel) else "#eceef1", "#dfe2e7")
    title = resolve_variables(str(panel["title"]), time_range.window)
    canvas.add_text(box.left + 12, box.top + 20, title, box.width - 24, 12, INK, weight="bold")
    data = query_panel(prometheus, panel, time_range) if has_queries(panel) else PanelData()
    if not has_queries(panel):
        _draw_message(canvas, NOT_DRAWN[panel["type"]], box)
    elif data.error:
        _draw_message(canvas, f"Prometheus refuses the query: {data.error}", box, "red")
    elif not data.rows and not any(
        panel["type"] != "heatmap" or np.nanmax(each.values) > 0 for each in data.series
    ):
        _draw_message(canvas, str(find_default(panel, "noValue")), box)
    else:
        DRAW_BY_TYPE[panel["type"]](canvas, panel, data, time_range, box)


def _draw_message(canvas: Canvas, text: str, box: Box, color: str = GREY) -> None:
    """Writes at most four lines into the middle of a panel."""
    room, size = box.width - 2 * MARGIN, 11
    lines = textwrap.wrap(text, max(int(room / (0.62 * size)), 8), max_lines=4, placeholder="…")
    top = box.top + (box.height + TITLE) / 2 - (len(lines) - 1) * 8
    for i, line in enumerate(lines):
        canvas.add_text(box.left + box.width / 2, top + i * 16, line, room, size, color, ha="center")


def _draw_head(canvas: Canvas, dashboard: Mapping[str, Any], time_range: TimeRange) -> None:
    """Writes the title, the description, the time and the variables."""
    left, right = EDGE + GAP / 2, WIDTH - EDGE - GAP / 2
    begin, end = (datetime.fromtimestamp(at, UTC) for at in (time_range.start, time_range.end))
    when = f"{begin:%Y-%m-%d %H:%M} – {end:%H:%M} UTC, rates over {time_range.window}"
    canvas.add_text(left, 34, str(dashboard["title"]), right - left - 200, 20, INK, weight="bold")
    canvas.add_text(right, 34, PREVIEW, 190, 12, "#8a5a10", ha="right")
    canvas.add_text(left, 56, str(dashboard["description"]), right - left - 360, 12)
    canvas.add_text(right, 56, when, 340, ha="right")
    x = left
    for variable in dashboard["templating"]["list"]:
        default = variable["query"] if variable["type"] == "datasource" else "none"
        value = variable.get("current", {}).get("text") or default
        text = f"{variable['label']}: {', '.join(value) if isinstance(value, list) else value}"
        width = estimate_width(text, 10) + 16
        if x + width > right:
            break
        canvas.add_box(Box(x, 67, width, 22), "white", "#dfe2e7")
        canvas.add_text(x + 8, 82, text, width, color=INK)
        x += width + 8
