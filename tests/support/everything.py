"""A data point of every metric, with every attribute it may have."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer.export.metrics.aggregator import MetricsAggregator
from otel_infer.export.metrics.histograms import ExemplarSource

TRACE_ID, SPAN_ID = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
ENDED_AT = 1_700_000_000_250_000_000


def fill_every_metric(aggregator: MetricsAggregator) -> MetricsAggregator:
    """Returns the aggregator with one point of each metric; histogram points have an exemplar."""
    for metric in semconv.METRICS:
        values = {name: f"a {name}" for name in metric.attributes}
        if metric.instrument == semconv.HISTOGRAM:
            points = aggregator._histograms[metric.name].get_or_create(tuple(values.values()))
            points.record(metric.bounds[3], ExemplarSource(TRACE_ID, SPAN_ID, ENDED_AT))
            points.record(metric.bounds[-1] * 2)
        else:
            aggregator.set_value(metric, values, 7)
    return aggregator
