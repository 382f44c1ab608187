"""Prometheus names of our metrics, compared with the OpenTelemetry SDK's own Prometheus exporter."""

from __future__ import annotations

import pytest
from opentelemetry.exporter.prometheus import _CustomCollector
from prometheus_client.core import Metric as Family

from otel_infer import semconv
from otel_infer.export.metrics.aggregator import MetricsAggregator
from otel_infer.semconv import prometheus
from tests.support.everything import fill_every_metric


@pytest.fixture(scope="module")
def translated() -> dict[str, Family]:
    """Returns the translated metric families by their description."""
    collector = _CustomCollector(disable_target_info=True)
    collector.add_metrics_data(
        fill_every_metric(MetricsAggregator(resource={}, started_at_unix_ns=0)).collect(1)
    )
    return {family.documentation: family for family in collector.collect()}


@pytest.mark.parametrize("metric", semconv.METRICS, ids=lambda metric: metric.name)
def test_metric_names_match_the_sdk_exporter(metric: semconv.Metric, translated: dict[str, Family]) -> None:
    family = translated[metric.description]
    # The SDK's exporter omits this suffix; Prometheus' OTLP receiver adds it.
    ratio = "_ratio" if (metric.unit, metric.instrument) == ("1", semconv.GAUGE) else ""
    names = {sample.name + ratio for sample in family.samples}
    assert set(prometheus.series_names(metric)) == names
    expected = {prometheus.label_name(name) for name in metric.attributes}
    (labels, *_) = [set(sample.labels) for sample in family.samples]
    assert {name for name in labels if not name.startswith("otel_scope")} - {"le"} == expected


def test_series_names_are_unique() -> None:
    names = [name for metric in semconv.METRICS for name in prometheus.series_names(metric)]
    assert len(set(names)) == len(names)
