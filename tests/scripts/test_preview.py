"""The pictures of the dashboards: every panel in its place, nothing outside of it, and a page that names all of them."""

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
SPAN = answers.Span(1_800_000_000.0, 1_800_000_600.0, "20s")
NAMES = {board.name: board for board in (make() for make in dashboards.DASHBOARD_BUILDERS)}
BOUNDS = ("0.001", "0.01", "0.1", "1.0", "2.5", "+Inf")
MOST_BYTES = 300_000
each_board = pytest.mark.parametrize(
    "board", dashboards.build_dashboards().values(), ids=dashboards.build_dashboards()
)


class Canned:
    """A Prometheus that has so many series for whatever labels a question is about; every third instant of each is missing."""

    def __init__(self, series: int = 2, word: str = "one", value: Callable[[int], float] = float) -> None:
        self._series, self._word, self._value = series, word, value

    def get(self, path: str, **what: str) -> Any:
        if path == "query_exemplars":
            found = [{"timestamp": SPAN.start + 7 * i, "value": str(i / 20)} for i in range(80)]
            return [{"exemplars": found}]
        metrics = [*self._metrics(what["query"])]
        if path == "query":
            return {
                "result": [
                    {"metric": one, "value": [SPAN.end, str(self._value(i))]} for i, one in enumerate(metrics)
                ]
            }
        start, end, step = (float(what[key]) for key in ("start", "end", "step"))
        times = [start + i * step for i in range(int((end - start) / step) + 1)]
        return {
            "result": [{"metric": one, "values": self._values(i, times)} for i, one in enumerate(metrics)]
        }

    def _values(self, number: int, times: list[float]) -> list[tuple[float, str]]:
        return [(at, str(self._value(number + i))) for i, at in enumerate(times) if i % 30 > 9]

    def _metrics(self, query: str) -> Iterator[dict[str, str]]:
        said = re.search(r"by \(([^)]*)\)", query)
        labels = said[1].split(", ") if said else []
        if labels == ["le"] and "quantile" not in query:
            yield from ({"le": bound} for bound in BOUNDS)
            return
        count = self._series if set(labels) - {"le"} else min(self._series, 1)
        for i in range(count):
            yield {label: f"{self._word}-{i}" for label in labels if label != "le"}


class Refusing:
    def get(self, path: str, **what: str) -> Any:
        raise ValueError("parse error: <it> & that")


def every_panel(board: dict[str, Any]) -> list[dict[str, Any]]:
    everything = [one for top in board["panels"] for one in (top, *top.get("panels", ()))]
    return [one for one in everything if one["type"] != "row"]


def pictures(text: str) -> dict[int, ElementTree.Element]:
    """The panels of a picture by their ids, each there once."""
    found = list(ElementTree.fromstring(text).iter(f"{SVG}svg"))[1:]
    ids = [int(one.attrib["data-panel"]) for one in found]
    assert len(ids) == len(set(ids))
    return dict(zip(ids, found))


def place(one: ElementTree.Element) -> svg.Box:
    return svg.Box(*(float(one.attrib[key]) for key in ("x", "y", "width", "height")))


def words(one: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in one.iter(f"{SVG}text")]


def written(one: ElementTree.Element) -> list[svg.Box]:
    """Where the texts of a panel are, at the widest."""
    boxes = []
    for text in one.iter(f"{SVG}text"):
        size = float(text.attrib.get("font-size", svg.SIZE))
        x, y, wide = float(text.attrib["x"]), float(text.attrib["y"]), svg.wide(text.text or "", size)
        left = x - wide * {"middle": 0.5, "end": 1.0}.get(text.attrib.get("text-anchor", ""), 0.0)
        boxes.append(svg.Box(left, y - 0.8 * size, wide, 0.8 * size))
    return boxes


def corners(one: ElementTree.Element) -> Iterator[tuple[float, float]]:
    """Of everything that is drawn in a panel."""
    for box in [*written(one), *map(place, one.iter(f"{SVG}rect"))]:
        yield from ((box.left, box.top), (box.right, box.bottom))
    for path in one.iter(f"{SVG}path"):
        for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path.attrib["d"]):
            yield float(x), float(y)


def are_apart(one: svg.Box, other: svg.Box) -> bool:
    beside = one.left >= other.right - 0.1 or one.right <= other.left + 0.1
    return beside or one.top >= other.bottom - 0.1 or one.bottom <= other.top + 0.1


# ── the pictures ─────────────────────────────────────────────────────────────────────────────────────────────────


@each_board
@pytest.mark.parametrize(
    ("series", "word"),
    [(1, "one"), (60, "a model whose name has no end " * 9), (12, "<script>&'\""), (12, "名前" * 40)],
    ids=["one", "many", "markup", "square"],
)
def test_every_panel_is_drawn_once_nothing_leaves_it_and_no_text_is_over_another(
    board: dict[str, Any], series: int, word: str
) -> None:
    text = page.drawn(board, Canned(series, word), SPAN)
    drawn = pictures(text)
    assert {one["id"] for one in every_panel(board)} == drawn.keys()
    for panel in every_panel(board):
        box = place(drawn[panel["id"]])
        for x, y in corners(drawn[panel["id"]]):
            assert -0.1 <= x <= box.width + 0.1, panel["title"]
            assert -0.1 <= y <= box.height + 0.1, panel["title"]
        texts = written(drawn[panel["id"]])
        assert all(are_apart(*pair) for pair in combinations(texts, 2)), panel["title"]


