"""The dashboards and rules that are checked in: made by this release, and such as Grafana and Prometheus take them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from otel_infer import cli, semconv
from otel_infer.cli.alerts import rules_to_yaml
from otel_infer.monitoring import dashboards
from otel_infer.monitoring.alerts import burn_rate_rules, slo_spec
from otel_infer.monitoring.dashboards.dashboard import resolve_variables
from otel_infer.semconv import prometheus

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "dashboards"
BOARDS = dashboards.build_dashboards()
NAMES = {name: metric for metric in semconv.METRICS for name in prometheus.series_names(metric)}
HISTOGRAM_ENDINGS = (prometheus.BUCKET, prometheus.SUM, prometheus.COUNT)
DATASOURCES = ("${datasource}", "${tempo}")


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in board["panels"]:
        if panel["type"] != "row":
            yield panel
        yield from panel.get("panels", ())


def everywhere() -> list[Any]:
    return [
        pytest.param(name, panel, id=f"{name}:{panel['title']}")
        for name, board in BOARDS.items()
        for panel in panels(board)
    ]


each_board = pytest.mark.parametrize(("name", "board"), BOARDS.items(), ids=BOARDS)
each_panel = pytest.mark.parametrize(("name", "panel"), everywhere())


def exprs(panel: dict[str, Any]) -> list[str]:
    return [target["expr"] for target in panel["targets"] if "expr" in target]


def selectors(node: Any) -> Iterator[Any]:
    """Every vector selector in a parsed expression."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
        return
    for part in ("expr", "lhs", "rhs", "vector_selector", "vs", "args", "param"):
        below = getattr(node, part, None)
        for one in below if isinstance(below, list) else [below] if below is not None else []:
            yield from selectors(one)


# ── what is checked in ───────────────────────────────────────────────────────────────────────────────────────────


def test_the_files_are_those_that_this_release_makes() -> None:
    assert cli.main(["dashboards", "build", "--check", str(FOLDER)]) == 0
    assert {path.name for path in FOLDER.glob("*.json")} == BOARDS.keys()
    made = (FOLDER / "alerts" / "otel-infer.rules.yml").read_text(encoding="utf-8")
    assert rules_to_yaml(burn_rate_rules.build_rule_groups(slo_spec.DEFAULT_SPEC)) == made


RENAMING = """
import contextlib, io, json, sys
from otel_infer import cli, semconv

MADE = ("otel_infer.monitoring.", "otel_infer.cli.dashboards", "otel_infer.cli.prometheus_check")
stale = {}
for key, metric in list(vars(semconv).items()):
    if not isinstance(metric, semconv.Metric):
        continue
    for name in [name for name in sys.modules if name.startswith(MADE)]:
        parent, _, child = name.rpartition(".")
        vars(sys.modules.get(parent, sys)).pop(child, None)
        del sys.modules[name]
    setattr(semconv, key, metric._replace(name=metric.name + ".renamed"))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = cli.main(["dashboards", "build", "--check", sys.argv[1]])
    stale[metric.name] = status, said.getvalue()
    setattr(semconv, key, metric)
json.dump(stale, sys.stdout)
"""


def test_a_metric_that_is_renamed_makes_the_check_fail_and_name_each_file() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RENAMING, str(FOLDER)], capture_output=True, check=True, text=True, cwd=ROOT
    )
    said = json.loads(done.stdout)
    texts = {name: json.dumps(board) for name, board in BOARDS.items()}
    for metric in semconv.METRICS:
        status, printed = said[metric.name]
        using = [
            name
            for name, text in texts.items()
            if re.search(rf"\b{prometheus.family_name(metric)}(_|\b)", text)
        ]
        assert (status, len(using)) == (bool(using), printed.count("not what this release makes")), (
            metric.name
        )
        assert all(f"{FOLDER / name}: " in printed for name in using), metric.name


# ── what they ask ────────────────────────────────────────────────────────────────────────────────────────────────


@each_panel
def test_every_question_is_about_series_and_labels_that_we_emit(name: str, panel: dict[str, Any]) -> None:
    for expr in exprs(panel):
        for found in selectors(promql_parser.parse(resolve_variables(expr, "5m"))):
            if found.name == prometheus.STAGE_BUDGET:
                continue
            metric = NAMES[found.name]
            labels = {"job", "instance", *map(prometheus.label_name, metric.attributes)}
            assert {one.name for one in found.matchers.matchers} <= labels | {"le"}, expr
            assert {"job", "instance"} <= {one.name for one in found.matchers.matchers}, expr


@each_panel
def test_rates_are_taken_over_the_window_that_grafana_reckons(name: str, panel: dict[str, Any]) -> None:
    for expr in exprs(panel):
        assert set(re.findall(r"\[([^\]]+)\]", expr)) <= {"$__rate_interval"}, expr
        counters = [
            one for one in re.findall(r"\w+_total\b", expr) if not re.search(rf"(rate|increase)\({one}", expr)
        ]
        assert counters == [] or panel["type"] == "stat", expr


@each_panel
def test_every_panel_says_what_it_means_and_what_to_do(name: str, panel: dict[str, Any]) -> None:
    assert panel["title"]
    means, when_bad = panel["description"].split("\n\n**When it is bad:** ")
    assert means.endswith(".")
    assert when_bad.endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["fieldConfig"]["defaults"]["noValue"]
    assert len(panel["targets"]) > 0 or panel["type"] == "alertlist"


