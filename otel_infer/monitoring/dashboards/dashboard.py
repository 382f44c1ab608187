"""Renders a dashboard: rows of panels on the grid, and the variables that they reference.

The output is classic JSON, which Grafana 10 to 13 read from files. Grafana 13 rejects the newer schema in
provisioned files. A dashboard names no data source, because users choose it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

from otel_infer import semconv
from otel_infer.monitoring.dashboards.panels import GRID_COLUMNS, PROMETHEUS, Json
from otel_infer.monitoring.names import ALERT_PREFIX, PRESENCE_SERIES, TAG, UID_PREFIX
from otel_infer.monitoring.promql import PromqlBuilder
from otel_infer.semconv import prometheus

SCHEMA_VERSION = 41

PROMQL = PromqlBuilder(
    {"job": "$job", "instance": "$instance", semconv.REQUEST_MODEL: "$model", semconv.HW_ID: "$gpu"},
    "$__rate_interval",
)
"""Builder with the dashboard's variables as filters, which apply to every panel."""


class DashboardRow(NamedTuple):
    """Panels under a title. `collapsed`: for features that not every server has."""

    title: str
    panels: Sequence[Json]
    collapsed: bool = False


class Dashboard(NamedTuple):
    """A dashboard. `name`: its uid after the prefix, and the name of its file."""

    name: str
    title: str
    description: str
    rows: Sequence[DashboardRow]

    @property
    def uid(self) -> str:
        return UID_PREFIX + self.name


def make_variable(kind: str, name: str, label: str, **more: object) -> Json:
    """Returns a variable, which users set at the top of a dashboard."""
    return {"type": kind, "name": name, "label": label, "hide": 0, **more}


def _label_variable(name: str, label: str, query: str, all_value: str) -> Json:
    query_model = {"query": query, "refId": f"variable-{name}", "qryType": 1}
    current = {"text": ["All"], "value": ["$__all"]}
    return make_variable(
        "query", name, label, datasource=PROMETHEUS, query=query_model, definition=query, refresh=2, sort=1, multi=True,
        includeAll=True, allValue=all_value, current=current, regex="", options=[],
    )  # fmt: skip


def _bound_variable(name: str, label: str, metric: semconv.Metric, default: float) -> Json:
    """Returns a variable for the bounds of a histogram's buckets.

    Whole numbers are left out, because Prometheus has two forms of them (`1`, `1.0`).
    """
    bounds = [bound for bound in metric.bounds if bound != int(bound)]
    options = [
        {"text": _format_duration(bound), "value": repr(bound), "selected": bound == default}
        for bound in bounds
    ]
    (current,) = [option for option in options if option["selected"]]
    query = ",".join(f"{option['text']} : {option['value']}" for option in options)
    return make_variable("custom", name, label, query=query, options=options, current=current, multi=False)


def _format_duration(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1e3:g} ms"


_REQUEST_SERIES = prometheus.family_name(semconv.REQUEST_DURATION) + prometheus.COUNT
_GPU_SERIES = prometheus.series_names(semconv.GPU_MEMORY_LIMIT)[0]

VARIABLES: Sequence[Json] = (
    make_variable("datasource", "datasource", "Data source", query="prometheus", current={}, regex="", options=[]),
    make_variable("datasource", "tempo", "Traces", query="tempo", current={}, regex="", options=[]),
    _label_variable("job", "job", f"label_values({PRESENCE_SERIES}, job)", ".+"),
    _label_variable("instance", "instance", f'label_values({PRESENCE_SERIES}{{job=~"$job"}}, instance)', ".+"),
    _label_variable("model", "model", f'label_values({_REQUEST_SERIES}{{job=~"$job"}}, {prometheus.label_name(semconv.REQUEST_MODEL)})', ".*"),
    _label_variable("gpu", "GPU", f'label_values({_GPU_SERIES}{{job=~"$job"}}, {prometheus.label_name(semconv.HW_ID)})', ".+"),
    _bound_variable("ttft_slo", "TTFT within", semconv.TIME_TO_FIRST_TOKEN, 0.5),
    _bound_variable("itl_slo", "ITL within", semconv.INTER_TOKEN_LATENCY, 0.05),
    make_variable("textbox", "price", "Price of a GPU-hour", query="0", current={"text": "0", "value": "0"}, options=[]),
    make_variable("textbox", "trace_id", "Trace", query="", current={"text": "", "value": ""}, options=[]),
)  # fmt: skip
_FILTERS = make_variable("adhoc", "filters", "Filters", datasource=PROMETHEUS, filters=[], baseFilters=[])
_VARIABLE_REFERENCE = re.compile(r"\$(\w+)")
_ALWAYS_SHOWN = ("datasource", "job", "instance")


