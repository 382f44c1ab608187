"""What Prometheus calls our metrics: checked against the SDK project's own exporter, which translates on its own."""

from __future__ import annotations

import pytest
from opentelemetry.exporter.prometheus import _CustomCollector
from prometheus_client.core import Metric as Family

from otel_infer import semconv
from otel_infer.export.metrics.aggregator import MetricsAggregator
from otel_infer.semconv import prometheus
from tests.support.everything import said


@pytest.fixture(scope="module")
def translated() -> dict[str, Family]:
    """By the description, which is ours."""
    collector = _CustomCollector(disable_target_info=True)
    collector.add_metrics_data(said(MetricsAggregator(resource={}, started_at_unix_ns=0)).collect(1))
    return {family.documentation: family for family in collector.collect()}


@pytest.mark.parametrize("metric", semconv.METRICS, ids=lambda metric: metric.name)
def test_every_metric_has_the_name_that_the_sdks_exporter_gives_it(
    metric: semconv.Metric, translated: dict[str, Family]
) -> None:
    family = translated[metric.description]
    # The one thing that it leaves out and Prometheus' receiver does not.
    ratio = "_ratio" if (metric.unit, metric.instrument) == ("1", semconv.GAUGE) else ""
    names = {sample.name + ratio for sample in family.samples}
    assert set(prometheus.series_names(metric)) == names
    expected = {prometheus.label_name(name) for name in metric.attributes}
    (labels, *_) = [set(sample.labels) for sample in family.samples]
    assert {name for name in labels if not name.startswith("otel_scope")} - {"le"} == expected


def test_every_name_is_one_of_a_kind() -> None:
    names = [name for metric in semconv.METRICS for name in prometheus.series_names(metric)]
    assert len(set(names)) == len(names)
