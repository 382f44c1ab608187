"""The preview pictures of the dashboards: panels are inside their areas, and the docs page lists all dashboards."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from otel_infer.monitoring import dashboards
from otel_infer.monitoring.dashboards.dashboard import resolve_variables
from scripts.preview import answers, lines, page, svg, units

PAGE = Path(__file__).parents[2] / "docs" / "dashboards.md"
SVG = "{http://www.w3.org/2000/svg}"
WINDOW = answers.Span(1_800_000_000.0, 1_800_000_600.0, "20s")
BOARDS_BY_NAME = {board.name: board for board in (make() for make in dashboards.DASHBOARD_BUILDERS)}
BOUNDS = ("0.001", "0.01", "0.1", "1.0", "2.5", "+Inf")
MAX_BYTES = 300_000
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


def parse_panels(text: str) -> dict[int, ElementTree.Element]:
    """Returns the panels of a picture by their ids, which are unique."""
    elements = list(ElementTree.fromstring(text).iter(f"{SVG}svg"))[1:]
    ids = [int(element.attrib["data-panel"]) for element in elements]
    assert len(ids) == len(set(ids))
    return dict(zip(ids, elements))


def box_of_element(element: ElementTree.Element) -> svg.Box:
    return svg.Box(*(float(element.attrib[key]) for key in ("x", "y", "width", "height")))


def list_texts(element: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in element.iter(f"{SVG}text")]


def text_boxes(panel: ElementTree.Element) -> list[svg.Box]:
    """Returns the largest areas that the texts of a panel can take."""
    boxes = []
    for text in panel.iter(f"{SVG}text"):
        size = float(text.attrib.get("font-size", svg.SIZE))
        x, y, wide = float(text.attrib["x"]), float(text.attrib["y"]), svg.wide(text.text or "", size)
        left = x - wide * {"middle": 0.5, "end": 1.0}.get(text.attrib.get("text-anchor", ""), 0.0)
        boxes.append(svg.Box(left, y - 0.8 * size, wide, 0.8 * size))
    return boxes


def iter_corners(panel: ElementTree.Element) -> Iterator[tuple[float, float]]:
    """Yields the corners of everything that is drawn in a panel."""
    for box in [*text_boxes(panel), *map(box_of_element, panel.iter(f"{SVG}rect"))]:
        yield from ((box.left, box.top), (box.right, box.bottom))
    for path in panel.iter(f"{SVG}path"):
        for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path.attrib["d"]):
            yield float(x), float(y)


def are_apart(box: svg.Box, other: svg.Box) -> bool:
    beside = box.left >= other.right - 0.1 or box.right <= other.left + 0.1
    return beside or box.top >= other.bottom - 0.1 or box.bottom <= other.top + 0.1


# ── pictures ─────────────────────────────────────────────────────────────────────────────────────────────────────


@each_board
@pytest.mark.parametrize(
    ("series", "word"),
    [(1, "one"), (60, "a model with a very long name " * 9), (12, "<script>&'\""), (12, "名前" * 40)],
    ids=["one series", "many series", "markup", "wide characters"],
)
def test_panels_are_drawn_once_without_overlap(board: dict[str, Any], series: int, word: str) -> None:
    """Nothing is drawn outside its panel, and no text overlaps another text."""
    text = page.drawn(board, CannedPrometheus(series, word), WINDOW)
    drawn = parse_panels(text)
    assert {panel["id"] for panel in list_panels(board)} == drawn.keys()
    for panel in list_panels(board):
        box = box_of_element(drawn[panel["id"]])
        for x, y in iter_corners(drawn[panel["id"]]):
            assert -0.1 <= x <= box.width + 0.1, panel["title"]
            assert -0.1 <= y <= box.height + 0.1, panel["title"]
        texts = text_boxes(drawn[panel["id"]])
        assert all(are_apart(*pair) for pair in combinations(texts, 2)), panel["title"]


@each_board
def test_panel_areas_do_not_overlap(board: dict[str, Any]) -> None:
    placed = list(page.layout(board))
    assert all(panel.box.right <= page.WIDTH for panel in placed)
    for i, panel in enumerate(placed):
        for other in placed[:i]:
            assert are_apart(panel.box, other.box), panel.panel["title"]


@each_board
def test_a_picture_is_labelled_preview_and_is_small(board: dict[str, Any]) -> None:
    text = page.drawn(board, CannedPrometheus(20), WINDOW)
    assert page.PREVIEW in list_texts(ElementTree.fromstring(text))
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert len(text.encode()) < MAX_BYTES


@each_board
def test_panels_without_data_show_their_no_value_text(board: dict[str, Any]) -> None:
    drawn = parse_panels(page.drawn(board, CannedPrometheus(0, value=lambda _: 0.0), WINDOW))
    for panel in list_panels(board):
        text = " ".join(list_texts(drawn[panel["id"]]))
        if page.is_elsewhere(panel):
            assert "Not drawn" in text
        else:
            assert f"{text} ".count(panel["fieldConfig"]["defaults"]["noValue"]) == 1
        assert svg.cut(resolve_variables(panel["title"], "20s"), 1000) in text


def test_errors_of_prometheus_are_shown() -> None:
    text = page.drawn(dashboards.build_dashboards()["overview.json"], RefusingPrometheus(), WINDOW)
    assert (
        sum(
            "parse error: <it> & that" in " ".join(list_texts(panel)) for panel in parse_panels(text).values()
        )
        > 10
    )


def test_thresholds_set_the_colour_of_a_tile() -> None:
    board = dashboards.build_dashboards()["overview.json"]
    failed = find_panel(board, "Failed")
    colours = {}
    for share in (0.0, 0.02, 0.5):
        text = page.drawn(board, CannedPrometheus(value=lambda _, share=share: share), WINDOW)
        (number,) = [
            element
            for element in parse_panels(text)[failed["id"]].iter(f"{SVG}text")
            if "%" in (element.text or "")
        ]
        colours[number.text] = number.attrib["fill"]
    assert colours == {"0 %": svg.NAMED["green"], "2 %": svg.NAMED["orange"], "50 %": svg.NAMED["red"]}


def test_a_legend_has_the_labels_of_its_series() -> None:
    board = dashboards.build_dashboards()["latency-breakdown.json"]
    stages = find_panel(board, "p99 of each stage")
    legend = list_texts(parse_panels(page.drawn(board, CannedPrometheus(3, "stage"), WINDOW))[stages["id"]])
    assert {"stage-0", "stage-1", "stage-2"} <= set(legend)


def test_undrawn_series_are_counted() -> None:
    board = dashboards.build_dashboards()["latency-breakdown.json"]
    stages = find_panel(board, "p99 of each stage")
    panel = parse_panels(page.drawn(board, CannedPrometheus(99, "stage"), WINDOW))[stages["id"]]
    listed = sum(text.startswith("stage-") for text in list_texts(panel))
    assert f"and {99 - listed} more" in list_texts(panel)
    lines_drawn = [path for path in panel.iter(f"{SVG}path") if path.attrib.get("stroke-width") == "1.4"]
    assert len(lines_drawn) == lines.MOST


def test_missing_values_are_gaps() -> None:
    board = dashboards.build_dashboards()["decode.json"]
    steps = find_panel(board, "Steps")
    panel = parse_panels(page.drawn(board, CannedPrometheus(), WINDOW))[steps["id"]]
    drawn = [
        path.attrib["d"] for path in panel.iter(f"{SVG}path") if path.attrib.get("stroke-width") == "1.4"
    ]
    assert {d.count("M") for d in drawn} == {4}


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
    assert expected == units.shown(value, unit)


@pytest.mark.parametrize("unit", ["s", "bytes", "percentunit", "reqps", "short", "celsius"])
@pytest.mark.parametrize("top", [0.0, 3e-7, 0.0123, 0.97, 1.0, 7.3, 61.0, 4_000.0, 90_000.0, 8.1e10])
def test_an_axis_ends_at_or_above_the_maximum(unit: str, top: float) -> None:
    marks = units.ticks(top, unit, 4)
    assert marks[0] == 0
    assert marks[-1] >= top
    assert 2 <= len(marks) <= 6
    assert len({units.shown(mark, unit) for mark in marks}) == len(marks)


def test_axes_of_time_and_bytes_have_round_steps() -> None:
    assert [units.shown(mark, "s") for mark in units.ticks(0.5, "s", 3)] == [
        "0 s",
        "200 ms",
        "400 ms",
        "600 ms",
    ]
    assert [units.shown(mark, "bytes") for mark in units.ticks(3e9, "bytes", 3)][1:] == [
        "1 GiB",
        "2 GiB",
        "3 GiB",
    ]


def test_a_text_is_cut_to_its_width() -> None:
    assert svg.cut("short", 100) == "short"
    shortened = svg.cut("w" * 100, 100)
    assert shortened.endswith("…")
    assert svg.wide(shortened) <= 100
    assert svg.cut("w", 3) == ""


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
