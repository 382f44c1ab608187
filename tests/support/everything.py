"""A point of every metric there is, with every attribute that it may carry."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer.export.metrics.aggregator import MetricsAggregator
from otel_infer.export.metrics.histograms import ExemplarSource

TRACE_ID, SPAN_ID = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
ENDED_AT = 1_700_000_000_250_000_000


def said(sink: MetricsAggregator) -> MetricsAggregator:
    """The sink, with one point of each; those of histograms have an exemplar."""
    for metric in semconv.METRICS:
        values = {name: f"a {name}" for name in metric.attributes}
        if metric.instrument == semconv.HISTOGRAM:
            points = sink._histograms[metric.name].get_or_create(tuple(values.values()))
            points.record(metric.bounds[3], ExemplarSource(TRACE_ID, SPAN_ID, ENDED_AT))
            points.record(metric.bounds[-1] * 2)
        else:
            sink.set_value(metric, values, 7)
    return sink
