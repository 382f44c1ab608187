"""Every panel of every dashboard, asked of a Prometheus that scrapes real servers."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from otel_infer import semconv
from otel_infer.cli import main
from otel_infer.monitoring import dashboards
from otel_infer.monitoring.dashboards.dashboard import resolve_variables
from otel_infer.semconv import prometheus
from tests.stack.running import Stack
from tests.support.otlp_receiver import OtlpReceiver

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(420)]

WAIVERS = Path(__file__).with_name("waivers.yaml")
WINDOW, LOOK_BACK_S = "30s", 60
MOST_WAIVED, FEWEST = 10, 0.9


def panels() -> Iterator[tuple[str, list[str]]]:
    """Dashboard and title of each panel that asks Prometheus, and its questions."""
    for file, board in dashboards.build_dashboards().items():
        row = ""
        for top in board["panels"]:
            row = top["title"] if top["type"] == "row" else row
            for panel in (top, *top.get("panels", ())):
                exprs = [target["expr"] for target in panel.get("targets", ()) if "expr" in target]
                if exprs:
                    yield f"{file}: {row}: {panel['title']}", exprs


def found(stack: Stack, expr: str) -> list[float]:
    """The finite values of the last minute, of all series."""
    courses = stack.prometheus.course(resolve_variables(expr, WINDOW), LOOK_BACK_S)
    return [value for course in courses for value in course if math.isfinite(value)]


def test_every_panel_is_answered_and_nearly_all_show_something_that_changes(stack: Stack) -> None:
    waived: dict[str, str] = yaml.safe_load(WAIVERS.read_text())
    empty: dict[str, str] = {}
    count = 0
    for where, exprs in panels():
        count += 1
        values = [value for expr in exprs for value in found(stack, expr)]
        if not values:
            empty[where] = "empty"
        elif len(set(values)) == 1:
            empty[where] = f"always {values[0]:g}"
    unexpected = {where: why for where, why in empty.items() if where not in waived}
    assert not unexpected
    assert len(waived) <= MOST_WAIVED
    assert all(why.strip() for why in waived.values())
    assert 1 - len(empty) / count >= FEWEST
    print(f"{count} panels, {count - len(empty)} with values that change, waived: {sorted(empty)}")


def test_the_command_says_which_panels_have_data(stack: Stack, capsys: Any) -> None:
    assert (
        main(["dashboards", "check", "--prometheus", stack.prometheus.url, "--window", WINDOW, "--all"]) == 0
    )
    said = capsys.readouterr().out
    assert "data   overview.json: TTFT p99 (A)" in said
    assert said.splitlines()[-1].endswith(" 0 refused")


def test_what_is_scraped_has_the_names_and_labels_that_otlp_gives(stack: Stack) -> None:
    ours = {name: metric for metric in semconv.METRICS for name in prometheus.series_names(metric)}
    for name in stack.prometheus.ask.fetch_series_names() & ours.keys():
        allowed = {"__name__", "job", "instance", "le", *map(prometheus.label_name, ours[name].attributes)}
        for labels in stack.prometheus.ask.get("series", **{"match[]": name}):
            assert labels.keys() <= allowed, labels
            assert not {key for key in labels if key.startswith("exported_")}


def test_an_exemplar_of_the_ttft_p99_names_a_trace_that_was_sent(stack: Stack) -> None:
    board = dashboards.build_dashboards()["overview.json"]
    (panel,) = [
        one
        for one in board["panels"]
        if one["title"] == "Time to first token" and one["type"] == "timeseries"
    ]
    (target,) = [one for one in panel["targets"] if one["exemplar"]]
    now = time.time()
    said = stack.prometheus.ask.get(
        "query_exemplars", query=resolve_variables(target["expr"], WINDOW), start=f"{now - 60}", end=f"{now}"
    )
    named = {one["labels"]["trace_id"] for series in said for one in series["exemplars"]}
    assert named

    def unsent(it: OtlpReceiver) -> set[str]:
        return named - {span["trace_id"] for span in it.spans}

    stack.receiver.wait_for(lambda it: not unsent(it), 20)  # spans wait to be sent together
    assert unsent(stack.receiver) == set()
