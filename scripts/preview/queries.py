"""Queries a Prometheus for a panel, as Grafana would."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from otel_infer.monitoring.dashboards.dashboard import resolve_variables

Values = np.ndarray[Any, np.dtype[np.float64]]

LINE_POINTS, HEATMAP_COLUMNS = 120, 72
MAX_EXEMPLARS = 80
_LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")


class Prometheus(Protocol):
    """`otel_infer.cli.prometheus_check.PrometheusClient`, or a stand-in."""

    def get(self, path: str, **parameters: str) -> Any: ...


class TimeRange(NamedTuple):
    """The displayed time; unix s. `window`: the duration over which rates are taken, such as `30s`."""

    start: float
    end: float
    window: str

    def times(self, points: int) -> Values:
        return np.linspace(self.start, self.end, points + 1)


class Series(NamedTuple):
    """A line with its name in the legend; NaN where there is no sample."""

    name: str
    labels: Mapping[str, str]
    values: Values

    @property
    def last(self) -> float:
        known = self.values[np.isfinite(self.values)]
        return float(known[-1]) if len(known) else float("nan")


class Exemplar(NamedTuple):
    at: float
    value: float


class PanelData(NamedTuple):
    """The results of all queries of a panel. `rows`: of a table, by column. `error`: of a refused query."""

    series: Sequence[Series] = ()
    exemplars: Sequence[Exemplar] = ()
    rows: Sequence[dict[str, str | float]] = ()
    error: str = ""


def query_panel(prometheus: Prometheus, panel: Mapping[str, Any], time_range: TimeRange) -> PanelData:
    """Returns the data of a panel."""
    try:
        if panel["type"] == "table":
            return PanelData(rows=_query_rows(prometheus, panel, time_range))
        points = HEATMAP_COLUMNS if panel["type"] == "heatmap" else LINE_POINTS
        series, exemplars = [], []
        for target in panel["targets"]:
            series += _query_series(prometheus, target, time_range, points)
            exemplars += _query_exemplars(prometheus, target, time_range) if target["exemplar"] else []
        return PanelData([line for line in series if np.isfinite(line.values).any()], exemplars)
    except ValueError as error:
        return PanelData(error=str(error))


def _query_series(
    prometheus: Prometheus, target: Mapping[str, Any], time_range: TimeRange, points: int
) -> Iterator[Series]:
    times = time_range.times(points)
    step = float(times[1] - times[0])
    query = resolve_variables(target["expr"], time_range.window)
    start, end = f"{time_range.start:.3f}", f"{time_range.end + step / 2:.3f}"
    found = prometheus.get("query_range", query=query, start=start, end=end, step=f"{step:.3f}")
    for result in found["result"]:
        values = np.full(len(times), np.nan)
        for at, value in result["values"]:
            index = round((float(at) - time_range.start) / step)
            if 0 <= index < len(values):
                values[index] = float(value)
        values[np.isinf(values)] = np.nan
        yield Series(_name_series(target["legendFormat"], result["metric"]), result["metric"], values)


def _name_series(legend: str, labels: Mapping[str, str]) -> str:
    if legend == "__auto":
        return ", ".join(f"{key}={value}" for key, value in labels.items() if key != "__name__")
    return " ".join(_LABEL.sub(lambda label: labels.get(label[1], ""), legend).split())


def _query_exemplars(
    prometheus: Prometheus, target: Mapping[str, Any], time_range: TimeRange
) -> list[Exemplar]:
    """Returns the largest exemplars; none if the server stores none."""
    query = resolve_variables(target["expr"], time_range.window)
    start, end = f"{time_range.start:.3f}", f"{time_range.end:.3f}"
    try:
        found = prometheus.get("query_exemplars", query=query, start=start, end=end)
    except ValueError:
        return []
    exemplars = {
        Exemplar(float(exemplar["timestamp"]), float(exemplar["value"]))
        for series in found
        for exemplar in series["exemplars"]
    }
    return sorted(exemplars, key=lambda exemplar: -exemplar.value)[:MAX_EXEMPLARS]


def _query_rows(
    prometheus: Prometheus, panel: Mapping[str, Any], time_range: TimeRange
) -> list[dict[str, str | float]]:
    """Merges rows with equal labels, as Grafana's transformation does."""
    merged: dict[tuple[str, ...], dict[str, str | float]] = {}
    names, labels = column_names(panel), label_columns(panel)
    for target in panel["targets"]:
        query = resolve_variables(target["expr"], time_range.window)
        value_column = f"Value #{target['refId']}" if len(panel["targets"]) > 1 else "Value"
        for result in prometheus.get("query", query=query, time=f"{time_range.end:.3f}")["result"]:
            key = tuple(result["metric"].get(label, "") for label in labels)
            row = merged.setdefault(key, {names[label]: value for label, value in zip(labels, key)})
            row[names[value_column]] = float(result["value"][1])
    return list(merged.values())


def column_names(panel: Mapping[str, Any]) -> dict[str, str]:
    """Returns the titles of a table's columns by field, from left to right."""
    (organize,) = [step["options"] for step in panel["transformations"] if step["id"] == "organize"]
    order: dict[str, int] = organize["indexByName"]
    return {
        field: organize["renameByName"].get(field, field) for field in sorted(order, key=order.__getitem__)
    }


def label_columns(panel: Mapping[str, Any]) -> list[str]:
    return [field for field in column_names(panel) if not field.startswith("Value")]


def find_overrides(panel: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the properties that differ for the series or column with this name."""
    return {
        item["id"]: item["value"]
        for override in panel["fieldConfig"]["overrides"]
        if override["matcher"]["options"] == name
        for item in override["properties"]
    }


def find_default(panel: Mapping[str, Any], key: str) -> Any:
    """Returns a property of all series of a panel; None if it is not set."""
    return panel["fieldConfig"]["defaults"].get(key)
