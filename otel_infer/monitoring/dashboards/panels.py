"""Builds the panels of a dashboard, in Grafana's classic JSON (schema 41).

Each panel's description states what it shows and what to do when it is bad.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from otel_infer import semconv
from otel_infer.monitoring.names import ALERT_PREFIX
from otel_infer.monitoring.promql import PromqlBuilder
from otel_infer.semconv import prometheus

Json = dict[str, Any]

PROMETHEUS = {"type": "prometheus", "uid": "${datasource}"}
TEMPO = {"type": "tempo", "uid": "${tempo}"}
UNIT_SECONDS, UNIT_SHORT = "s", "short"
GRID_COLUMNS = 24
"""Width of a dashboard's grid."""
QUANTILES = ((0.5, "p50", "green"), (0.95, "p95", "orange"), (0.99, "p99", "red"))
NO_TRAFFIC = "no traffic"


class PanelQuery(NamedTuple):
    """One query of a panel. `legend`: with labels in double braces. `exemplars`: query exemplars, too."""

    expr: str
    legend: str = ""
    exemplars: bool = False
    table: bool = False
    right_axis_unit: str = ""
    """Unit of a separate axis on the right; "" = no such axis."""


def legend_format(*attributes: str) -> str:
    """Returns a legend that shows the values of these attributes."""
    return " ".join(f"{{{{{prometheus.label_name(attribute)}}}}}" for attribute in attributes)


BY_WORKER = ("instance", semconv.ENGINE, semconv.PROCESS_PID, semconv.WORKER_RANK)
WORKER_LEGEND = f"{legend_format(*BY_WORKER[:-1])} rank {legend_format(semconv.WORKER_RANK)}"


class PanelDescription(NamedTuple):
    """The description of a panel: its meaning, and its usual reason or remedy when it is bad."""

    meaning: str
    when_bad: str


def _build_target(number: int, query: PanelQuery, kind: str) -> Json:
    format_ = "table" if query.table else "heatmap" if kind == "heatmap" else "time_series"
    return {
        "refId": chr(ord("A") + number),
        "datasource": PROMETHEUS,
        "editorMode": "code",
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "format": format_,
        "exemplar": query.exemplars,
        "instant": query.table,
        "range": not query.table,
    }


def build_panel(
    kind: str,
    title: str,
    description: PanelDescription,
    queries: Sequence[PanelQuery],
    *,
    unit: str,
    size: tuple[int, int],
    defaults: Mapping[str, Any] | None = None,
    overrides: Sequence[Json] = (),
    options: Mapping[str, Any] | None = None,
    empty: str = NO_TRAFFIC,
) -> Json:
    """Returns a panel. `size`: grid columns and rows. `empty`: the text when there is no data."""
    no_data = {"type": "special", "options": {"match": "null+nan", "result": {"text": empty, "index": 0}}}
    return {
        "type": kind,
        "title": title,
        "description": f"{description.meaning}\n\n**When it is bad:** {description.when_bad}",
        "datasource": PROMETHEUS,
        "gridPos": {"w": size[0], "h": size[1]},
        "targets": [_build_target(number, query, kind) for number, query in enumerate(queries)],
        "fieldConfig": {
            "defaults": {
                "unit": unit,
                "noValue": empty,
                "mappings": [no_data],
                "color": {"mode": "palette-classic"},
                "thresholds": {"mode": "absolute", "steps": [{"color": "green", "value": None}]},
                **(defaults or {}),
            },
            "overrides": list(overrides),
        },
        "options": dict(options or {}),
    }


def field_override(name: str, **properties: Any) -> Json:
    """Returns an override for the series or column `name`; underscores in names of properties become dots."""
    settings = [{"id": key.replace("_", "."), "value": value} for key, value in properties.items()]
    return {"matcher": {"id": "byName", "options": name}, "properties": settings}


