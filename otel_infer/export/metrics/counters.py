"""Counters and gauges as data points of the SDK, and limits for the values of their attributes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from opentelemetry.sdk.metrics import export
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from otel_infer import semconv
from otel_infer._version import VERSION
from otel_infer.export.metrics.histograms import MAX_SERIES, OVERFLOW_KEY, Key, Label, key_to_attributes
from otel_infer.ringbuffer.events import Value

DELTA, CUMULATIVE = export.AggregationTemporality.DELTA, export.AggregationTemporality.CUMULATIVE

SetValue = Callable[[semconv.Metric, Mapping[str, Value], float], None]
"""Sets the value of a data point."""


class CardinalityLimit:
    """Admits the first `limit` different names; every later name becomes `_OTHER`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._admitted: set[str] = set()

    def admit_label(self, name: str) -> str | None:
        """Returns the name if it is admitted, else `_OTHER`; None for an empty name."""
        if name in self._admitted:
            return name
        if not name:
            return None
        if len(self._admitted) >= self._limit:
            return semconv.OTHER
        self._admitted.add(name)
        return name


class NumberSeries:
    """The series of a counter, an up-down counter or a gauge."""

    def __init__(self, metric: semconv.Metric) -> None:
        self._metric = metric
        self._values: dict[Key, float] = {}
        self._reported: dict[Key, float] = {}

    def make_key(self, attributes: Mapping[str, Value]) -> Key:
        """Returns the key of these attributes, without attributes that the metric does not have."""
        return tuple(_value_to_label(attributes.get(name)) for name in self._metric.attributes)

    def retain_keys(self, keys: Collection[Key]) -> None:
        """Removes all series except these, because what they measured is gone."""
        self._values = {key: value for key, value in self._values.items() if key in keys}

    def reset_values(self) -> None:
        """Sets all series to 0."""
        self._values = dict.fromkeys(self._values, 0)

    def set(self, key: Key, value: float) -> None:
        """Sets the value of a gauge, or the total of a counter."""
        self._values[self._limit_key(key)] = value

    def set_for_attributes(self, attributes: Mapping[str, Value], value: float) -> Key:
        """Sets the value for these attributes, and returns the key of the series that holds it."""
        key = self._limit_key(self.make_key(attributes))
        self._values[key] = value
        return key

    def add(self, key: Key, value: float) -> None:
        """Adds to the value of a key."""
        values = self._values
        if key not in values:
            key = self._limit_key(key)
        values[key] = values.get(key, 0) + value

    def collect_data(self, temporality: export.AggregationTemporality, since: int, now: int) -> Any:
        """Returns the SDK's data of this metric; None if it has no series."""
        delta, reported = temporality is DELTA, self._reported
        if delta and self._metric in semconv.PREEXISTING_COUNTERS:
            reported = {**self._preexisting_values(), **reported}
        points = [
            export.NumberDataPoint(
                attributes=key_to_attributes(self._metric, key),
                start_time_unix_nano=since,
                time_unix_nano=now,
                value=max(value - reported.get(key, 0), 0) if delta else value,
            )
            for key, value in self._values.items()
        ]
        self._reported = dict(self._values)
        if not points:
            return None
        if self._metric.instrument == semconv.GAUGE:
            return export.Gauge(data_points=points)
        monotonic = self._metric.instrument == semconv.COUNTER
        return export.Sum(data_points=points, aggregation_temporality=temporality, is_monotonic=monotonic)

    def restore_delta(self, data: export.Sum) -> None:
        """Adds the values of a delta that was refused to the next one."""
        if data.aggregation_temporality is DELTA:
            for point in data.data_points:
                attributes: Any = point.attributes or {}
                key = self.make_key(attributes)
                self._reported[key] = self._reported.get(key, 0) - point.value

    def _preexisting_values(self) -> dict[Key, float]:
        """Returns the values that were counted before this process started, for the first delta."""
        preexisting = set(semconv.PREEXISTING_COUNTERS[self._metric])
        return {
            key: value
            for key, value in self._values.items()
            if not preexisting or preexisting.intersection(key)
        }

    def _limit_key(self, key: Key) -> Key:
        return key if key in self._values or len(self._values) < MAX_SERIES else OVERFLOW_KEY


def replace_values(
    numbers: Mapping[str, NumberSeries],
    metrics: Collection[semconv.Metric],
    set_values: Callable[[SetValue], None],
) -> None:
    """Sets the values that `set_values` sets.

    Other series of these metrics are removed, because what they measured is gone.
    """
    keys: dict[str, set[Key]] = {metric.name: set() for metric in metrics}

    def set_value(metric: semconv.Metric, attributes: Mapping[str, Value], value: float) -> None:
        keys.setdefault(metric.name, set()).add(numbers[metric.name].set_for_attributes(attributes, value))

    set_values(set_value)
    for metric in metrics:
        numbers[metric.name].retain_keys(keys[metric.name])


def build_metrics_data(metrics: Sequence[export.Metric], resource: Mapping[str, Value]) -> export.MetricsData:
    """Returns what the SDK's exporter sends."""
    named: Any = {semconv.SERVICE_NAME: semconv.UNKNOWN_SERVICE, **resource}
    scope = export.ScopeMetrics(
        scope=InstrumentationScope(semconv.SCOPE, VERSION, semconv.SCHEMA_URL),
        metrics=metrics,
        schema_url=semconv.SCHEMA_URL,
    )
    of_resource = export.ResourceMetrics(resource=Resource(named), scope_metrics=[scope], schema_url="")
    return export.MetricsData(resource_metrics=[of_resource])


def _value_to_label(value: Value | None) -> Label:
    return value if value is None or isinstance(value, (str, bool, int, float)) else str(value)
