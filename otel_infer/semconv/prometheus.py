"""Translates metrics and attributes to their Prometheus names, the same for scraping as for OTLP. Pure.

The names are those of Prometheus' OTLP receiver with `translation_strategy: UnderscoreEscapingWithSuffixes`,
the default of Prometheus 3 (prometheus/otlptranslator). Dots become underscores, and the unit becomes a
suffix. Then follow `_ratio` for a gauge of unit 1 and `_total` for a counter.
"""

from __future__ import annotations

import re

from otel_infer import semconv

_UNITS = {"s": "seconds", "By": "bytes", "W": "watts", "J": "joules", "Cel": "celsius"}
_INVALID_LABEL_CHARS = re.compile(r"[^a-zA-Z0-9_]")
TOTAL, BUCKET, SUM, COUNT = "_total", "_bucket", "_sum", "_count"
STAGE_BUDGET = "otel_infer:stage_budget:seconds"
"""Time budget of each stage, where configured; recorded by the rules of `otel-infer alerts build`."""


def family_name(metric: semconv.Metric) -> str:
    """Returns the common name of all series of a metric.

    It lacks the suffix of a series (`_total`, `_bucket`).
    """
    words = metric.name.replace(".", "_").split("_")
    unit = unit_suffix(metric)
    return "_".join([*words, unit] if unit and unit not in words else words)


def unit_suffix(metric: semconv.Metric) -> str:
    """Returns the suffix for the unit of a metric; empty for none (`{token}` is an annotation, not a unit).

    Raises KeyError for a unit that is not in the table.
    """
    if metric.unit.startswith("{"):
        return ""
    if metric.unit == "1":
        return "ratio" if metric.instrument == semconv.GAUGE else ""
    return _UNITS[metric.unit]


def series_names(metric: semconv.Metric) -> tuple[str, ...]:
    """Returns the names of all series of a metric; a histogram has three, buckets first."""
    name = family_name(metric)
    if metric.instrument == semconv.HISTOGRAM:
        return name + BUCKET, name + SUM, name + COUNT
    return (name + TOTAL if metric.instrument == semconv.COUNTER else name,)


def label_name(attribute: str) -> str:
    """Returns the label name of an attribute."""
    name = _INVALID_LABEL_CHARS.sub("_", attribute)
    return f"key_{name}" if name[:1].isdigit() else name
