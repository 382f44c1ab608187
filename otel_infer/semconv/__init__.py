"""Defines every span, attribute and metric name on the wire, with unit, buckets and meaning.

Names of the OpenTelemetry conventions are used unchanged: semantic-conventions v1.44 for `http.*`, `error.*`,
`hw.*` and `server.*`; semantic-conventions-genai, which is in development, for `gen_ai.*`. Names that no
convention defines are under `infer.*`. Dashboards, alerts, docs and tests read names from here.
"""

from __future__ import annotations

from otel_infer.semconv import device_metrics, http_metrics, metrics, service_metrics
from otel_infer.semconv.attributes import *
from otel_infer.semconv.causes import *
from otel_infer.semconv.complaints import *
from otel_infer.semconv.device_metrics import *
from otel_infer.semconv.http_metrics import *
from otel_infer.semconv.metrics import *
from otel_infer.semconv.metrics import Metric
from otel_infer.semconv.service_metrics import *
from otel_infer.semconv.spans import *

METRICS: tuple[Metric, ...] = tuple(
    value
    for module in (metrics, service_metrics, http_metrics, device_metrics)
    for value in vars(module).values()
    if isinstance(value, Metric)
)
"""All metrics, in the order in which docs list them."""