def resolve_variables(expr: str, window: str, **choice: str) -> str:
    """Returns a panel's expression as Grafana would query it.

    Variables have their defaults (all servers, models and GPUs), except those in `choice`. Rates are over
    `window`.
    """
    values = {
        "__rate_interval": window,
        "__range": window,
        "job": ".+",
        "instance": ".+",
        "model": ".*",
        "gpu": ".+",
    }
    for variable in VARIABLES:
        if variable["type"] in ("custom", "textbox"):
            values[str(variable["name"])] = str(variable["current"]["value"])
    values.update(choice)
    return _VARIABLE_REFERENCE.sub(lambda match: values.get(match[1], match[0]), expr)


def render_dashboard(board: Dashboard) -> Json:
    """Returns the JSON of a dashboard, with the variables that its panels reference; deterministic."""
    panels = _layout_panels(board.rows)
    content = json.dumps(panels)
    variables = [
        variable
        for variable in VARIABLES
        if variable["name"] in _ALWAYS_SHOWN or _is_referenced(str(variable["name"]), content)
    ]
    return {
        "uid": board.uid,
        "title": f"otel_infer / {board.title}",
        "description": board.description,
        "tags": [TAG],
        "schemaVersion": SCHEMA_VERSION,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "fiscalYearStartMonth": 0,
        "liveNow": False,
        "links": [
            {
                "type": "dashboards", "tags": [TAG], "title": "otel_infer", "asDropdown": True, "icon": "external link",
                "includeVars": True, "keepTime": True, "targetBlank": False, "tooltip": "", "url": "",
            }
        ],
        "annotations": {"list": [_alert_annotation()]},
        "templating": {"list": [*variables, _FILTERS]},
        "panels": panels,
    }  # fmt: skip


def _is_referenced(name: str, content: str) -> bool:
    return f"${name}" in content or f"${{{name}" in content


def _alert_annotation() -> Json:
    return {
        "name": "Alerts",
        "datasource": PROMETHEUS,
        "enable": True,
        "hide": False,
        "iconColor": "red",
        "expr": f'ALERTS{{alertname=~"{ALERT_PREFIX}.*",severity!="none",alertstate="firing",job=~"$job|"}}',
        "step": "30s",
        "titleFormat": "{{alertname}}",
        "textFormat": "{{severity}}",
        "target": {"refId": "Anno"},
    }


def _layout_panels(rows: Sequence[DashboardRow]) -> list[Json]:
    """Returns the panels with grid positions, from left to right, row by row, with ids in that order."""
    placed: list[Json] = []
    y = number = 0
    for row in rows:
        number += 1
        header: Json = {
            "type": "row",
            "id": number,
            "title": row.title,
            "collapsed": row.collapsed,
            "panels": [],
        }
        header["gridPos"] = {"x": 0, "y": y, "w": GRID_COLUMNS, "h": 1}
        target: list[Json] = header["panels"] if row.collapsed else placed
        placed.append(header)
        x, y, tallest = 0, y + 1, 0
        for panel in row.panels:
            number += 1
            width, height = panel["gridPos"]["w"], panel["gridPos"]["h"]
            if x + width > GRID_COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            target.append({"id": number, **panel, "gridPos": {"x": x, "y": y, "w": width, "h": height}})
            x, tallest = x + width, max(tallest, height)
        y += tallest
    return placed