def test_what_is_stacked_counts_no_time_twice() -> None:
    stacked = [
        expr
        for board in BOARDS.values()
        for panel in panels(board)
        if panel["fieldConfig"]["defaults"].get("custom", {}).get("stacking", {}).get("mode") == "normal"
        for expr in exprs(panel)
        if "by (infer_stage)" in expr
    ]
    assert stacked
    for expr in stacked:
        assert all(name in expr for name in semconv.NESTED_STAGES)


@each_panel
def test_no_panel_names_a_data_source_of_its_own(name: str, panel: dict[str, Any]) -> None:
    sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
    assert {source["uid"] for source in sources} <= set(DATASOURCES)


@each_panel
def test_exemplars_are_asked_for_where_there_are_some(name: str, panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        if target.get("exemplar"):
            assert prometheus.BUCKET in target["expr"]
    if panel["type"] == "heatmap":
        assert all(target["exemplar"] for target in panel["targets"])


def test_every_metric_is_on_a_dashboard_or_it_is_said_why_not() -> None:
    shown = {
        NAMES[found.name].name
        for board in BOARDS.values()
        for panel in panels(board)
        for expr in exprs(panel)
        for found in selectors(promql_parser.parse(resolve_variables(expr, "5m")))
        if found.name in NAMES
    }
    assert {metric.name for metric in semconv.METRICS} - shown == set(NOT_SHOWN)


NOT_SHOWN: dict[str, str] = {
    semconv.KV_BLOCK_SIZE.name: "it never changes; what follows from it is the headroom, which is shown",
}
"""Why a metric is on no dashboard."""


# ── what a dashboard is ──────────────────────────────────────────────────────────────────────────────────────────


@each_board
def test_a_dashboard_keeps_its_address_and_cannot_be_edited_in_place(
    name: str, board: dict[str, Any]
) -> None:
    assert board["uid"] == f"otel-infer-{name.removesuffix('.json')}"
    assert 39 <= board["schemaVersion"] <= 41
    assert board["editable"] is False
    assert not {"id", "version", "__inputs", "__requires"} & board.keys()
    assert board["tags"] == ["otel-infer"]


@each_board
def test_every_choice_is_used_and_every_use_is_a_choice(name: str, board: dict[str, Any]) -> None:
    said = json.dumps([board["panels"], board["templating"], board["annotations"]])
    used = {one for one in re.findall(r"\$\{?(\w+)", said) if not one.startswith("__")}
    choices = {one["name"] for one in board["templating"]["list"] if one["type"] != "adhoc"}
    assert used == choices


@each_board
def test_panels_lie_beside_each_other_and_never_on_top(name: str, board: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in (*board["panels"], *(below for row in board["panels"] for below in row.get("panels", ()))):
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
    ids = [
        panel["id"] for panel in (*board["panels"], *panels(board)) if panel["type"] != "row" or "id" in panel
    ]
    assert len({panel["id"] for panel in panels(board)}) == len(list(panels(board))), ids


@each_board
def test_a_dashboard_is_not_too_much_to_look_at(name: str, board: dict[str, Any]) -> None:
    assert len([panel for panel in board["panels"] if panel["type"] != "row"]) <= 25


def test_links_lead_to_dashboards_that_there_are() -> None:
    uids = {board["uid"] for board in BOARDS.values()}
    targets = re.findall(
        r"/d/([\w-]+)",
        json.dumps(BOARDS) + json.dumps(burn_rate_rules.build_rule_groups(slo_spec.DEFAULT_SPEC)),
    )
    assert set(targets) <= uids


# ── rules ────────────────────────────────────────────────────────────────────────────────────────────────────────

RULES = [
    pytest.param(
        rule, id=f"{rule.get('alert') or rule['record']} {rule.get('labels', {}).get('long', '')}".strip()
    )
    for group in burn_rate_rules.build_rule_groups(slo_spec.DEFAULT_SPEC)["groups"]
    for rule in group["rules"]
]
RECORDED = {param.values[0]["record"] for param in RULES if "record" in param.values[0]}


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_asks_for_series_and_labels_that_there_are(rule: dict[str, Any]) -> None:
    for found in selectors(promql_parser.parse(rule["expr"])):
        if found.name in RECORDED:
            continue
        labels = {"le", *map(prometheus.label_name, NAMES[found.name].attributes)}
        assert {one.name for one in found.matchers.matchers} <= labels


@pytest.mark.parametrize("rule", [rule for rule in RULES if "alert" in rule.values[0]])
def test_every_alert_says_who_is_woken_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["alert"].startswith("OtelInfer")
    assert rule["labels"]["severity"] in ("page", "ticket", "info", "none")
    if rule["labels"]["severity"] == "none":
        return
    assert rule["annotations"].keys() >= {"summary", "description", "dashboard_url"}
    assert rule["keep_firing_for"]


def test_the_rules_are_yaml_that_says_the_same() -> None:
    made = burn_rate_rules.build_rule_groups(slo_spec.DEFAULT_SPEC)
    assert yaml.safe_load(rules_to_yaml(made)) == made
