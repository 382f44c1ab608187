"""Converts queries, dashboards and rules to native histograms. Pure.

Prometheus stores exponential histograms of OTLP as one series, without `_bucket`, `_sum` and `_count`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from otel_infer import semconv
from otel_infer.semconv import prometheus

HISTOGRAM_FAMILIES = tuple(
    prometheus.family_name(metric) for metric in semconv.METRICS if metric.instrument == semconv.HISTOGRAM
)
_FAMILY = rf"\b(?P<family>{'|'.join(HISTOGRAM_FAMILIES)})"
_SELECTOR = r'(?P<selector>\{(?:[^}"]|"(?:[^"\\]|\\.)*")*\})?'
_RANGE = r"(?P<range>\[[^\]]+\](?: offset \w+)?)"
_BUCKETS = re.compile(
    rf"sum(?: by \((?P<by>[^)]*)\))? \((?P<function>rate|increase)\({_FAMILY}_bucket{_SELECTOR}{_RANGE}\)\)"
)
_BUCKET_BOUND = re.compile(r'le=~?"(?P<bound>[\d.]+)[^"]*",?')
_PARTS = re.compile(
    rf"(?P<function>rate|increase|max_over_time)\({_FAMILY}_(?P<part>count|sum){_SELECTOR}{_RANGE}\)"
)
_VALUES = re.compile(rf"{_FAMILY}_(?P<part>count|sum)\b{_SELECTOR}")


def convert_query(expr: str) -> str:
    """Returns the query of native histograms for a query of classic ones; other queries do not change."""
    return _VALUES.sub(_convert_value, _PARTS.sub(_convert_part, _BUCKETS.sub(_convert_buckets, expr)))


def convert_queries(document: Any) -> Any:
    """Returns a dashboard or a rules file whose queries ask native histograms."""
    if isinstance(document, Mapping):
        return {key: _convert_field(key, value) for key, value in document.items()}
    return [convert_queries(item) for item in document] if isinstance(document, list) else document


def _convert_field(key: str, value: Any) -> Any:
    if key == "expr":
        return convert_query(value)
    if isinstance(value, str) and value.startswith("label_values("):  # a variable of a dashboard
        return _VALUES.sub(lambda match: match["family"] + (match["selector"] or ""), value)
    return convert_queries(value)


def _convert_buckets(match: re.Match[str]) -> str:
    """Converts the buckets of quantiles and heatmaps, or the one bucket that counts values up to its bound."""
    selector = match["selector"] or ""
    bound = _BUCKET_BOUND.search(selector)
    if bound is not None:
        rest = _BUCKET_BOUND.sub("", selector).replace(",}", "}")
        selector = "" if rest == "{}" else rest
    by = [label for label in (match["by"] or "").split(", ") if label not in ("", "le")]
    grouping = f" by ({', '.join(by)})" if by else ""
    histogram = f"sum{grouping} ({match['function']}({match['family']}{selector}{match['range']}))"
    if bound is None:
        return histogram
    return f"(histogram_fraction(0, {bound['bound']}, {histogram}) * histogram_count({histogram}))"


def _convert_part(match: re.Match[str]) -> str:
    series = f"{match['family']}{match['selector'] or ''}{match['range']}"
    if match["function"] == "max_over_time":  # used for the presence of a series only
        return f"count_over_time({series})"
    return f"histogram_{match['part']}({match['function']}({series}))"


def _convert_value(match: re.Match[str]) -> str:
    return f"histogram_{match['part']}({match['family']}{match['selector'] or ''})"
