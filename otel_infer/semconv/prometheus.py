"""What Prometheus calls our metrics and their attributes: the same by scraping as by OTLP. Pure.

As its OTLP receiver has it with `translation_strategy: UnderscoreEscapingWithSuffixes`, the default of Prometheus 3
(prometheus/otlptranslator: dots become underscores, the unit a suffix, then `_ratio` for a gauge of unit 1 and `_total` for a
counter).
"""

from __future__ import annotations

import re

from otel_infer import semconv

_UNITS = {"s": "seconds", "By": "bytes", "W": "watts", "J": "joules", "Cel": "celsius"}
_INVALID_LABEL_CHARS = re.compile(r"[^a-zA-Z0-9_]")
TOTAL, BUCKET, SUM, COUNT = "_total", "_bucket", "_sum", "_count"
STAGE_BUDGET = "otel_infer:stage_budget:seconds"
"""Recorded by the rules of `otel-infer alerts build`: what each stage may take, where that was said."""


def family_name(metric: semconv.Metric) -> str:
    """The name of all its series, without what they end in by their kind."""
    words = metric.name.replace(".", "_").split("_")
    unit = unit_suffix(metric)
    return "_".join([*words, unit] if unit and unit not in words else words)


def unit_suffix(metric: semconv.Metric) -> str:
    """The suffix for its unit; empty where it has none (`{token}` is a remark and no unit). Raises KeyError for a unit that is
    not in the table."""
    if metric.unit.startswith("{"):
        return ""
    if metric.unit == "1":
        return "ratio" if metric.instrument == semconv.GAUGE else ""
    return _UNITS[metric.unit]


def series_names(metric: semconv.Metric) -> tuple[str, ...]:
    """The names under which it can be queried, the one that is counted or shown first."""
    name = family_name(metric)
    if metric.instrument == semconv.HISTOGRAM:
        return name + BUCKET, name + SUM, name + COUNT
    return (name + TOTAL if metric.instrument == semconv.COUNTER else name,)


def label_name(attribute: str) -> str:
    """What an attribute is called as a label."""
    name = _INVALID_LABEL_CHARS.sub("_", attribute)
    return f"key_{name}" if name[:1].isdigit() else name
