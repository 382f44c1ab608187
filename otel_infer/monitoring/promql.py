"""Questions to Prometheus about our metrics, in PromQL that Prometheus 2.42 and 3 both understand. Pure.

Whoever asks says once what always holds (`Promql.where`) and over which window rates are taken. A metric that does not carry a
label is not asked for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from otel_infer import semconv
from otel_infer.semconv import Metric, prometheus

TARGET_LABELS = ("job", "instance")
"""Labels that every series has: whoever scrapes, or receives OTLP, puts them there."""


def label_equals(attribute: str, value: str) -> str:
    """A matcher: this value, or none for an empty one."""
    return f'{prometheus.label_name(attribute)}="{_escape_value(value)}"'


def label_matches(attribute: str, pattern: str) -> str:
    """A matcher: values like this regular expression, whole."""
    return f'{prometheus.label_name(attribute)}=~"{_escape_value(pattern)}"'


def label_not_matches(attribute: str, pattern: str) -> str:
    """A matcher: any value but those like this regular expression; one that begins with `|` leaves out who has none, too."""
    return f'{prometheus.label_name(attribute)}!~"{_escape_value(pattern)}"'


def ratio_or_absent(part: str, whole: str) -> str:
    """A ratio that is absent, and not NaN, where there is nothing to divide by."""
    return f"{part} / ({whole} > 0)"


def ratio_or_zero(part: str, whole: str) -> str:
    """A ratio that is 0, and not absent, where there is none of the part; both by the same labels."""
    return f"({part} or 0 * {whole}) / ({whole} > 0)"


def ratio_to_total(parts: str, whole: str) -> str:
    """Many by one whole that has no labels."""
    return f"{parts} / on () group_left () ({whole} > 0)"


class PromqlBuilder(NamedTuple):
    """`where`: patterns by attribute (or label), which hold for every metric that carries it. `window`: of rates."""

    filters: Mapping[str, str]
    window: str

    def select_series(self, metric: Metric, *matchers: str, series: str = "") -> str:
        """The series themselves; `series`: another ending than the first (`_sum`, say)."""
        name = prometheus.family_name(metric) + series if series else prometheus.series_names(metric)[0]
        held = [
            label_matches(key, pattern) for key, pattern in self.filters.items() if _has_label(metric, key)
        ]
        inside = ",".join([*held, *matchers])
        return f"{name}{{{inside}}}" if inside else name

    def aggregate_gauge(
        self, metric: Metric, *matchers: str, by: Sequence[str] = (), take: str = "sum"
    ) -> str:
        """Of a gauge or an up-down counter."""
        return f"{take}{_by_clause(by)} ({self.select_series(metric, *matchers)})"

    def max_over_window(self, metric: Metric, *matchers: str, by: Sequence[str] = ()) -> str:
        """The most that a gauge was within the window."""
        return f"max{_by_clause(by)} (max_over_time({self.select_series(metric, *matchers)}[{self.window}]))"

    def rate(
        self, metric: Metric, *matchers: str, by: Sequence[str] = (), series: str = "", take: str = "sum"
    ) -> str:
        """A second: of a counter, or of the values that a histogram counted."""
        ending = series or (prometheus.COUNT if metric.instrument == semconv.HISTOGRAM else "")
        return f"{take}{_by_clause(by)} (rate({self.select_series(metric, *matchers, series=ending)}[{self.window}]))"

    def increase(self, metric: Metric, *matchers: str, by: Sequence[str] = (), series: str = "") -> str:
        """Over the window: of a counter, or of one of the series of a histogram."""
        return f"sum{_by_clause(by)} (increase({self.select_series(metric, *matchers, series=series)}[{self.window}]))"

    def count_occurrences(
        self, metric: Metric, *matchers: str, by: Sequence[str] = (), series: str = ""
    ) -> str:
        """How often, if at all; of a counter that is not there before it happens first, and whose increase is not seen then.

        A series is new that was not there in the hour before: a scrape that was missed makes none.
        """
        picked = self.select_series(metric, *matchers, series=series)
        grown = self.increase(metric, *matchers, by=by, series=series)
        fresh = f"sum{_by_clause(by)} ({picked} unless max_over_time({picked}[1h] offset {self.window}))"
        return f"({grown} > 0 or {fresh} > 0)"

    def sum_rate(self, metric: Metric, *matchers: str, by: Sequence[str] = ()) -> str:
        """What the values of a histogram sum to, a second."""
        return self.rate(metric, *matchers, by=by, series=prometheus.SUM)

    def quantile(self, q: float, metric: Metric, *matchers: str, by: Sequence[str] = ()) -> str:
        """Of a histogram, over whatever the series have apart but `by`; within the width of a bucket."""
        inside = self.rate(metric, *matchers, by=("le", *by), series=prometheus.BUCKET)
        return f"histogram_quantile({q:g}, {inside})"

    def mean(self, metric: Metric, *matchers: str, by: Sequence[str] = ()) -> str:
        """Of a histogram."""
        return ratio_or_absent(self.sum_rate(metric, *matchers, by=by), self.rate(metric, *matchers, by=by))

    def share_below(self, metric: Metric, bound: str, *matchers: str, by: Sequence[str] = ()) -> str:
        """Share of the values of a histogram up to a bound, which has to be one of its buckets'."""
        fast = self.rate(metric, f'le="{bound}"', *matchers, by=by, series=prometheus.BUCKET)
        return ratio_or_absent(fast, self.rate(metric, *matchers, by=by))

    def bucket_increase(self, metric: Metric, *matchers: str) -> str:
        """Of a histogram, for a heatmap."""
        return self.increase(metric, *matchers, by=("le",))


def _has_label(metric: Metric, key: str) -> bool:
    return key in TARGET_LABELS or key in metric.attributes


def _escape_value(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _by_clause(attributes: Sequence[str]) -> str:
    return f" by ({', '.join(prometheus.label_name(one) for one in attributes)})" if attributes else ""
