"""A dashboard: rows of panels laid on the grid, and the variables that they name. Classic JSON, which Grafana 10 to 13 read from files.

Not the newer schema: Grafana 13 refuses it in provisioned files. Nothing in a dashboard names a data source: people choose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

from otel_infer import semconv
from otel_infer.monitoring.dashboards.panels import PROMETHEUS, WHOLE, Json
from otel_infer.monitoring.promql import Promql
from otel_infer.semconv import prometheus

SCHEMA = 41
TAG = "otel-infer"
UID = "otel-infer-"

ASK = Promql(
    {"job": "$job", "instance": "$instance", semconv.REQUEST_MODEL: "$model", semconv.HW_ID: "$gpu"},
    "$__rate_interval",
)
"""What the viewer chose holds for every panel."""


class Row(NamedTuple):
    """Panels under a headline. `closed`: for what not everybody has."""

    title: str
    panels: Sequence[Json]
    closed: bool = False


class Board(NamedTuple):
    """`name`: the end of its uid, and its file."""

    name: str
    title: str
    description: str
    rows: Sequence[Row]

    @property
    def uid(self) -> str:
        return UID + self.name


def variable(kind: str, name: str, label: str, **more: object) -> Json:
    """A choice at the top of a dashboard."""
    return {"type": kind, "name": name, "label": label, "hide": 0, **more}


def _labels(name: str, label: str, query: str, every: str) -> Json:
    asked = {"query": query, "refId": f"variable-{name}", "qryType": 1}
    chosen = {"text": ["All"], "value": ["$__all"]}
    return variable(
        "query", name, label, datasource=PROMETHEUS, query=asked, definition=query, refresh=2, sort=1, multi=True,
        includeAll=True, allValue=every, current=chosen, regex="", options=[],
    )  # fmt: skip


def _threshold(name: str, label: str, metric: semconv.Metric, usual: float) -> Json:
    """Bounds of a histogram's buckets; those that are not whole numbers, since those are written in two ways (`1`, `1.0`)."""
    bounds = [bound for bound in metric.bounds if bound != int(bound)]
    options = [{"text": _length(bound), "value": repr(bound), "selected": bound == usual} for bound in bounds]
    (chosen,) = [one for one in options if one["selected"]]
    query = ",".join(f"{one['text']} : {one['value']}" for one in options)
    return variable("custom", name, label, query=query, options=options, current=chosen, multi=False)


def _length(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1e3:g} ms"


_ANY = prometheus.series(semconv.SELF_MEMORY)[0]
"""What every sidecar says."""
_SERVED = prometheus.family(semconv.REQUEST_DURATION) + prometheus.COUNT
_GPUS = prometheus.series(semconv.GPU_MEMORY_LIMIT)[0]

VARIABLES: Sequence[Json] = (
    variable("datasource", "datasource", "Data source", query="prometheus", current={}, regex="", options=[]),
    variable("datasource", "tempo", "Traces", query="tempo", current={}, regex="", options=[]),
    _labels("job", "job", f"label_values({_ANY}, job)", ".+"),
    _labels("instance", "instance", f'label_values({_ANY}{{job=~"$job"}}, instance)', ".+"),
    _labels("model", "model", f'label_values({_SERVED}{{job=~"$job"}}, {prometheus.label(semconv.REQUEST_MODEL)})', ".*"),
    _labels("gpu", "GPU", f'label_values({_GPUS}{{job=~"$job"}}, {prometheus.label(semconv.HW_ID)})', ".+"),
    _threshold("ttft_slo", "TTFT within", semconv.TIME_TO_FIRST_TOKEN, 0.5),
    _threshold("itl_slo", "ITL within", semconv.INTER_TOKEN_LATENCY, 0.05),
    variable("textbox", "price", "Price of a GPU-hour", query="0", current={"text": "0", "value": "0"}, options=[]),
    variable("textbox", "trace_id", "Trace", query="", current={"text": "", "value": ""}, options=[]),
)  # fmt: skip
_FILTERS = variable("adhoc", "filters", "Filters", datasource=PROMETHEUS, filters=[], baseFilters=[])
_VARIABLE = re.compile(r"\$(\w+)")
_ALWAYS = ("datasource", "job", "instance")


def asked(expr: str, window: str, **choice: str) -> str:
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
    return _VARIABLE.sub(lambda found: chosen.get(found[1], found[0]), expr)


def dashboard(board: Board) -> Json:
    """The JSON of a dashboard, the same for the same board."""
    panels = _laid(board.rows)
    said = json.dumps(panels)
    named = [one for one in VARIABLES if one["name"] in _ALWAYS or _is_named(str(one["name"]), said)]
    return {
        "uid": board.uid,
        "title": f"otel_infer / {board.title}",
        "description": board.description,
        "tags": [TAG],
        "schemaVersion": SCHEMA,
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
        "annotations": {"list": [_alerts()]},
        "templating": {"list": [*named, _FILTERS]},
        "panels": panels,
    }  # fmt: skip


def _is_named(name: str, said: str) -> bool:
    return f"${name}" in said or f"${{{name}" in said


def _alerts() -> Json:
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


def _laid(rows: Sequence[Row]) -> list[Json]:
    """From left to right, row by row, with ids in that order."""
    laid: list[Json] = []
    y = number = 0
    for row in rows:
        number += 1
        head: Json = {"type": "row", "id": number, "title": row.title, "collapsed": row.closed, "panels": []}
        head["gridPos"] = {"x": 0, "y": y, "w": WHOLE, "h": 1}
        inside: list[Json] = head["panels"] if row.closed else laid
        laid.append(head)
        x, y, tallest = 0, y + 1, 0
        for one in row.panels:
            number += 1
            width, height = one["gridPos"]["w"], one["gridPos"]["h"]
            if x + width > WHOLE:
                x, y, tallest = 0, y + tallest, 0
            inside.append({"id": number, **one, "gridPos": {"x": x, "y": y, "w": width, "h": height}})
            x, tallest = x + width, max(tallest, height)
        y += tallest
    return laid
