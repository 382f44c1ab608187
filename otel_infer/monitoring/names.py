"""Names that dashboards, alerts and the client of Grafana share."""

from __future__ import annotations

from otel_infer import semconv
from otel_infer.semconv import prometheus

TAG = "otel-infer"
"""The tag of our dashboards in Grafana."""
UID_PREFIX = "otel-infer-"
"""Begins the uid of each of our dashboards."""
ALERT_PREFIX = "OtelInfer"
"""Begins the name of each of our alerts."""
PRESENCE_SERIES = prometheus.series_names(semconv.SELF_MEMORY)[0]
"""A series that every running sidecar exports."""
