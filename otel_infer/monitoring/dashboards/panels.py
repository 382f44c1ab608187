"""Panels of a dashboard, as Grafana's classic JSON has them (schema 41). Each says what it means and what to do when it is bad.

Long, and so are its functions: it is all that we know of Grafana's JSON, one kind of panel after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from otel_infer.monitoring.promql import PromqlBuilder
from otel_infer.semconv import prometheus

Json = dict[str, Any]

PROMETHEUS = {"type": "prometheus", "uid": "${datasource}"}
TEMPO = {"type": "tempo", "uid": "${tempo}"}
UNIT_SECONDS, UNIT_SHORT = "s", "short"
GRID_COLUMNS = 24
"""Columns of the grid."""
QUANTILES = ((0.5, "p50", "green"), (0.95, "p95", "orange"), (0.99, "p99", "red"))
NO_TRAFFIC = "no traffic"


class PanelQuery(NamedTuple):
    """One question to Prometheus. `legend` with labels in double braces. `exemplars`: ask for those as well."""

    expr: str
    legend: str = ""
    exemplars: bool = False
    table: bool = False
    right_axis_unit: str = ""
    """Unit of an axis of its own, on the right."""


def legend_format(*attributes: str) -> str:
    """The values of these, for the legend of a query."""
    return " ".join(f"{{{{{prometheus.label_name(one)}}}}}" for one in attributes)


class PanelDescription(NamedTuple):
    """How a panel is to be read."""

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
    reading: PanelDescription,
    queries: Sequence[PanelQuery],
    *,
    unit: str,
    size: tuple[int, int],
    defaults: Mapping[str, Any] | None = None,
    overrides: Sequence[Json] = (),
    options: Mapping[str, Any] | None = None,
    empty: str = NO_TRAFFIC,
) -> Json:
    """`size`: columns and rows. `empty`: what it says when there is nothing to show."""
    nothing = {"type": "special", "options": {"match": "null+nan", "result": {"text": empty, "index": 0}}}
    return {
        "type": kind,
        "title": title,
        "description": f"{reading.meaning}\n\n**When it is bad:** {reading.when_bad}",
        "datasource": PROMETHEUS,
        "gridPos": {"w": size[0], "h": size[1]},
        "targets": [_build_target(number, query, kind) for number, query in enumerate(queries)],
        "fieldConfig": {
            "defaults": {
                "unit": unit,
                "noValue": empty,
                "mappings": [nothing],
                "color": {"mode": "palette-classic"},
                "thresholds": {"mode": "absolute", "steps": [{"color": "green", "value": None}]},
                **(defaults or {}),
            },
            "overrides": list(overrides),
        },
        "options": dict(options or {}),
    }


def field_override(name: str, **properties: Any) -> Json:
    """For the series or column of this name; underscores in the names of properties stand for dots."""
    said = [{"id": key.replace("_", "."), "value": value} for key, value in properties.items()]
    return {"matcher": {"id": "byName", "options": name}, "properties": said}


def timeseries_panel(
    title: str,
    reading: PanelDescription,
    queries: Sequence[PanelQuery],
    *,
    unit: str,
    size: tuple[int, int] = (8, 8),
    stacked: str = "",
    most: float | None = None,
    empty: str = NO_TRAFFIC,
) -> Json:
    """Over time. `stacked`: `normal`, or `percent`. `most`: the end of the axis."""
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
    if most is not None:
        defaults["max"] = most
    fixed = [*((name, colour) for _, name, colour in QUANTILES), ("mean", "blue")]
    overrides = [
        field_override(name, color={"mode": "fixed", "fixedColor": colour})
        for name, colour in fixed
        if any(query.legend == name for query in queries)
    ]
    overrides += [
        field_override(query.legend, unit=query.right_axis_unit, custom_axisPlacement="right")
        for query in queries
        if query.right_axis_unit
    ]
    below = {
        "showLegend": True,
        "displayMode": "table",
        "placement": "bottom",
        "calcs": ["lastNotNull", "max"],
    }
    return build_panel(
        "timeseries",
        title,
        reading,
        queries,
        unit=unit,
        size=size,
        defaults=defaults,
        overrides=overrides,
        options={"legend": below, "tooltip": {"mode": "multi", "sort": "desc"}},
        empty=empty,
    )


def stat_panel(
    title: str,
    reading: PanelDescription,
    expr: str,
    *,
    unit: str,
    bad: Sequence[tuple[float, str]] = (),
    size: tuple[int, int] = (4, 4),
    empty: str = NO_TRAFFIC,
) -> Json:
    """One number and its course. `bad`: from which value on it has which colour; only where that is a judgement."""
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
        reading,
        [PanelQuery(expr)],
        unit=unit,
        size=size,
        defaults=defaults,
        options=options,
        empty=empty,
    )


def heatmap_panel(
    title: str,
    reading: PanelDescription,
    expr: str,
    *,
    unit: str = UNIT_SECONDS,
    size: tuple[int, int] = (12, 8),
) -> Json:
    """How values are distributed over time, with exemplars: a click on one opens its trace."""
    options = {
        "calculate": False,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Spectral", "steps": 64, "exponent": 0.5, "reverse": True},
        "exemplars": {"color": "rgba(255,0,255,0.9)"},
        "filterValues": {"le": 1e-9},
        "rowsFrame": {"layout": "le"},
        "tooltip": {"mode": "single", "yHistogram": True},
        "yAxis": {"axisPlacement": "left", "unit": unit},
    }
    query = PanelQuery(expr, "{{le}}", exemplars=True)
    return build_panel("heatmap", title, reading, [query], unit=unit, size=size, options=options)


def quantiles_panel(
    title: str,
    reading: PanelDescription,
    ask: PromqlBuilder,
    metric: Any,
    *matchers: str,
    size: tuple[int, int] = (12, 8),
    unit: str = UNIT_SECONDS,
    empty: str = NO_TRAFFIC,
) -> Json:
    """p50, p95, p99 and the mean of a histogram; exemplars come with the p99."""
    queries = [
        PanelQuery(ask.quantile(q, metric, *matchers), name, exemplars=name == "p99")
        for q, name, _ in QUANTILES
    ]
    queries.append(PanelQuery(ask.mean(metric, *matchers), "mean"))
    return timeseries_panel(title, reading, queries, unit=unit, size=size, empty=empty)


def state_timeline_panel(
    title: str,
    reading: PanelDescription,
    query: PanelQuery,
    *,
    names: Mapping[int, tuple[str, str]],
    size: tuple[int, int],
) -> Json:
    """What holds over time. `names`: text and colour of each value."""
    said = {
        str(value): {"text": text, "color": colour, "index": i}
        for i, (value, (text, colour)) in enumerate(names.items())
    }
    return build_panel(
        "state-timeline",
        title,
        reading,
        [query],
        unit="none",
        size=size,
        defaults={"mappings": [{"type": "value", "options": said}], "color": {"mode": "fixed"}},
        options={"mergeValues": True, "showValue": "never", "rowHeight": 0.8},
        empty="no GPU is told of",
    )


def table_panel(
    title: str,
    reading: PanelDescription,
    columns: Sequence[tuple[str, str, str]],
    *,
    by: Sequence[str],
    names: Mapping[str, str],
    size: tuple[int, int] = (GRID_COLUMNS, 8),
    links: Mapping[str, Json] | None = None,
    empty: str = NO_TRAFFIC,
) -> Json:
    """One line for each value of the labels `by`; `columns`: name, expression, unit. `names`: of the labels."""
    queries = [PanelQuery(expr, table=True) for _, expr, _ in columns]
    # Grafana numbers the values only where there are several.
    many = len(columns) > 1
    renamed = {
        f"Value #{chr(ord('A') + i)}" if many else "Value": name for i, (name, _, _) in enumerate(columns)
    }
    made = build_panel("table", title, reading, queries, unit=UNIT_SHORT, size=size, empty=empty)
    made["fieldConfig"]["defaults"]["mappings"] = []  # a cell that is empty says nothing of the whole
    made["fieldConfig"]["overrides"] = [field_override(name, unit=unit) for name, _, unit in columns]
    made["fieldConfig"]["overrides"] += [
        field_override(names[label], links=[link]) for label, link in (links or {}).items()
    ]
    order = {name: i for i, name in enumerate([*by, *renamed])}
    made["transformations"] = [
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
    made["options"] = {"showHeader": True, "cellHeight": "sm"}
    return made


def trace_search_panel(
    title: str, reading: PanelDescription, traceql: str, size: tuple[int, int] = (GRID_COLUMNS, 9)
) -> Json:
    """Traces that Tempo finds; a click opens one."""
    made = build_panel(
        "table", title, reading, [], unit=UNIT_SHORT, size=size, empty="Tempo has no such trace in this time"
    )
    made["datasource"] = TEMPO
    query = {"refId": "A", "datasource": TEMPO, "queryType": "traceql", "query": traceql}
    made["targets"] = [{**query, "limit": 20, "spss": 3, "tableType": "spans"}]
    return made


def trace_panel(
    title: str, reading: PanelDescription, trace_id: str, size: tuple[int, int] = (GRID_COLUMNS, 14)
) -> Json:
    """The trace with this id."""
    made = build_panel("traces", title, reading, [], unit=UNIT_SHORT, size=size, empty="choose a trace above")
    made["datasource"] = TEMPO
    made["targets"] = [{"refId": "A", "datasource": TEMPO, "queryType": "traceql", "query": trace_id}]
    return made


def alert_list_panel(title: str, reading: PanelDescription, size: tuple[int, int] = (8, 8)) -> Json:
    """Ours that fire or are about to."""
    made = build_panel("alertlist", title, reading, [], unit=UNIT_SHORT, size=size, empty="nothing fires")
    made["options"] = {
        "alertName": "OtelInfer",
        "alertInstanceLabelFilter": '{severity!="none"}',
        "maxItems": 20,
        "sortOrder": 3,
        "stateFilter": {"firing": True, "pending": True, "error": True, "noData": False, "normal": False},
        "viewMode": "list",
    }
    return made
