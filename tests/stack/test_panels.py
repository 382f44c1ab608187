"""Every panel of every dashboard, queried from a Prometheus that scrapes real servers."""

from __future__ import annotations

import math
import re
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
MAX_WAIVED, MIN_SHARE_WITH_DATA = 10, 0.9


def iter_panels() -> Iterator[tuple[str, list[str]]]:
    """Yields the dashboard, row and title of each panel with Prometheus queries, and the queries."""
    for file, board in dashboards.build_dashboards().items():
        row = ""
        for top in board["panels"]:
            row = top["title"] if top["type"] == "row" else row
            for panel in (top, *top.get("panels", ())):
                exprs = [target["expr"] for target in panel.get("targets", ()) if "expr" in target]
                if exprs:
                    yield f"{file}: {row}: {panel['title']}", exprs


def read_values(stack: Stack, expr: str) -> list[float]:
    """Returns the finite values of all series in the last minute."""
    series = stack.prometheus.query_range(resolve_variables(expr, WINDOW), LOOK_BACK_S)
    return [value for values in series for value in values if math.isfinite(value)]


def test_nearly_all_panels_show_changing_values(stack: Stack) -> None:
    """The exceptions are empty or constant, and are listed with a reason in waivers.yaml."""
    waived: dict[str, str] = yaml.safe_load(WAIVERS.read_text())
    unchanging: dict[str, str] = {}
    count = 0
    for where, exprs in iter_panels():
        count += 1
        values = [value for expr in exprs for value in read_values(stack, expr)]
        if not values:
            unchanging[where] = "empty"
        elif len(set(values)) == 1:
            unchanging[where] = f"always {values[0]:g}"
    unexpected = {where: why for where, why in unchanging.items() if where not in waived}
    assert not unexpected
    assert len(waived) <= MAX_WAIVED
    assert all(why.strip() for why in waived.values())
    assert 1 - len(unchanging) / count >= MIN_SHARE_WITH_DATA
    print(f"{count} panels, {count - len(unchanging)} with values that change, waived: {sorted(unchanging)}")


def test_the_command_lists_panels_with_data(stack: Stack, capsys: Any) -> None:
    assert (
        main(["dashboards", "check", "--prometheus", stack.prometheus.url, "--window", WINDOW, "--all"]) == 0
    )
    output = capsys.readouterr().out
    assert re.search(r"^data +overview\.json: TTFT p99", output, re.MULTILINE)
    assert re.search(r"\b0 rejected$", output.splitlines()[-1])


def test_scraped_metrics_have_the_names_of_otlp(stack: Stack) -> None:
    exported = {name: metric for metric in semconv.METRICS for name in prometheus.series_names(metric)}
    for name in stack.prometheus.client.fetch_series_names() & exported.keys():
        allowed = {
            "__name__",
            "job",
            "instance",
            "le",
            *map(prometheus.label_name, exported[name].attributes),
        }
        for labels in stack.prometheus.client.get("series", **{"match[]": name}):
            assert labels.keys() <= allowed, labels
            assert not {key for key in labels if key.startswith("exported_")}


def test_exemplars_of_the_ttft_p99_name_exported_traces(stack: Stack) -> None:
    board = dashboards.build_dashboards()["overview.json"]
    (panel,) = [
        panel
        for panel in board["panels"]
        if panel["title"] == "Time to first token" and panel["type"] == "timeseries"
    ]
    (target,) = [target for target in panel["targets"] if target["exemplar"]]
    now = time.time()
    response = stack.prometheus.client.get(
        "query_exemplars", query=resolve_variables(target["expr"], WINDOW), start=f"{now - 60}", end=f"{now}"
    )
    named = {exemplar["labels"]["trace_id"] for series in response for exemplar in series["exemplars"]}
    assert named

    def find_unexported(it: OtlpReceiver) -> set[str]:
        return named - {span["trace_id"] for span in it.spans}

    stack.receiver.wait_for(lambda it: not find_unexported(it), 20)  # spans are exported in batches
    assert find_unexported(stack.receiver) == set()
