"""Finds out from the series names in a Prometheus why queries find none: its translation of OTLP names, or
native histograms.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from otel_infer import semconv
from otel_infer.monitoring.native_histograms import HISTOGRAM_FAMILIES
from otel_infer.semconv import Metric, prometheus

OWN_STRATEGY = "UnderscoreEscapingWithSuffixes"
_HISTOGRAM_ENDINGS = ("", prometheus.BUCKET, prometheus.SUM, prometheus.COUNT)


def explain_names(names: Collection[str], native: bool) -> Iterator[str]:
    """Yields a sentence for each reason why the queries do not fit these names, with the setting that mends it.

    `native`: the queries ask native histograms.
    """
    strategy = find_strategy(names)
    if strategy != OWN_STRATEGY:
        yield (
            f"this Prometheus names OTLP metrics by translation_strategy {strategy}; set "
            f"`otlp: {{ translation_strategy: {OWN_STRATEGY} }}` in its configuration"
        )
        return
    classic = sum(family + prometheus.COUNT in names for family in HISTOGRAM_FAMILIES)
    exponential = sum(family in names for family in HISTOGRAM_FAMILIES)
    if exponential > classic and not native:
        yield (
            "the histograms are native (exponential); build with `--histograms native`, or set "
            "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION=explicit_bucket_histogram on the servers"
        )
    elif classic > exponential and native:
        yield "the histograms have explicit buckets; leave out `--histograms native`"


def find_strategy(names: Collection[str]) -> str:
    """Returns the translation strategy that explains most names; `OWN_STRATEGY` if there are none of ours."""
    explained = {
        strategy: sum(
            any(translate(metric) + ending in names for ending in _endings(metric))
            for metric in semconv.METRICS
        )
        for strategy, translate in _TRANSLATIONS.items()
    }
    return max(explained, key=explained.__getitem__)


def _endings(metric: Metric) -> tuple[str, ...]:
    return _HISTOGRAM_ENDINGS if metric.instrument == semconv.HISTOGRAM else ("",)


def _escape(name: str) -> str:
    return name.replace(".", "_")


def _add_suffixes(metric: Metric) -> str:
    """Returns the name with the suffixes of unit and instrument, and with its dots."""
    escaped, total = _escape(metric.name), prometheus.TOTAL if metric.instrument == semconv.COUNTER else ""
    return metric.name + prometheus.family_name(metric)[len(escaped) :] + total


_TRANSLATIONS: dict[str, Callable[[Metric], str]] = {
    OWN_STRATEGY: lambda metric: _escape(_add_suffixes(metric)),
    "UnderscoreEscapingWithoutSuffixes": lambda metric: _escape(metric.name),
    "NoUTF8EscapingWithSuffixes": _add_suffixes,
    "NoTranslation": lambda metric: metric.name,
}
"""Strategies of Prometheus 3, which replace dots or not, and append unit and `_total` or not."""
