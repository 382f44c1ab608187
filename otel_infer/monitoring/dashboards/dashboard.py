"""A dashboard: rows of panels laid on the grid, and the variables that they name. Classic JSON, which Grafana 10 to 13 read from files.

Not the newer schema: Grafana 13 refuses it in provisioned files. Nothing in a dashboard names a data source: people choose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

from otel_infer import semconv
from otel_infer.monitoring.dashboards.panels import GRID_COLUMNS, PROMETHEUS, Json
from otel_infer.monitoring.promql import PromqlBuilder
from otel_infer.semconv import prometheus

SCHEMA_VERSION = 41
TAG = "otel-infer"
UID_PREFIX = "otel-infer-"

PROMQL = PromqlBuilder(
    {"job": "$job", "instance": "$instance", semconv.REQUEST_MODEL: "$model", semconv.HW_ID: "$gpu"},
    "$__rate_interval",
)
"""What the viewer chose holds for every panel."""


class DashboardRow(NamedTuple):
    """Panels under a headline. `closed`: for what not everybody has."""

    title: str
    panels: Sequence[Json]
    collapsed: bool = False


class Dashboard(NamedTuple):
    """`name`: the end of its uid, and its file."""

    name: str
    title: str
    description: str
    rows: Sequence[DashboardRow]

    @property
    def uid(self) -> str:
        return UID_PREFIX + self.name


def make_variable(kind: str, name: str, label: str, **more: object) -> Json:
    """A choice at the top of a dashboard."""
    return {"type": kind, "name": name, "label": label, "hide": 0, **more}


def _label_variable(name: str, label: str, query: str, every: str) -> Json:
    asked = {"query": query, "refId": f"variable-{name}", "qryType": 1}
    chosen = {"text": ["All"], "value": ["$__all"]}
    return make_variable(
        "query", name, label, datasource=PROMETHEUS, query=asked, definition=query, refresh=2, sort=1, multi=True,
        includeAll=True, allValue=every, current=chosen, regex="", options=[],
    )  # fmt: skip


def _bound_variable(name: str, label: str, metric: semconv.Metric, usual: float) -> Json:
    """Bounds of a histogram's buckets; those that are not whole numbers, since those are written in two ways (`1`, `1.0`)."""
    bounds = [bound for bound in metric.bounds if bound != int(bound)]
    options = [
        {"text": _format_duration(bound), "value": repr(bound), "selected": bound == usual}
        for bound in bounds
    ]
    (chosen,) = [one for one in options if one["selected"]]
    query = ",".join(f"{one['text']} : {one['value']}" for one in options)
    return make_variable("custom", name, label, query=query, options=options, current=chosen, multi=False)


def _format_duration(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1e3:g} ms"


_PRESENCE_SERIES = prometheus.series_names(semconv.SELF_MEMORY)[0]
"""What every sidecar says."""
_REQUEST_SERIES = prometheus.family_name(semconv.REQUEST_DURATION) + prometheus.COUNT
_GPU_SERIES = prometheus.series_names(semconv.GPU_MEMORY_LIMIT)[0]

VARIABLES: Sequence[Json] = (
    make_variable("datasource", "datasource", "Data source", query="prometheus", current={}, regex="", options=[]),
    make_variable("datasource", "tempo", "Traces", query="tempo", current={}, regex="", options=[]),
    _label_variable("job", "job", f"label_values({_PRESENCE_SERIES}, job)", ".+"),
    _label_variable("instance", "instance", f'label_values({_PRESENCE_SERIES}{{job=~"$job"}}, instance)', ".+"),
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
    """An expression of a panel as Grafana would ask it: everything is chosen but for `choice`; rates over `window`."""
    chosen = {
        "__rate_interval": window,
        "__range": window,
        "job": ".+",
        "instance": ".+",
        "model": ".*",
        "gpu": ".+",
    }
    for one in VARIABLES:
        if one["type"] in ("custom", "textbox"):
            chosen[str(one["name"])] = str(one["current"]["value"])
    chosen.update(choice)
    return _VARIABLE_REFERENCE.sub(lambda found: chosen.get(found[1], found[0]), expr)


def render_dashboard(board: Dashboard) -> Json:
    """The JSON of a dashboard, the same for the same board."""
    panels = _layout_panels(board.rows)
    said = json.dumps(panels)
    named = [
        one for one in VARIABLES if one["name"] in _ALWAYS_SHOWN or _is_referenced(str(one["name"]), said)
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
        "templating": {"list": [*named, _FILTERS]},
        "panels": panels,
    }  # fmt: skip


def _is_referenced(name: str, said: str) -> bool:
    return f"${name}" in said or f"${{{name}" in said


def _alert_annotation() -> Json:
    return {
        "name": "Alerts",
        "datasource": PROMETHEUS,
        "enable": True,
        "hide": False,
        "iconColor": "red",
        "expr": 'ALERTS{alertname=~"OtelInfer.*",severity!="none",alertstate="firing",job=~"$job|"}',
        "step": "30s",
        "titleFormat": "{{alertname}}",
        "textFormat": "{{severity}}",
        "target": {"refId": "Anno"},
    }


def _layout_panels(rows: Sequence[DashboardRow]) -> list[Json]:
    """From left to right, row by row, with ids in that order."""
    laid: list[Json] = []
    y = number = 0
    for row in rows:
        number += 1
        head: Json = {
            "type": "row",
            "id": number,
            "title": row.title,
            "collapsed": row.collapsed,
            "panels": [],
        }
        head["gridPos"] = {"x": 0, "y": y, "w": GRID_COLUMNS, "h": 1}
        inside: list[Json] = head["panels"] if row.collapsed else laid
        laid.append(head)
        x, y, tallest = 0, y + 1, 0
        for one in row.panels:
            number += 1
            width, height = one["gridPos"]["w"], one["gridPos"]["h"]
            if x + width > GRID_COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            inside.append({"id": number, **one, "gridPos": {"x": x, "y": y, "w": width, "h": height}})
            x, tallest = x + width, max(tallest, height)
        y += tallest
    return laid
