"""Questions to Prometheus about our metrics, in PromQL that Prometheus 2.42 and 3 both understand. Pure.

Whoever asks says once what always holds (`Promql.where`) and over which window rates are taken. A metric that does not carry a
label is not asked for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from otel_infer import semconv
from otel_infer.semconv import Metric, prometheus

ALWAYS = ("job", "instance")
"""Labels that every series has: whoever scrapes, or receives OTLP, puts them there."""


def equal(attribute: str, value: str) -> str:
    """A matcher: this value, or none for an empty one."""
    return f'{prometheus.label(attribute)}="{_quoted(value)}"'


def matches(attribute: str, pattern: str) -> str:
    """A matcher: values like this regular expression, whole."""
    return f'{prometheus.label(attribute)}=~"{_quoted(pattern)}"'


def unlike(attribute: str, pattern: str) -> str:
    """A matcher: any value but those like this regular expression; one that begins with `|` leaves out who has none, too."""
    return f'{prometheus.label(attribute)}!~"{_quoted(pattern)}"'


def per(part: str, whole: str) -> str:
    """A ratio that is absent, and not NaN, where there is nothing to divide by."""
    return f"{part} / ({whole} > 0)"


def share(part: str, whole: str) -> str:
    """A ratio that is 0, and not absent, where there is none of the part; both by the same labels."""
    return f"({part} or 0 * {whole}) / ({whole} > 0)"


def each_per(parts: str, whole: str) -> str:
    """Many by one whole that has no labels."""
    return f"{parts} / on () group_left () ({whole} > 0)"


class Promql(NamedTuple):
    """`where`: patterns by attribute (or label), which hold for every metric that carries it. `window`: of rates."""

    where: Mapping[str, str]
    window: str

    def pick(self, metric: Metric, *matchers: str, series: str = "") -> str:
        """The series themselves; `series`: another ending than the first (`_sum`, say)."""
        name = prometheus.family(metric) + series if series else prometheus.series(metric)[0]
        held = [matches(key, pattern) for key, pattern in self.where.items() if _carries(metric, key)]
        inside = ",".join([*held, *matchers])
        return f"{name}{{{inside}}}" if inside else name

    def value(self, metric: Metric, *matchers: str, by: Sequence[str] = (), take: str = "sum") -> str:
        """Of a gauge or an up-down counter."""
        return f"{take}{_by(by)} ({self.pick(metric, *matchers)})"

    def peak(self, metric: Metric, *matchers: str, by: Sequence[str] = ()) -> str:
        """The most that a gauge was within the window."""
        return f"max{_by(by)} (max_over_time({self.pick(metric, *matchers)}[{self.window}]))"

    def rate(
        self, metric: Metric, *matchers: str, by: Sequence[str] = (), series: str = "", take: str = "sum"
    ) -> str:
        """A second: of a counter, or of the values that a histogram counted."""
        ending = series or (prometheus.COUNT if metric.instrument == semconv.HISTOGRAM else "")
        return f"{take}{_by(by)} (rate({self.pick(metric, *matchers, series=ending)}[{self.window}]))"

    def increase(self, metric: Metric, *matchers: str, by: Sequence[str] = (), series: str = "") -> str:
        """Over the window: of a counter, or of one of the series of a histogram."""
        return f"sum{_by(by)} (increase({self.pick(metric, *matchers, series=series)}[{self.window}]))"

    def happened(self, metric: Metric, *matchers: str, by: Sequence[str] = (), series: str = "") -> str:
        """How often, if at all; of a counter that is not there before it happens first, and whose increase is not seen then.

        A series is new that was not there in the hour before: a scrape that was missed makes none.
        """
        picked = self.pick(metric, *matchers, series=series)
        grown = self.increase(metric, *matchers, by=by, series=series)
        fresh = f"sum{_by(by)} ({picked} unless max_over_time({picked}[1h] offset {self.window}))"
        return f"({grown} > 0 or {fresh} > 0)"

    def spent(self, metric: Metric, *matchers: str, by: Sequence[str] = ()) -> str:
        """What the values of a histogram sum to, a second."""
        return self.rate(metric, *matchers, by=by, series=prometheus.SUM)

    def quantile(self, q: float, metric: Metric, *matchers: str, by: Sequence[str] = ()) -> str:
        """Of a histogram, over whatever the series have apart but `by`; within the width of a bucket."""
        inside = self.rate(metric, *matchers, by=("le", *by), series=prometheus.BUCKET)
        return f"histogram_quantile({q:g}, {inside})"

    def mean(self, metric: Metric, *matchers: str, by: Sequence[str] = ()) -> str:
        """Of a histogram."""
        return per(self.spent(metric, *matchers, by=by), self.rate(metric, *matchers, by=by))

    def within(self, metric: Metric, bound: str, *matchers: str, by: Sequence[str] = ()) -> str:
        """Share of the values of a histogram up to a bound, which has to be one of its buckets'."""
        fast = self.rate(metric, f'le="{bound}"', *matchers, by=by, series=prometheus.BUCKET)
        return per(fast, self.rate(metric, *matchers, by=by))

    def buckets(self, metric: Metric, *matchers: str) -> str:
        """Of a histogram, for a heatmap."""
        return self.increase(metric, *matchers, by=("le",))


def _carries(metric: Metric, key: str) -> bool:
    return key in ALWAYS or key in metric.attributes


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _by(attributes: Sequence[str]) -> str:
    return f" by ({', '.join(prometheus.label(one) for one in attributes)})" if attributes else ""
