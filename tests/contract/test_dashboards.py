"""The committed dashboards and rules match this release, and are valid for Grafana and Prometheus."""

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


def iter_panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in board["panels"]:
        if panel["type"] != "row":
            yield panel
        yield from panel.get("panels", ())


def parametrize_panels() -> list[Any]:
    return [
        pytest.param(name, panel, id=f"{name}:{panel['title']}")
        for name, board in BOARDS.items()
        for panel in iter_panels(board)
    ]


each_board = pytest.mark.parametrize(("name", "board"), BOARDS.items(), ids=BOARDS)
each_panel = pytest.mark.parametrize(("name", "panel"), parametrize_panels())


def list_exprs(panel: dict[str, Any]) -> list[str]:
    return [target["expr"] for target in panel["targets"] if "expr" in target]


def iter_selectors(node: Any) -> Iterator[Any]:
    """Yields every vector selector in a parsed expression."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node
        return
    for part in ("expr", "lhs", "rhs", "vector_selector", "vs", "args", "param"):
        children = getattr(node, part, None)
        for child in children if isinstance(children, list) else [children] if children is not None else []:
            yield from iter_selectors(child)


# ── committed files ──────────────────────────────────────────────────────────────────────────────────────────────


def test_committed_files_match_this_release() -> None:
    assert cli.main(["dashboards", "build", "--check", str(FOLDER)]) == 0
    assert {path.name for path in FOLDER.glob("*.json")} == BOARDS.keys()
    committed = (FOLDER / "alerts" / "otel-infer.rules.yml").read_text(encoding="utf-8")
    assert rules_to_yaml(burn_rate_rules.build_rule_groups(slo_spec.DEFAULT_SPEC)) == committed


RENAMING = """
import contextlib, io, json, sys
from otel_infer import cli, semconv

GENERATED = ("otel_infer.monitoring.", "otel_infer.cli.dashboards", "otel_infer.cli.prometheus_check")
stale = {}
for key, metric in list(vars(semconv).items()):
    if not isinstance(metric, semconv.Metric):
        continue
    for name in [name for name in sys.modules if name.startswith(GENERATED)]:
        parent, _, child = name.rpartition(".")
        vars(sys.modules.get(parent, sys)).pop(child, None)
        del sys.modules[name]
    setattr(semconv, key, metric._replace(name=metric.name + ".renamed"))
    with contextlib.redirect_stdout(io.StringIO()) as output:
        status = cli.main(["dashboards", "build", "--check", sys.argv[1]])
    stale[metric.name] = status, output.getvalue()
    setattr(semconv, key, metric)