@each_board
def test_panels_lie_beside_each_other_as_the_dashboard_says(board: dict[str, Any]) -> None:
    placed = list(page.layout(board))
    assert all(one.box.right <= page.WIDTH for one in placed)
    for i, one in enumerate(placed):
        for other in placed[:i]:
            assert are_apart(one.box, other.box), one.panel["title"]


@each_board
def test_a_picture_says_that_it_is_not_grafana_and_is_small(board: dict[str, Any]) -> None:
    text = page.drawn(board, Canned(20), SPAN)
    assert page.PREVIEW in words(ElementTree.fromstring(text))
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert len(text.encode()) < MOST_BYTES


@each_board
def test_a_panel_without_data_says_what_the_dashboard_has_it_say(board: dict[str, Any]) -> None:
    drawn = pictures(page.drawn(board, Canned(0, value=lambda _: 0.0), SPAN))
    for panel in every_panel(board):
        said = " ".join(words(drawn[panel["id"]]))
        if page.is_elsewhere(panel):
            assert "Not drawn" in said
        else:
            assert f"{said} ".count(panel["fieldConfig"]["defaults"]["noValue"]) == 1
        assert svg.cut(resolve_variables(panel["title"], "20s"), 1000) in said


def test_what_prometheus_refuses_is_said() -> None:
    text = page.drawn(dashboards.build_dashboards()["overview.json"], Refusing(), SPAN)
    assert sum("parse error: <it> & that" in " ".join(words(one)) for one in pictures(text).values()) > 10


def test_thresholds_colour_a_tile() -> None:
    board = dashboards.build_dashboards()["overview.json"]
    (failed,) = [one for one in every_panel(board) if one["title"] == "Failed"]
    colours = {}
    for share in (0.0, 0.02, 0.5):
        text = page.drawn(board, Canned(value=lambda _, share=share: share), SPAN)
        (number,) = [
            one for one in pictures(text)[failed["id"]].iter(f"{SVG}text") if "%" in (one.text or "")
        ]
        colours[number.text] = number.attrib["fill"]
    assert colours == {"0 %": svg.NAMED["green"], "2 %": svg.NAMED["orange"], "50 %": svg.NAMED["red"]}


def test_a_legend_has_the_labels_that_a_series_carries() -> None:
    board = dashboards.build_dashboards()["anatomy.json"]
    (stages,) = [one for one in every_panel(board) if one["title"] == "p99 of each stage"]
    said = words(pictures(page.drawn(board, Canned(3, "stage"), SPAN))[stages["id"]])
    assert {"stage-0", "stage-1", "stage-2"} <= set(said)


def test_more_series_than_are_drawn_are_counted() -> None:
    board = dashboards.build_dashboards()["anatomy.json"]
    (stages,) = [one for one in every_panel(board) if one["title"] == "p99 of each stage"]
    panel = pictures(page.drawn(board, Canned(99, "stage"), SPAN))[stages["id"]]
    told = sum(said.startswith("stage-") for said in words(panel))
    assert f"and {99 - told} more" in words(panel)
    lines_drawn = [one for one in panel.iter(f"{SVG}path") if one.attrib.get("stroke-width") == "1.4"]
    assert len(lines_drawn) == lines.MOST


def test_what_is_missing_is_a_gap() -> None:
    board = dashboards.build_dashboards()["decode.json"]
    (steps,) = [one for one in every_panel(board) if one["title"] == "Steps"]
    panel = pictures(page.drawn(board, Canned(), SPAN))[steps["id"]]
    drawn = [one.attrib["d"] for one in panel.iter(f"{SVG}path") if one.attrib.get("stroke-width") == "1.4"]
    assert {d.count("M") for d in drawn} == {4}


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("value", "unit", "said"),
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
def test_numbers_have_their_units(value: float, unit: str, said: str) -> None:
    assert said == units.shown(value, unit)


@pytest.mark.parametrize("unit", ["s", "bytes", "percentunit", "reqps", "short", "celsius"])
@pytest.mark.parametrize("top", [0.0, 3e-7, 0.0123, 0.97, 1.0, 7.3, 61.0, 4_000.0, 90_000.0, 8.1e10])
def test_an_axis_ends_at_a_round_value_above_all_others(unit: str, top: float) -> None:
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


def test_a_text_is_cut_where_it_does_not_fit() -> None:
    assert svg.cut("short", 100) == "short"
    kept = svg.cut("w" * 100, 100)
    assert kept.endswith("…")
    assert svg.wide(kept) <= 100
    assert svg.cut("w", 3) == ""


# ── the page ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_page_names_every_dashboard_and_every_row_in_their_order_and_has_its_picture() -> None:
    sections = {one.split("\n")[0]: one for one in PAGE.read_text(encoding="utf-8").split("\n## ")}
    titles = [board.title for board in NAMES.values()]
    assert [title for title in sections if title in titles] == titles
    for name, board in NAMES.items():
        assert re.findall(r"^\| \*\*(.+?)\*\* \|", sections[board.title], re.MULTILINE) == [
            row.title for row in board.rows
        ]
        assert f"](dashboards/{name}.svg)" in sections[board.title]