def timeseries_panel(
    title: str,
    description: PanelDescription,
    queries: Sequence[PanelQuery],
    *,
    unit: str,
    size: tuple[int, int] = (8, 8),
    stacked: str = "",
    axis_max: float | None = None,
    empty: str = NO_TRAFFIC,
) -> Json:
    """Returns a panel of series over time. `stacked`: normal, percent or "". `axis_max`: end of the axis."""
    custom: Json = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 60 if stacked else 8,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": {"mode": stacked or "none", "group": "A"},
        "axisSoftMin": 0,
    }
    defaults: Json = {"custom": custom, "min": 0}
    if axis_max is not None:
        defaults["max"] = axis_max
    colours = [*((name, colour) for _, name, colour in QUANTILES), ("mean", "blue")]
    overrides = [
        field_override(name, color={"mode": "fixed", "fixedColor": colour})
        for name, colour in colours
        if any(query.legend == name for query in queries)
    ]
    overrides += [
        field_override(query.legend, unit=query.right_axis_unit, custom_axisPlacement="right")
        for query in queries
        if query.right_axis_unit
    ]
    legend = {
        "showLegend": True,
        "displayMode": "table",
        "placement": "bottom",
        "calcs": ["lastNotNull", "max"],
    }
    return build_panel(
        "timeseries",
        title,
        description,
        queries,
        unit=unit,
        size=size,
        defaults=defaults,
        overrides=overrides,
        options={"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}},
        empty=empty,
    )


def stat_panel(
    title: str,
    description: PanelDescription,
    expr: str,
    *,
    unit: str,
    bad: Sequence[tuple[float, str]] = (),
    empty: str = NO_TRAFFIC,
) -> Json:
    """Returns a panel with a number and its history. `bad`: (value, colour) thresholds, if it can be bad."""
    steps = [{"color": "green", "value": None}, *({"color": colour, "value": at} for at, colour in bad)]
    defaults: Json = {
        "color": {"mode": "thresholds" if bad else "fixed", **({} if bad else {"fixedColor": "text"})},
        "thresholds": {"mode": "absolute", "steps": steps},
    }
    options = {
        "colorMode": "value",
        "graphMode": "area",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }
    return build_panel(
        "stat",
        title,
        description,
        [PanelQuery(expr)],
        unit=unit,
        size=(4, 4),
        defaults=defaults,
        options=options,
        empty=empty,
    )


def heatmap_panel(
    title: str,
    description: PanelDescription,
    expr: str,
    *,
    size: tuple[int, int] = (12, 8),
) -> Json:
    """Returns a panel with the distribution of durations over time, and exemplars that link to their traces."""
    options = {
        "calculate": False,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Spectral", "steps": 64, "exponent": 0.5, "reverse": True},
        "exemplars": {"color": "rgba(255,0,255,0.9)"},
        "filterValues": {"le": 1e-9},
        "rowsFrame": {"layout": "le"},
        "tooltip": {"mode": "single", "yHistogram": True},
        "yAxis": {"axisPlacement": "left", "unit": UNIT_SECONDS},
    }
    query = PanelQuery(expr, "{{le}}", exemplars=True)
    return build_panel("heatmap", title, description, [query], unit=UNIT_SECONDS, size=size, options=options)


def quantiles_panel(
    title: str,
    description: PanelDescription,
    promql: PromqlBuilder,
    metric: Any,
    *matchers: str,
    size: tuple[int, int] = (12, 8),
) -> Json:
    """Returns a panel with p50, p95, p99 and mean of durations; exemplars belong to the p99."""
    queries = [
        PanelQuery(promql.quantile(q, metric, *matchers), name, exemplars=name == "p99")
        for q, name, _ in QUANTILES
    ]
    queries.append(PanelQuery(promql.mean(metric, *matchers), "mean"))
    return timeseries_panel(title, description, queries, unit=UNIT_SECONDS, size=size)


def list_size_queries(promql: PromqlBuilder, metric: Any) -> list[PanelQuery]:
    """Returns queries for p50, p99 and mean of a size."""
    quantiles = [PanelQuery(promql.quantile(q, metric), name) for q, name in ((0.5, "p50"), (0.99, "p99"))]
    return [*quantiles, PanelQuery(promql.mean(metric), "mean")]


def state_timeline_panel(
    title: str,
    description: PanelDescription,
    query: PanelQuery,
    *,
    names: Mapping[int, tuple[str, str]],
    size: tuple[int, int],
    empty: str,
) -> Json:
    """Returns a panel of states over time. `names`: text and colour of each value."""
    value_options = {
        str(value): {"text": text, "color": colour, "index": i}
        for i, (value, (text, colour)) in enumerate(names.items())
    }
    return build_panel(
        "state-timeline",
        title,
        description,
        [query],
        unit="none",
        size=size,
        defaults={"mappings": [{"type": "value", "options": value_options}], "color": {"mode": "fixed"}},
        options={"mergeValues": True, "showValue": "never", "rowHeight": 0.8},
        empty=empty,
    )


def table_panel(
    title: str,
    description: PanelDescription,
    columns: Sequence[tuple[str, str, str]],
    *,
    by: Sequence[str],
    names: Mapping[str, str],
    size: tuple[int, int] = (GRID_COLUMNS, 8),
    links: Mapping[str, Json] | None = None,
    empty: str = NO_TRAFFIC,
) -> Json:
    """Returns a table with one line per value of `by`. `columns`: name, expression, unit. `names`: of labels."""
    queries = [PanelQuery(expr, table=True) for _, expr, _ in columns]
    # Grafana numbers the value columns only if there are several.
    is_numbered = len(columns) > 1
    renamed = {
        f"Value #{chr(ord('A') + i)}" if is_numbered else "Value": name
        for i, (name, _, _) in enumerate(columns)
    }
    panel = build_panel("table", title, description, queries, unit=UNIT_SHORT, size=size, empty=empty)
    panel["fieldConfig"]["defaults"]["mappings"] = []  # the text for no data does not apply to a single cell
    panel["fieldConfig"]["overrides"] = [field_override(name, unit=unit) for name, _, unit in columns]
    panel["fieldConfig"]["overrides"] += [
        field_override(names[label], links=[link]) for label, link in (links or {}).items()
    ]
    order = {name: i for i, name in enumerate([*by, *renamed])}
    panel["transformations"] = [
        {"id": "merge", "options": {}},
        {
            "id": "organize",
            "options": {
                "excludeByName": {"Time": True},
                "indexByName": order,
                "renameByName": {**names, **renamed},
            },
        },
    ]
    panel["options"] = {"showHeader": True, "cellHeight": "sm"}
    return panel


def trace_search_panel(title: str, description: PanelDescription, traceql: str) -> Json:
    """Returns a table of the traces that Tempo finds; a click opens a trace."""
    search = {"query": traceql, "limit": 20, "spss": 3, "tableType": "spans"}
    return _tempo_panel("table", title, description, 9, search, "Tempo has no such trace in this time range")


def trace_panel(title: str, description: PanelDescription, trace_id: str) -> Json:
    """Returns a panel that shows the trace with this id."""
    return _tempo_panel("traces", title, description, 14, {"query": trace_id}, "enter a trace id above")


def _tempo_panel(
    kind: str, title: str, description: PanelDescription, height: int, query: Json, empty: str
) -> Json:
    size = (GRID_COLUMNS, height)
    panel = build_panel(kind, title, description, [], unit=UNIT_SHORT, size=size, empty=empty)
    panel["datasource"] = TEMPO
    panel["targets"] = [{"refId": "A", "datasource": TEMPO, "queryType": "traceql", **query}]
    return panel


def alert_list_panel(title: str, description: PanelDescription) -> Json:
    """Returns a list of our alerts that fire or are pending."""
    panel = build_panel(
        "alertlist", title, description, [], unit=UNIT_SHORT, size=(8, 8), empty="no alert fires"
    )
    panel["options"] = {
        "alertName": ALERT_PREFIX,
        "alertInstanceLabelFilter": '{severity!="none"}',
        "maxItems": 20,
        "sortOrder": 3,
        "stateFilter": {"firing": True, "pending": True, "error": True, "noData": False, "normal": False},
        "viewMode": "list",
    }
    return panel
