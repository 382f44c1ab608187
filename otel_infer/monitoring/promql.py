"""Builds PromQL queries on our metrics, in a form that Prometheus 2.42 and 3 accept. Pure.

A `PromqlBuilder` holds the filters that apply to every query, and the window of rates. A filter is left out
for a metric that does not carry its label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from otel_infer import semconv
from otel_infer.semconv import Metric, prometheus

TARGET_LABELS = ("job", "instance")
"""Labels that every series has: Prometheus adds them when it scrapes or receives OTLP."""


def label_equals(attribute: str, value: str) -> str:
    """Returns a matcher for this value; an empty value matches series without the label."""
    return f'{prometheus.label_name(attribute)}="{_escape_value(value)}"'


def label_matches(attribute: str, pattern: str) -> str:
    """Returns a matcher for values that match this regular expression as a whole."""
    return f'{prometheus.label_name(attribute)}=~"{_escape_value(pattern)}"'


def label_not_matches(attribute: str, pattern: str) -> str:
    """Returns a matcher for values that do not match this regular expression.

    A pattern that begins with `|` excludes series without the label, too.
    """
    return f'{prometheus.label_name(attribute)}!~"{_escape_value(pattern)}"'


def ratio_or_absent(part: str, whole: str) -> str:
    """Returns a ratio that is absent, and not NaN, where `whole` is 0."""
    return f"{part} / ({whole} > 0)"


def ratio_or_zero(part: str, whole: str) -> str:
    """Returns a ratio that is 0, and not absent, where `part` is absent; both have the same labels."""
    return f"({part} or 0 * {whole}) / ({whole} > 0)"


def ratio_to_total(parts: str, whole: str) -> str:
    """Returns the ratio of each of `parts` to `whole`, which has no labels."""
    return f"{parts} / on () group_left () ({whole} > 0)"


class PromqlBuilder(NamedTuple):
    """Builds queries with common filters and one window.

    `filters`: patterns by attribute or label, for every metric that carries it. `window`: range of the rates.
    """

    filters: Mapping[str, str]
    window: str

    def select_series(self, metric: Metric, *matchers: str, series: str = "") -> str:
        """Returns a selector of the metric's series.

        `series`: the ending of its name, such as `_sum`; "" = the metric's first series.
        """
        name = prometheus.family_name(metric) + series if series else prometheus.series_names(metric)[0]
        filters = [
            label_matches(key, pattern) for key, pattern in self.filters.items() if _has_label(metric, key)
        ]
        selector = ",".join([*filters, *matchers])
        return f"{name}{{{selector}}}" if selector else name

    def aggregate_gauge(
        self, metric: Metric, *matchers: str, by: Sequence[str] = (), aggregation: str = "sum"
    ) -> str:
        """Returns the aggregate of a gauge or an up-down counter."""
        return f"{aggregation}{_by_clause(by)} ({self.select_series(metric, *matchers)})"

    def max_over_window(self, metric: Metric, *matchers: str, by: Sequence[str] = ()) -> str:
        """Returns the maximum of a gauge within the window."""
        return f"max{_by_clause(by)} (max_over_time({self.select_series(metric, *matchers)}[{self.window}]))"

    def rate(
        self,
        metric: Metric,
        *matchers: str,
        by: Sequence[str] = (),
        series: str = "",
        aggregation: str = "sum",
    ) -> str:
        """Returns the rate per second of a counter, or of the count of a histogram."""
        ending = series or (prometheus.COUNT if metric.instrument == semconv.HISTOGRAM else "")
        return f"{aggregation}{_by_clause(by)} (rate({self.select_series(metric, *matchers, series=ending)}[{self.window}]))"

    def increase(self, metric: Metric, *matchers: str, by: Sequence[str] = (), series: str = "") -> str:
        """Returns the increase of a counter, or of a series of a histogram, over the window."""
        return f"sum{_by_clause(by)} (increase({self.select_series(metric, *matchers, series=series)}[{self.window}]))"

    def count_occurrences(
        self, metric: Metric, *matchers: str, by: Sequence[str] = (), series: str = ""
    ) -> str:
        """Returns the number of occurrences over the window, absent if 0.

        It is for a counter that does not exist before its first occurrence: `increase` misses that one. A
        series counts as new if it did not exist in the hour before, so a missed scrape does not make it new.
        """
        selected = self.select_series(metric, *matchers, series=series)
        increase = self.increase(metric, *matchers, by=by, series=series)
        new_series = (
            f"sum{_by_clause(by)} ({selected} unless max_over_time({selected}[1h] offset {self.window}))"
        )
        return f"({increase} > 0 or {new_series} > 0)"

    def sum_rate(self, metric: Metric, *matchers: str, by: Sequence[str] = ()) -> str:
        """Returns the rate per second of the sum of a histogram's values."""
        return self.rate(metric, *matchers, by=by, series=prometheus.SUM)

    def quantile(self, q: float, metric: Metric, *matchers: str, by: Sequence[str] = ()) -> str:
        """Returns a quantile of a histogram, merged over all labels but `by`.

        `q`: 0 to 1. The result is exact to a bucket's width.
        """
        buckets = self.rate(metric, *matchers, by=("le", *by), series=prometheus.BUCKET)
        return f"histogram_quantile({q:g}, {buckets})"

    def mean(self, metric: Metric, *matchers: str, by: Sequence[str] = ()) -> str:
        """Returns the mean of a histogram's values."""
        return ratio_or_absent(self.sum_rate(metric, *matchers, by=by), self.rate(metric, *matchers, by=by))

    def share_below(self, metric: Metric, bound: str) -> str:
        """Returns the share of a histogram's values up to `bound`, which must be a bound of its buckets."""
        fast = self.rate(metric, f'le="{bound}"', series=prometheus.BUCKET)
        return ratio_or_absent(fast, self.rate(metric))

    def bucket_increase(self, metric: Metric, *matchers: str) -> str:
        """Returns the increase per bucket of a histogram, for a heatmap."""
        return self.increase(metric, *matchers, by=("le",))


def _has_label(metric: Metric, key: str) -> bool:
    return key in TARGET_LABELS or key in metric.attributes


def _escape_value(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _by_clause(attributes: Sequence[str]) -> str:
    return (
        f" by ({', '.join(prometheus.label_name(attribute) for attribute in attributes)})"
        if attributes
        else ""
    )
