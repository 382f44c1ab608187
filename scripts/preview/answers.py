"""What a Prometheus has for a panel, as Grafana would ask it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from otel_infer.monitoring.dashboards.dashboard import resolve_variables

Values = np.ndarray[Any, np.dtype[np.float64]]

POINTS, CELLS = 120, 72
"""So many instants of a line, and columns of a heatmap."""
MOST_EXEMPLARS = 80
_LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")


class Ask(Protocol):
    """Who answers: `otel_infer.cli.prometheus_check.Asking`, or a stand-in."""

    def get(self, path: str, **what: str) -> Any: ...


class Span(NamedTuple):
    """The time that is shown; unix s."""

    start: float
    end: float
    window: str
    """Of rates."""

    def times(self, points: int) -> Values:
        return np.linspace(self.start, self.end, points + 1)


class Series(NamedTuple):
    """One line, by its name in the legend; NaN where there is nothing."""

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


class Answer(NamedTuple):
    """`rows`: of a table, by column. `refused`: what Prometheus says of a question that it does not take."""

    series: list[Series]
    exemplars: list[Exemplar]
    rows: list[dict[str, str | float]]
    refused: str = ""


def answer(ask: Ask, panel: Mapping[str, Any], span: Span) -> Answer:
    """To all questions of a panel."""
    try:
        if panel["type"] == "table":
            return Answer([], [], _rows(ask, panel, span))
        points = CELLS if panel["type"] == "heatmap" else POINTS
        series = [one for target in panel["targets"] for one in _series(ask, target, span, points)]
        wanted = [target for target in panel["targets"] if target["exemplar"]]
        exemplars = [one for target in wanted for one in _exemplars(ask, target, span)]
        return Answer([one for one in series if np.isfinite(one.values).any()], exemplars, [])
    except ValueError as refusal:
        return Answer([], [], [], str(refusal))


def _series(ask: Ask, target: Mapping[str, Any], span: Span, points: int) -> Iterator[Series]:
    times = span.times(points)
    step = float(times[1] - times[0])
    found = ask.get(
        "query_range",
        query=resolve_variables(target["expr"], span.window),
        start=f"{span.start:.3f}",
        end=f"{span.end + step / 2:.3f}",
        step=f"{step:.3f}",
    )
    for one in found["result"]:
        values = np.full(len(times), np.nan)
        for at, value in one["values"]:
            place = round((float(at) - span.start) / step)
            if 0 <= place < len(values):
                values[place] = float(value)
        values[np.isinf(values)] = np.nan
        yield Series(_name(target["legendFormat"], one["metric"]), one["metric"], values)


def _name(legend: str, labels: Mapping[str, str]) -> str:
    if legend == "__auto":
        return ", ".join(f"{key}={value}" for key, value in labels.items() if key != "__name__")
    return " ".join(_LABEL.sub(lambda label: labels.get(label[1], ""), legend).split())


def _exemplars(ask: Ask, target: Mapping[str, Any], span: Span) -> list[Exemplar]:
    """The largest, and of the others as many as can be told apart; none from who keeps none."""
    query = resolve_variables(target["expr"], span.window)
    try:
        said = ask.get("query_exemplars", query=query, start=f"{span.start:.3f}", end=f"{span.end:.3f}")
    except ValueError:
        return []
    found = {
        Exemplar(float(one["timestamp"]), float(one["value"]))
        for series in said
        for one in series["exemplars"]
    }
    ordered = sorted(found, key=lambda one: -one.value)
    slowest, others = ordered[: MOST_EXEMPLARS // 4], sorted(ordered[MOST_EXEMPLARS // 4 :])
    every = -(-len(others) // (MOST_EXEMPLARS - len(slowest))) if others else 1
    return sorted(slowest + others[::every])


def _rows(ask: Ask, panel: Mapping[str, Any], span: Span) -> list[dict[str, str | float]]:
    """Merged where their labels are equal, in the order in which they came."""
    merged: dict[tuple[str, ...], dict[str, str | float]] = {}
    names, labels = columns(panel), labels_of(panel)
    for target in panel["targets"]:
        query = resolve_variables(target["expr"], span.window)
        for one in ask.get("query", query=query, time=f"{span.end:.3f}")["result"]:
            key = tuple(one["metric"].get(label, "") for label in labels)
            row = merged.setdefault(key, {names[label]: said for label, said in zip(labels, key)})
            row[names[f"Value #{target['refId']}" if len(panel["targets"]) > 1 else "Value"]] = float(
                one["value"][1]
            )
    return list(merged.values())


def columns(panel: Mapping[str, Any]) -> dict[str, str]:
    """Of a table: what each is called, from left to right."""
    (organize,) = [one["options"] for one in panel["transformations"] if one["id"] == "organize"]
    places: dict[str, int] = organize["indexByName"]
    return {key: organize["renameByName"].get(key, key) for key in sorted(places, key=places.__getitem__)}


def labels_of(panel: Mapping[str, Any]) -> list[str]:
    return [key for key in columns(panel) if not key.startswith("Value")]


def overridden(panel: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What is different for the series or column of this name."""
    return {
        said["id"]: said["value"]
        for one in panel["fieldConfig"]["overrides"]
        if one["matcher"]["options"] == name
        for said in one["properties"]
    }


def default(panel: Mapping[str, Any], key: str, otherwise: Any = None) -> Any:
    """What holds for every series of a panel."""
    return panel["fieldConfig"]["defaults"].get(key, otherwise)
