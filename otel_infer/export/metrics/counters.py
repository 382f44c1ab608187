"""Counters and gauges as points of the SDK, and which names may become values of their attributes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from opentelemetry.sdk.metrics import export

from otel_infer import semconv
from otel_infer.export.metrics.histograms import MAX_SERIES, OVERFLOW_KEY, Key, Label, key_to_attributes
from otel_infer.ringbuffer.events import Value

DELTA, CUMULATIVE = export.AggregationTemporality.DELTA, export.AggregationTemporality.CUMULATIVE

SetValue = Callable[[semconv.Metric, Mapping[str, Value], float], None]
"""Sets the value of a point."""


class CardinalityLimit:
    """Lets the first so many different names through; those that come later are `_OTHER`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._admitted: set[str] = set()

    def admit_label(self, name: str) -> str | None:
        """The name, as it may be said; None for no name."""
        if name in self._admitted:
            return name
        if not name:
            return None
        if len(self._admitted) >= self._limit:
            return semconv.OTHER
        self._admitted.add(name)
        return name


class NumberSeries:
    """The points of a counter, an up-down counter or a gauge."""

    def __init__(self, metric: semconv.Metric) -> None:
        self._metric = metric
        self._values: dict[Key, float] = {}
        self._reported: dict[Key, float] = {}

    def make_key(self, attributes: Mapping[str, Value]) -> Key:
        """Attributes that the metric does not have are left out."""
        return tuple(_value_to_label(attributes.get(name)) for name in self._metric.attributes)

    def retain_keys(self, keys: Collection[Key]) -> None:
        """Points of other attributes are of things that are gone."""
        self._values = {key: value for key, value in self._values.items() if key in keys}

    def reset_values(self) -> None:
        """All points are 0."""
        self._values = dict.fromkeys(self._values, 0)

    def set(self, key: Key, value: float) -> None:
        """The value, or the total, from now on."""
        self._values[self._limit_key(key)] = value

    def set_for_attributes(self, attributes: Mapping[str, Value], value: float) -> Key:
        """As `set`; the key of these attributes."""
        key = self.make_key(attributes)
        self.set(key, value)
        return key

    def add(self, key: Key, value: float) -> None:
        """Adds to what was counted."""
        values = self._values
        if key not in values:
            key = self._limit_key(key)
        values[key] = values.get(key, 0) + value

    def collect_data(self, temporality: export.AggregationTemporality, since: int, now: int) -> Any:
        """The SDK's data of this metric, or None if there are no points."""
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

    def _preexisting_values(self) -> dict[Key, float]:
        """Of what was counted before we came, that is."""
        some = set(semconv.PREEXISTING_COUNTERS[self._metric])
        return {key: value for key, value in self._values.items() if not some or some.intersection(key)}

    def _limit_key(self, key: Key) -> Key:
        return key if key in self._values or len(self._values) < MAX_SERIES else OVERFLOW_KEY


def replace_values(
    numbers: Mapping[str, NumberSeries], metrics: Collection[semconv.Metric], say: Callable[[SetValue], None]
) -> None:
    """Sets what `say` says; of these metrics, what it does not say is of things that are gone."""
    said: dict[str, set[Key]] = {metric.name: set() for metric in metrics}

    def set_value(metric: semconv.Metric, attributes: Mapping[str, Value], value: float) -> None:
        said.setdefault(metric.name, set()).add(numbers[metric.name].set_for_attributes(attributes, value))

    say(set_value)
    for metric in metrics:
        numbers[metric.name].retain_keys(said[metric.name])


def _value_to_label(value: Value | None) -> Label:
    return value if value is None or isinstance(value, (str, bool, int, float)) else str(value)
