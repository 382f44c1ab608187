"""Renders collected metrics as text for a scraper.

The format is OpenMetrics 1.0 with exemplars, or the older one of Prometheus without.
Prometheus gives the same names and labels to these metrics over OTLP (`semconv.prometheus`). The scraper adds
`job` and `instance`. Other resource attributes are on `target_info`, as over OTLP. Sums are cumulative and
buckets explicit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Any

from otel_infer import semconv
from otel_infer.semconv import prometheus

OPENMETRICS_CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
TEXT_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_METRIC_BY_NAME = {metric.name: metric for metric in semconv.METRICS}
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_TYPE_BY_INSTRUMENT = {semconv.HISTOGRAM: "histogram", semconv.COUNTER: "counter"}


def render_metrics(data: Any, *, is_open: bool) -> bytes:
    """Returns the text of the SDK's `MetricsData`, which holds one resource."""
    lines: list[str] = []
    for resource_metrics in data.resource_metrics:
        lines += _render_target_info(resource_metrics.resource.attributes, is_open)
        for scope in resource_metrics.scope_metrics:
            for metric in scope.metrics:
                lines += _render_family(_METRIC_BY_NAME[metric.name], metric.data.data_points, is_open)
    if is_open:
        lines.append("# EOF")
    return ("\n".join(lines) + "\n").encode("utf-8", "replace")


def _render_target_info(attributes: Mapping[str, Any], is_open: bool) -> list[str]:
    head = "# TYPE target info" if is_open else "# TYPE target_info gauge"
    return [head, f"target_info{_render_labels(attributes)} 1"]


def _render_family(metric: semconv.Metric, points: Any, is_open: bool) -> Iterator[str]:
    name, unit = prometheus.family_name(metric), prometheus.unit_suffix(metric)
    kind = _TYPE_BY_INSTRUMENT.get(metric.instrument, "gauge")
    (first, *_) = prometheus.series_names(metric)
    # A counter's family has no suffix in OpenMetrics.
    named = name if is_open or kind == "histogram" else first
    yield f"# TYPE {named} {kind}"
    if unit and is_open:
        yield f"# UNIT {named} {unit}"
    yield f"# HELP {named} {metric.description.translate(_ESCAPES) if is_open else metric.description}"
    for point in points:
        if kind == "histogram":
            yield from _render_histogram(name, point, is_open)
        else:
            yield f"{first}{_render_labels(point.attributes)} {point.value!r}"


def _render_histogram(name: str, point: Any, is_open: bool) -> Iterator[str]:
    bounds, below = point.explicit_bounds, 0
    exemplars = getattr(point, "exemplars", ()) if is_open else ()  # points of SDK 1.27 have none
    exemplar_by_bucket = {bisect_left(bounds, exemplar.value): exemplar for exemplar in exemplars}
    edges = [*(repr(float(bound)) for bound in bounds), "+Inf"]
    for i, (edge, count) in enumerate(zip(edges, point.bucket_counts)):
        below += count
        suffix = _render_exemplar(exemplar_by_bucket[i]) if i in exemplar_by_bucket else ""
        yield f"{name}{prometheus.BUCKET}{_render_labels(point.attributes, le=edge)} {below}{suffix}"
    yield f"{name}{prometheus.COUNT}{_render_labels(point.attributes)} {point.count}"
    yield f"{name}{prometheus.SUM}{_render_labels(point.attributes)} {point.sum!r}"


def _render_labels(attributes: Mapping[str, Any], **more: str) -> str:
    labels: dict[str, str] = {}
    for key, value in attributes.items():
        name = prometheus.label_name(key)
        # Values of attributes with the same label name are joined, as Prometheus' OTLP receiver does.
        labels[name] = f"{labels[name]};{_format_value(value)}" if name in labels else _format_value(value)
    labels.update(more)
    inside = ",".join(f'{key}="{value.translate(_ESCAPES)}"' for key, value in labels.items())
    return f"{{{inside}}}" if inside else ""


def _format_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _render_exemplar(exemplar: Any) -> str:
    ids = f'trace_id="{exemplar.trace_id:032x}",span_id="{exemplar.span_id:016x}"'
    return f" # {{{ids}}} {exemplar.value!r} {exemplar.time_unix_nano / 1e9:.3f}"
