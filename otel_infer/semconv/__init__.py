"""Every span, attribute and metric name on the wire, once, with unit, buckets and meaning.

Names of the OpenTelemetry conventions are used as they are (semantic-conventions v1.44 for `http.*`, `error.*`, `hw.*`,
`server.*`; semantic-conventions-genai for `gen_ai.*`, all of it in development). What no convention has is ours, under
`infer.*`. Dashboards, alerts, docs and tests take names from here. Long, since it is one table.
"""

from __future__ import annotations

from otel_infer.semconv import device_metrics, metrics
from otel_infer.semconv.attributes import *
from otel_infer.semconv.causes import *
from otel_infer.semconv.device_metrics import *
from otel_infer.semconv.metrics import *
from otel_infer.semconv.metrics import Metric
from otel_infer.semconv.spans import *

METRICS: tuple[Metric, ...] = tuple(
    value
    for module in (metrics, device_metrics)
    for value in vars(module).values()
    if isinstance(value, Metric)
)
"""All of them, in the order in which docs show them."""