json.dump(stale, sys.stdout)
"""


def test_a_renamed_metric_fails_the_check() -> None:
    """The check names each dashboard that uses the metric."""
    completed = subprocess.run(
        [sys.executable, "-c", RENAMING, str(FOLDER)], capture_output=True, check=True, text=True, cwd=ROOT
    )
    reports = json.loads(completed.stdout)
    texts = {name: json.dumps(board) for name, board in BOARDS.items()}
    for metric in semconv.METRICS:
        status, printed = reports[metric.name]
        using = [
            name
            for name, text in texts.items()
            if re.search(rf"\b{prometheus.family_name(metric)}(_|\b)", text)
        ]
        assert (status, printed.count("not of this release")) == (bool(using), len(using)), metric.name
        assert all(f"{FOLDER / name}: " in printed for name in using), metric.name


# ── queries ──────────────────────────────────────────────────────────────────────────────────────────────────────


@each_panel
def test_queries_use_exported_series_and_labels(name: str, panel: dict[str, Any]) -> None:
    for expr in list_exprs(panel):
        for selector in iter_selectors(promql_parser.parse(resolve_variables(expr, "5m"))):
            if selector.name == prometheus.STAGE_BUDGET:
                continue
            metric = NAMES[selector.name]
            labels = {"job", "instance", *map(prometheus.label_name, metric.attributes)}
            assert {matcher.name for matcher in selector.matchers.matchers} <= labels | {"le"}, expr
            assert {"job", "instance"} <= {matcher.name for matcher in selector.matchers.matchers}, expr


@each_panel
def test_rates_use_the_rate_interval_of_grafana(name: str, panel: dict[str, Any]) -> None:
    for expr in list_exprs(panel):
        assert set(re.findall(r"\[([^\]]+)\]", expr)) <= {"$__rate_interval"}, expr
        counters = [
            counter
            for counter in re.findall(r"\w+_total\b", expr)
            if not re.search(rf"(rate|increase)\({counter}", expr)
        ]
        assert counters == [] or panel["type"] == "stat", expr


@each_panel
def test_a_panel_describes_its_meaning_and_remedy(name: str, panel: dict[str, Any]) -> None:
    assert panel["title"]
    meaning, when_bad = panel["description"].split("\n\n**When it is bad:** ")
    assert meaning.endswith(".")
    assert when_bad.endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["fieldConfig"]["defaults"]["noValue"]
    assert len(panel["targets"]) > 0 or panel["type"] == "alertlist"


def test_stacked_stages_exclude_nested_ones() -> None:
    stacked = [
        expr
        for board in BOARDS.values()
        for panel in iter_panels(board)
        if panel["fieldConfig"]["defaults"].get("custom", {}).get("stacking", {}).get("mode") == "normal"
        for expr in list_exprs(panel)
        if "by (infer_stage)" in expr
    ]
    assert stacked
    for expr in stacked:
        assert all(name in expr for name in semconv.NESTED_STAGES)


@each_panel
def test_panels_use_only_the_data_source_variables(name: str, panel: dict[str, Any]) -> None:
    sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
    assert {source["uid"] for source in sources} <= set(DATASOURCES)


@each_panel
def test_only_histogram_queries_request_exemplars(name: str, panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        if target.get("exemplar"):
            assert prometheus.BUCKET in target["expr"]
    if panel["type"] == "heatmap":
        assert all(target["exemplar"] for target in panel["targets"])


def test_metrics_without_panel_are_listed_with_a_reason() -> None:
    shown = {
        NAMES[selector.name].name
        for board in BOARDS.values()
        for panel in iter_panels(board)
        for expr in list_exprs(panel)
        for selector in iter_selectors(promql_parser.parse(resolve_variables(expr, "5m")))
        if selector.name in NAMES
    }
    assert {metric.name for metric in semconv.METRICS} - shown == set(NOT_SHOWN)


NOT_SHOWN: dict[str, str] = {
    semconv.HTTP_REQUEST_DURATION.name: "dashboards for any HTTP server show it",
    semconv.KV_BLOCK_SIZE.name: "it never changes, and the headroom that follows from it is shown",
    semconv.SELF_RESTARTS.name: "it is 0, and the alert SidecarRestarted reports its change",
    semconv.REQUEST_HUNG.name: "it is 0, and the alert ServerHangs reports its change",
    semconv.SERVER_STOPPED.name: "the alert ServerGone reads it, after the server is gone",
}
"""Metrics on no dashboard, with the reason."""


# ── layout ───────────────────────────────────────────────────────────────────────────────────────────────────────


@each_board
def test_dashboards_are_read_only_with_a_fixed_uid(name: str, board: dict[str, Any]) -> None:
    assert board["uid"] == f"otel-infer-{name.removesuffix('.json')}"
    assert 39 <= board["schemaVersion"] <= 41
    assert board["editable"] is False
    assert not {"id", "version", "__inputs", "__requires"} & board.keys()
    assert board["tags"] == ["otel-infer"]


@each_board
def test_variables_are_defined_exactly_if_used(name: str, board: dict[str, Any]) -> None:
    text = json.dumps([board["panels"], board["templating"], board["annotations"]])
    used = {name for name in re.findall(r"\$\{?(\w+)", text) if not name.startswith("__")}
    defined = {variable["name"] for variable in board["templating"]["list"] if variable["type"] != "adhoc"}
    assert used == defined


@each_board
def test_panels_do_not_overlap(name: str, board: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in (*board["panels"], *(below for row in board["panels"] for below in row.get("panels", ()))):
        position = panel["gridPos"]
        cells = {
            (position["x"] + i, position["y"] + j) for i in range(position["w"]) for j in range(position["h"])
        }
        assert not cells & taken
        assert position["x"] + position["w"] <= 24
        taken |= cells
    ids = [
        panel["id"]
        for panel in (*board["panels"], *iter_panels(board))
        if panel["type"] != "row" or "id" in panel
    ]
    assert len({panel["id"] for panel in iter_panels(board)}) == len(list(iter_panels(board))), ids


@each_board
def test_a_dashboard_opens_with_few_panels(name: str, board: dict[str, Any]) -> None:
    assert len([panel for panel in board["panels"] if panel["type"] != "row"]) <= 25


def test_links_lead_to_existing_dashboards() -> None:
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
def test_rules_use_exported_series_and_labels(rule: dict[str, Any]) -> None:
    for selector in iter_selectors(promql_parser.parse(rule["expr"])):
        if selector.name in RECORDED:
            continue
        labels = {"le", *map(prometheus.label_name, NAMES[selector.name].attributes)}
        assert {matcher.name for matcher in selector.matchers.matchers} <= labels


@pytest.mark.parametrize("rule", [rule for rule in RULES if "alert" in rule.values[0]])
def test_an_alert_has_a_severity_and_annotations(rule: dict[str, Any]) -> None:
    assert rule["alert"].startswith("OtelInfer")
    assert rule["labels"]["severity"] in ("page", "ticket", "info", "none")
    if rule["labels"]["severity"] == "none":
        return
    assert rule["annotations"].keys() >= {"summary", "description", "dashboard_url"}
    assert rule["keep_firing_for"]


def test_rules_survive_a_yaml_round_trip() -> None:
    rules = burn_rate_rules.build_rule_groups(slo_spec.DEFAULT_SPEC)
    assert yaml.safe_load(rules_to_yaml(rules)) == rules
