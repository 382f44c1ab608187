"""The preview pictures of the dashboards: panels are inside their areas, and the docs page lists all dashboards."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from io import StringIO
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from otel_infer.monitoring import dashboards

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from scripts.preview.canvas import cut_text, estimate_width
from scripts.preview.page import PREVIEW, draw_dashboard, has_queries, place_panels
from scripts.preview.panels import MAX_LINES, find_threshold_color
from scripts.preview.queries import TimeRange
from scripts.preview.units import format_value

PAGE = Path(__file__).parents[2] / "docs" / "dashboards.md"
WINDOW = TimeRange(1_800_000_000.0, 1_800_000_600.0, "20s")
BOARDS_BY_NAME = {board.name: board for board in (make() for make in dashboards.DASHBOARD_BUILDERS)}
BOUNDS = ("0.001", "0.01", "0.1", "1.0", "2.5", "+Inf")
MAX_BYTES = 1_000_000
each_board = pytest.mark.parametrize(
    "board", dashboards.build_dashboards().values(), ids=dashboards.build_dashboards()
)


class CannedPrometheus:
    """A Prometheus with `series` series for the labels of any query. A third of the instants of each is missing."""

    def __init__(self, series: int = 2, word: str = "one", value: Callable[[int], float] = float) -> None:
        self._series, self._word, self._value = series, word, value

    def get(self, path: str, **parameters: str) -> Any:
        if path == "query_exemplars":
            exemplars = [{"timestamp": WINDOW.start + 7 * i, "value": str(i / 20)} for i in range(80)]
            return [{"exemplars": exemplars}]
        metrics = [*self._metrics(parameters["query"])]
        if path == "query":
            return {
                "result": [
                    {"metric": metric, "value": [WINDOW.end, str(self._value(i))]}
                    for i, metric in enumerate(metrics)
                ]
            }
        start, end, step = (float(parameters[key]) for key in ("start", "end", "step"))
        times = [start + i * step for i in range(int((end - start) / step) + 1)]
        return {
            "result": [
                {"metric": metric, "values": self._values(i, times)} for i, metric in enumerate(metrics)
            ]
        }

    def _values(self, number: int, times: list[float]) -> list[tuple[float, str]]:
        return [(at, str(self._value(number + i))) for i, at in enumerate(times) if i % 30 > 9]

    def _metrics(self, query: str) -> Iterator[dict[str, str]]:
        grouping = re.search(r"by \(([^)]*)\)", query)
        labels = grouping[1].split(", ") if grouping else []
        if labels == ["le"] and "quantile" not in query:
            yield from ({"le": bound} for bound in BOUNDS)
            return
        count = self._series if set(labels) - {"le"} else min(self._series, 1)
        for i in range(count):
            yield {label: f"{self._word}-{i}" for label in labels if label != "le"}


class RefusingPrometheus:
    def get(self, path: str, **parameters: str) -> Any:
        raise ValueError("parse error: <it> & that")


def list_panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    nested = [panel for top in board["panels"] for panel in (top, *top.get("panels", ()))]
    return [panel for panel in nested if panel["type"] != "row"]


def find_panel(board: dict[str, Any], title: str) -> dict[str, Any]:
    (panel,) = [panel for panel in list_panels(board) if panel["title"] == title]
    return panel


def texts_by_panel(board: dict[str, Any], figure: Figure) -> dict[int, list[tuple[str, Bbox]]]:
    """Returns the texts of each panel by its id, with their areas in px from the bottom left corner."""
    figure.draw_without_rendering()
    visible = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    areas = [(text.get_text(), text.get_window_extent()) for text in visible]
    return {
        placed.panel["id"]: [
            (text, area)
            for text, area in areas
            if placed.box.left <= area.x0 <= placed.box.right
            and placed.box.top <= figure.bbox.height - area.y0 <= placed.box.bottom
        ]
        for placed in place_panels(board)
    }


def panel_text(board: dict[str, Any], prometheus: Any, panel: dict[str, Any]) -> list[str]:
    figure = draw_dashboard(board, prometheus, WINDOW)
    return [text for text, _ in texts_by_panel(board, figure)[panel["id"]]]


# ── pictures ─────────────────────────────────────────────────────────────────────────────────────────────────────


@each_board
@pytest.mark.parametrize(
    ("series", "word"),
    [(1, "one"), (60, "a model with a very long name " * 9), (12, "<script>&'$x$")],
    ids=["one series", "many series", "markup"],
)
def test_panels_are_drawn_once_without_overlap(board: dict[str, Any], series: int, word: str) -> None:
    """No text leaves its panel, and no text covers half of another text."""
    texts = texts_by_panel(board, draw_dashboard(board, CannedPrometheus(series, word), WINDOW))
    for panel, box in place_panels(board):
        for text, area in texts[panel["id"]]:
            assert area.x1 <= box.right + 2 or panel["type"] == "row", (panel["title"], text)
        for (text, area), (other, other_area) in combinations(texts[panel["id"]], 2):
            shared = Bbox.intersection(area, other_area)
            smaller = min(area.width * area.height, other_area.width * other_area.height)
            assert shared is None or shared.width * shared.height < smaller / 2, (panel["title"], text, other)


@each_board
def test_panel_areas_do_not_overlap(board: dict[str, Any]) -> None:
    boxes = [box for _, box in place_panels(board)]
    for box, other in combinations(boxes, 2):
        beside = box.left >= other.right or box.right <= other.left
        assert beside or box.top >= other.bottom or box.bottom <= other.top


@each_board
def test_a_picture_is_labelled_preview_and_is_small(board: dict[str, Any]) -> None:
    figure = draw_dashboard(board, CannedPrometheus(4), WINDOW)
    assert PREVIEW in [text.get_text() for text in figure.findobj(Text)]
    out = StringIO()
    figure.savefig(out, format="svg")
    assert len(out.getvalue()) < MAX_BYTES


@each_board
def test_panels_without_data_show_their_no_value_text(board: dict[str, Any]) -> None:
    figure = draw_dashboard(board, CannedPrometheus(0, value=lambda _: 0.0), WINDOW)
    texts = texts_by_panel(board, figure)
    for panel in list_panels(board):
        text = " ".join(text for text, _ in texts[panel["id"]])
        expected = panel["fieldConfig"]["defaults"]["noValue"] if has_queries(panel) else "Not drawn"
        assert f"{text} ".count(expected) == 1, panel["title"]


def test_errors_of_prometheus_are_shown() -> None:
    board = dashboards.build_dashboards()["overview.json"]
    text = " ".join(panel_text(board, RefusingPrometheus(), find_panel(board, "Requests in flight")))
    assert "parse error: <it> & that" in text


@pytest.mark.parametrize(("share", "color"), [(0.0, "green"), (0.02, "orange"), (0.5, "red")])
def test_thresholds_set_the_colour_of_a_tile(share: float, color: str) -> None:
    failed = find_panel(dashboards.build_dashboards()["overview.json"], "Failed")
    assert find_threshold_color(failed, share) == color


def test_undrawn_series_are_counted() -> None:
    """A legend lists as many series as fit, and the number of the others."""
    board = dashboards.build_dashboards()["latency-breakdown.json"]
    texts = panel_text(board, CannedPrometheus(99, "stage"), find_panel(board, "p99 of each stage"))
    listed = sum(text.startswith("stage-") for text in texts)
    assert 0 < listed <= MAX_LINES
    assert f"and {99 - listed} more" in texts


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (0.0421, "s", "42.1 ms"),
        (2.5, "s", "2.5 s"),
        (0.9999, "s", "1 s"),
        (150, "s", "2.5 min"),
        (7200, "s", "2 h"),
        (3e-6, "s", "3 µs"),
        (0, "s", "0 s"),
        (0.993, "percentunit", "99.3 %"),
        (1, "percentunit", "100 %"),
        (3 * 2**30, "bytes", "3 GiB"),
        (0, "bytes", "0 B"),
        (12.34, "reqps", "12.3 req/s"),
        (1500, "reqps", "1.5k req/s"),
        (80, "ops", "80 ops/s"),
        (12_345, "short", "12.3k"),
        (1_000, "short", "1k"),
        (7, "short", "7"),
        (0.05, "short", "0.05"),
        (640, "watt", "640 W"),
        (6300, "joule", "6.3 kJ"),
        (65.5, "celsius", "65.5 °C"),
        (1, "bool", "yes"),
        (float("inf"), "s", "∞"),
        (float("nan"), "s", "–"),
    ],
)
def test_numbers_have_their_units(value: float, unit: str, expected: str) -> None:
    assert expected == format_value(value, unit)


def test_a_text_is_cut_to_its_width() -> None:
    assert cut_text("short", 100, 10) == "short"
    shortened = cut_text("w" * 100, 100, 10)
    assert shortened.endswith("…")
    assert estimate_width(shortened, 10) <= 100
    assert cut_text("w", 3, 10) == ""


# ── the docs page ────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_docs_page_lists_dashboards_in_order() -> None:
    """Each dashboard has a section with its rows and its picture."""
    sections = {
        section.split("\n")[0]: section for section in PAGE.read_text(encoding="utf-8").split("\n## ")
    }
    titles = [board.title for board in BOARDS_BY_NAME.values()]
    assert [title for title in sections if title in titles] == titles
    for name, board in BOARDS_BY_NAME.items():
        assert re.findall(r"^\| \*\*(.+?)\*\* \|", sections[board.title], re.MULTILINE) == [
            row.title for row in board.rows
        ]
        assert f"](dashboards/{name}.svg)" in sections[board.title]
